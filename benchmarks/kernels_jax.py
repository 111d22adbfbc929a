"""The kernels that XLA makes of a step for an H200, on a machine without a GPU: launches counted, copies seen.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir=$CUDA" \
        python benchmarks/kernels_jax.py --model qwen3-0.6b --kind decode --size 64 [--layers 4] [--triton-gemm]

Wants jax-cuda13-plugin with jax-cuda13-pjrt, and nvidia-cuda-nvcc and nvidia-nvvm, whose folder (.../nvidia/cu13) is
$CUDA, its bin on the PATH. Nothing is measured, so what XLA would choose by measuring is not shown.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import octavo.engine.backend_jax  # noqa: F401  (makes our dataclasses pytrees)
from octavo.engine.bench.workloads import CONFIGS
from octavo.engine.runner import cache_specs
from octavo.kernels_pallas import mosaic_gpu
from octavo.kernels_pallas.ops import JaxOps
from octavo.models import step
from octavo.models.interface import CacheState, Sampling, StepInput, map_tree
from octavo.models.layouts import LAYOUTS
from octavo.models.registry import spec_from_hf

# as jax.experimental.topologies wants it: xla/service/gpu's GpuTargetConfigProto
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H200"
"""
SEQS, WIDTH, BLOCKS = 256, 272, 4096
NO_KERNEL = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


def compiled(model: Any, kind: str, size: int, options: dict[str, Any]) -> Any:
    """The program of one step, for the GPU that is not there."""
    topology = topologies.get_topology_desc(topology_name="", platform="cuda", target_config=H200, topology="1x1x1")
    here = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def of(spec: Any) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or "bfloat16"), sharding=here)

    def ids(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=here)

    layout, ops = LAYOUTS["token_major"](16), JaxOps().in_place()
    specs = cache_specs(model, layout, [BLOCKS] * len(model.groups), SEQS, 16 * WIDTH)
    weights, cache = map_tree(of, model.weights), CacheState(map_tree(of, specs.groups), map_tree(of, specs.rows))
    given = {"ops": ops, "model": model, "layout": layout, "max_num_seqs": SEQS}
    seqs = SEQS if kind == "mixed" else size
    tables = tuple(ids(seqs, WIDTH) for _ in model.groups)
    inputs, sampling = (
        StepInput(ids(seqs), ids(seqs + 1), tables, size, kind != "mixed"),
        Sampling(ids(size), ids(size), "greedy"),
    )
    program, args = {
        "mixed": (partial(step.forward_all, **given), (weights, cache, inputs)),
        "decode": (partial(step.forward_and_head, **given), (weights, cache, inputs, sampling)),
    }[kind]
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(program, donate_argnums=1).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options or None)


def launches(text: str) -> Counter[str]:
    """Kernels of a compiled program's text, and how often each is launched."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if found := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line):
            name = found[2]
            bodies[name], entry = [], name if found[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name:
            bodies[name].append(line)
    counts: Counter[str] = Counter()

    def walk(body: str) -> None:
        for line in bodies[body]:
            found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) (\w[\w\-]*)\(", line)
            if not found or found[3] in NO_KERNEL:
                continue
            if called := re.search(r"to_apply=%?([\w.\-]+)", line) if found[3] == "call" else None:
                walk(called[1])
                continue
            target = re.search(r'custom_call_target="([^"]+)"', line)
            counts[f"{re.sub(r'[.0-9]+$', '', found[1])} {found[2][:60]} {target[1] if target else ''}"] += 1

    walk(entry)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--kind", choices=("decode", "mixed"), default="decode")
    parser.add_argument("--size", type=int, default=64, help="sequences of a decode step, tokens of a mixed one")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--triton-gemm", action="store_true", help="XLA's own products, where the engine takes cuBLAS's"
    )
    args = parser.parse_args()
    jax.devices("cpu")
    # kernels ask where they run
    jax.default_backend = lambda: "gpu"
    mosaic_gpu.is_hopper, mosaic_gpu._programs = lambda: True, lambda on_cpu: 132
    model = spec_from_hf(CONFIGS[args.model] | {"num_hidden_layers": args.layers})
    program = compiled(model, args.kind, args.size, {} if args.triton_gemm else {"xla_gpu_enable_triton_gemm": False})
    counts = launches(program.as_text())
    for name, count in counts.most_common():
        print(f"{count:6}  {name}")
    print(f"{counts.total():6}  in all; temporaries {program.memory_analysis().temp_size_in_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
