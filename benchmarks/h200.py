"""The marks on one H200 GPU: correctness first, then attention alone, then the seeded workloads, one table last.

    python benchmarks/h200.py --backend torch [--models llama-8b qwen3-0.6b] [--parts check attention decode-1 ...]

Every part's numbers are kept in --out (JSON) as they are made; a part that is there is not run again (--again does).
Each model runs in a process of its own, whose time from start to ready is the start-up. Output tokens a second over the
wall time of one `generate` after warm-up="all"; of "prefill", input tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# run as a file: its own folder is on the path
from common import gpu, software
from workloads import CONFIGS, NAMES, workload, write_config

# vLLM 0.26.0 on the same card and workloads, and what we want to reach on torch and on JAX
VLLM: dict[str, dict[str, float]] = {
    "llama-8b": {
        "startup": 69, "decode-1": 205, "decode-64": 9460, "prefill": 41100, "offline": 9050, "prefix": 8600,
    },
    "qwen3-0.6b": {
        "startup": 77, "decode-1": 376, "decode-64": 22400, "prefill": 326000, "offline": 13500, "prefix": 14500,
    },
    "qwen3-30b-a3b": {"startup": 92, "decode-1": 241, "decode-64": 3500, "offline": 5100},
}  # fmt: skip
MARKS: dict[str, dict[str, dict[str, float]]] = {
    "torch": {
        "llama-8b": {
            "startup": 20, "decode-1": 235, "decode-64": 11000, "prefill": 41000, "offline": 10000, "prefix": 12000,
        },
        "qwen3-0.6b": {
            "startup": 15, "decode-1": 1000, "decode-64": 32000, "prefill": 340000, "offline": 27000, "prefix": 28000,
        },
        "qwen3-30b-a3b": {"decode-1": 270, "decode-64": 4500, "offline": 6500},
    },
    "jax": {
        "llama-8b": {
            "startup": 45, "decode-1": 230, "decode-64": 10800, "prefill": 40000, "offline": 9800, "prefix": 12000,
        },
        "qwen3-0.6b": {
            "startup": 40, "decode-1": 850, "decode-64": 30000, "prefill": 330000, "offline": 25000, "prefix": 25000,
        },
        "qwen3-30b-a3b": {"decode-1": 216, "decode-64": 3600, "offline": 5200},
    },
}  # fmt: skip
# seconds until ready once the caches of compiled kernels are filled
WARM = {"torch": {"llama-8b": 10, "qwen3-0.6b": 8}, "jax": {"llama-8b": 12, "qwen3-0.6b": 10}}
# name: (sequences, tokens each), and FlashAttention-3's GB/s or TFLOP/s there
DECODE = {
    "decode 1 x 8192": (1, 8192, 821),
    "decode 1 x 32768": (1, 32768, 2454),
    "decode 8 x 8192": (8, 8192, 3212),
    "decode 16 x 4096": (16, 4096, 3245),
    "decode 64 x 4096": (64, 4096, 4068),
    "decode 256 x 1024": (256, 1024, 3770),
}
# the int8 layout is to be 1.6 times as fast as bfloat16 at this size
NARROW = {"decode 64 x 4096 int8": (64, 4096, "int8"), "decode 64 x 4096 fp8": (64, 4096, "float8_e4m3fn")}
PREFILL = {"prefill 1 x 4096": (1, 4096, 575), "prefill 2 x 4096": (2, 4096, 542), "prefill 1 x 16384": (1, 16384, 603)}
ENGINE = {"max_model_len": 4352, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "warmup": "all"}
AFTER = ("identical", "profile")  # in a process of their own, which starts with warm caches
WORKER_PARTS = (*NAMES, *AFTER)
PARTS = ("check", "attention", *WORKER_PARTS)


class Results:
    """Numbers by backend, model ("" for none) and part, in a JSON file."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def put(self, key: str, value: Any) -> None:
        # another process may have added its own
        self.values = (json.loads(self.path.read_text()) if self.path.exists() else {}) | {key: value}
        self.path.write_text(json.dumps(self.values, indent=1))
        print(key, json.dumps(value), flush=True)


def machine(backend: str) -> dict[str, Any]:
    names = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib")}[backend]
    return {"gpu": gpu("name", "driver_version")} | software(*names, "numpy")


def start(backend: str, model: str, **more: Any) -> Any:
    from octavo.engine import LLM

    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "backend": backend, "device": "cuda"}
    return LLM(write_config(model), **(arguments | ENGINE | more))


