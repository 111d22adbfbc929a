"""How far the stages of a pipeline overlap: each stage sleeps in its program, so it is a device that takes its time.

    python benchmarks/pipeline.py [--stages 2 4] [--milliseconds 20] [--json]

Needs JAX and a C++ compiler. What sleeps is an operation of the compiled program, of which JAX knows nothing: a Python
callback would have JAX wait before it goes on. B batches through p stages of s seconds take (B + p - 1) s where stages
overlap ideally, and B p s where they take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

MOST = 8  # stages
# threads of XLA, which sleep too; read when JAX starts
os.environ.setdefault("NPROC", str(2 * MOST))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from octavo.engine import LLM, SamplingParams  # noqa: E402
from octavo.models import llama  # noqa: E402
from octavo.models.interface import ModelSpec  # noqa: E402

jax.config.update("jax_num_cpu_devices", MOST)
NAME = "octavo_sleep"
SOURCE = """
#include <unistd.h>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Sleep(int64_t us, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  usleep(us);
  if (x.untyped_data() != y->untyped_data()) __builtin_memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_sleep, Sleep,
    ffi::Ffi::Bind().Attr<int64_t>("us").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


def register_sleep(folder: Path) -> None:
    """Compiles the operation, and makes it known to XLA."""
    source, library = folder / "sleep.cc", folder / "sleep.so"
    source.write_text(SOURCE)
    include = f"-I{jax.ffi.include_dir()}"
    subprocess.run(["g++", "-w", "-O1", "-std=c++17", "-fPIC", "-shared", include, source, "-o", library], check=True)
    handler = ctypes.CDLL(str(library)).octavo_sleep
    jax.ffi.register_ffi_target(NAME, jax.ffi.pycapsule(handler), platform="cpu")


def sleeping(layer: Any, us: int, *args: Any, **kwargs: Any) -> Any:
    """A layer that takes so long."""
    x_TE, cache = layer(*args, **kwargs)
    call = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(x_TE.shape, x_TE.dtype), input_output_aliases={0: 0})
    return call(x_TE, us=np.int64(us)), cache


def model_of(stages: int, seconds: float) -> ModelSpec:
    """One small layer a stage."""
    config = llama.LlamaConfig(
        vocab_size=512, embed_dim=64, mlp_dim=64, num_layers=stages, num_heads=2, num_kv_heads=2, head_dim=32,
        max_model_len=256,
    )  # fmt: skip
    model = llama.spec(config)
    return replace(model, layer=partial(sleeping, model.layer, round(seconds * 1e6)))


def measure(stages: int, seconds: float, batches: int, tokens: int) -> dict[str, Any]:
    """Seconds of a generate whose requests make `batches` batches, two requests each, beside the ideal."""
    llm = LLM(
        model_of(stages, seconds), load_format="dummy", skip_tokenizer_init=True, backend="jax", max_model_len=128,
        pipeline_parallel_size=stages, max_num_seqs=2 * batches, num_gpu_blocks_override=16 * batches,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts, params = [[10 + i, 7, 9] for i in range(2 * batches)], SamplingParams(temperature=0, max_tokens=tokens)
    llm.generate(prompts, replace(params, max_tokens=3), use_tqdm=False)
    before, start = llm.scheduler.step, time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    took, count = time.perf_counter() - start, llm.scheduler.step - before
    ideal = (count + stages - 1) * seconds
    return {
        "stages": stages, "batches": count, "seconds": round(took, 3), "ideal": round(ideal, 3),
        "in_turn": round(count * stages * seconds, 3), "overlap": round(ideal / took, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], choices=range(2, MOST + 1))
    parser.add_argument("--milliseconds", type=float, default=20, help="that a stage takes")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        register_sleep(Path(folder))
        found = [measure(p, args.milliseconds / 1000, p, args.tokens) for p in args.stages]
    if args.json:
        where = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "jax": version("jax")}
        print(json.dumps({"milliseconds": args.milliseconds, **where, "runs": found}))
        return
    print(f"{'stages':>6} {'batches':>8} {'seconds':>8} {'ideal':>8} {'in turn':>8} {'overlap':>8}")
    for run in found:
        print("{stages:6} {batches:8} {seconds:8.2f} {ideal:8.2f} {in_turn:8.2f} {overlap:8.0%}".format(**run))


if __name__ == "__main__":
    main()