def run_workload(llm: Any, name: str, vocab: int) -> dict[str, float]:
    """Tokens a second of one workload."""
    from octavo.engine import SamplingParams

    requests = workload(name, vocab)
    prompts, counts = [p for p, _ in requests], [n for _, n in requests]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    llm.reset_prefix_cache()
    before, started = llm.backend.num_compiles(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(o.outputs[0].token_ids) for o in outputs] == counts
    tokens = sum(map(len, prompts)) if name == "prefill" else sum(counts)
    return {"tok_s": round(tokens / seconds, 1), "seconds": round(seconds, 3),
            "compiles": llm.backend.num_compiles() - before, "preemptions": llm.scheduler.num_preemptions}  # fmt: skip


def run_identical(backend: str, model: str, vocab: int) -> dict[str, Any]:
    """Overlapped and synchronous runs of a quarter of the offline workload give the same tokens."""
    from octavo.engine import SamplingParams

    requests = workload("offline", vocab)[:256]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    found = []
    for overlap in (True, False):
        llm = start(backend, model, async_scheduling=overlap, warmup="lazy", kv_cache_memory_bytes=2**33)
        outputs = llm.generate([p for p, _ in requests], params, use_tqdm=False)
        found.append([list(o.outputs[0].token_ids) for o in outputs])
        del llm
    same = sum(a == b for a, b in zip(*found))
    return {"equal": same == len(requests), "same": same, "of": len(requests)}


def work(args: argparse.Namespace, began: float) -> None:
    """The parts of one model, in this process."""
    (model,), results, vocab = args.models, Results(args.out), CONFIGS[args.models[0]]["vocab_size"]
    named = f"{args.backend}/{model}/"
    parts = [p for p in args.parts if p in WORKER_PARTS and (args.again or named + p not in results)]
    if not parts:
        return
    llm = start(args.backend, model)
    # the second process finds what the first has compiled
    warm = named + "startup" in results and not args.again
    results.put(
        named + ("startup-warm" if warm else "startup"),
        {"seconds": round(time.time() - began, 2), "compiles": llm.backend.num_compiles()},
    )
    if not warm:
        results.put(named + "memory", {"plan": llm.memory_plan.total_bytes, "blocks": llm.memory_plan.num_blocks})
    for part in parts:
        if part in NAMES:
            results.put(named + part, run_workload(llm, part, vocab))
        elif part == "profile":
            from profile_step import profile

            results.put(named + part, profile(llm, args.backend, vocab))
    if not warm and (measured := memory_peak(args.backend)):
        results.put(named + "memory", results.values[named + "memory"] | {"peak": measured})
    if "identical" in parts:
        del llm
        results.put(named + "identical", run_identical(args.backend, model, vocab))


def memory_peak(backend: str) -> int | None:
    """Bytes that the process had at most on the device."""
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_reserved()
    import jax

    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def table(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Everything measured, beside vLLM's and the marks."""
    print("\n" + json.dumps(values.get("machine", {})))
    print(f"{'':32}{'octavo ' + args.backend:>16}{'vLLM 0.26':>12}{'mark':>10}")
    for model in CONFIGS:
        for part in ("startup", *NAMES):
            found = values.get(f"{args.backend}/{model}/{part}")
            if found:
                ours, mark = found.get("tok_s", found.get("seconds")), MARKS[args.backend][model].get(part, "")
                print(f"{model + ' ' + part:32}{ours:>16}{VLLM[model].get(part, ''):>12}{mark:>10}")
        if warm := values.get(f"{args.backend}/{model}/startup-warm"):
            print(f"{model + ' startup, warm':32}{warm['seconds']:>16}{'-':>12}{WARM[args.backend].get(model, ''):>10}")
    for name, found in values.get(f"{args.backend}//attention", {}).items():
        print(
            f"{'attention ' + name:32}{found['rate']:>16}{found['unit']:>12}"
            f"  FA3 {found['fa3']}, error {found['error']}"
        )


def main() -> None:
    # from the process's start: imports are a part of the start-up
    began = time.time() - time.process_time() if "--worker" in sys.argv else time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=["llama-8b", "qwen3-0.6b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("h200.json"))
    parser.add_argument("--again", action="store_true", help="run parts again that are in --out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args, began)
    results = Results(args.out)
    results.put("machine", machine(args.backend))
    from h200_checks import CHECKS

    for part in ("check", "attention"):
        key = f"{args.backend}//{part}"
        if part in args.parts and (args.again or key not in results):
            results.put(key, CHECKS[part](args.backend))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for model in args.models:
        own = ["--worker", "--backend", args.backend, "--models", model, "--out", str(args.out)]
        more = ["--again"] if args.again else []
        for kinds in (NAMES, AFTER):
            if parts := [p for p in args.parts if p in kinds]:
                subprocess.run([sys.executable, __file__, *own, "--parts", *parts, *more], check=False)
    table(args, Results(args.out).values)


if __name__ == "__main__":
    main()
