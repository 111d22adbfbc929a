"""Milliseconds of one attention op on a CPU, SmolLM2-135M heads (3 kv heads of 3 queries, 64 dims, blocks of 16, fp32).

    python benchmarks/attention_cpu.py --backend jax --json

Each time is that of a program of LAYERS attention ops, each with a cache of its own (so that none lies in a processor's
cache), over LAYERS: the median and the least of --repeat, and the processor time of all threads, which other work on
the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from octavo.engine.backend import get_backend
from octavo.engine.bench.steps import make_step
from octavo.models.interface import ArraySpec, AttentionSpec, Step

LAYERS, KV_HEADS, GROUP, DIM, BLOCK = 4, 3, 3, 64, 16
SPEC = AttentionSpec(KV_HEADS, GROUP, DIM, DIM, DIM**-0.5)
# name: tokens computed before, tokens of this step, width of the block table over what is needed
CASES = {
    "decode 1 x 512": ([511], [1], 1),
    "decode 1 x 2000": ([1999], [1], 1),
    "decode 32 x 128": ([127] * 32, [1] * 32, 1),
    "decode 32 x 512": ([511] * 32, [1] * 32, 1),
    "decode 32 x 128..872": (list(range(127, 872, 24)), [1] * 32, 1),
    "decode 32 x 100, wide table": ([99] * 32, [1] * 32, 4),
    "prefill 1 x 512": ([0], [512], 1),
    "prefill 8 x 64": ([0] * 8, [64] * 8, 1),
    "chunk 256 after 1024": ([1024], [256], 1),
    "mixed 31 decode, 225 prefill": ([511] * 31 + [0], [1] * 31 + [225], 1),
}


def tables_of(computed: list[int], counts: list[int], widen: int) -> np.ndarray:
    """Block tables [S, B], in random order, `widen` times as wide as the longest sequence needs."""
    width = -(-max(map(sum, zip(computed, counts, strict=True))) // BLOCK) * widen
    return np.random.default_rng(0).permutation(len(counts) * width).reshape(len(counts), width) + 1


def measure(backend: Any, case: tuple, order: str, repeat: int) -> dict[str, float]:
    """Milliseconds of one op."""
    computed, counts, widen = case
    tables = tables_of(computed, counts, widen)
    step, num_blocks = make_step(backend, tables, computed, counts, BLOCK), tables.size + 1
    rng = np.random.default_rng(0)
    shape = (num_blocks, BLOCK, KV_HEADS, DIM) if order == "n p k d" else (num_blocks, KV_HEADS, BLOCK, DIM)

    def normal(*shape: int) -> Any:
        return backend.place(rng.standard_normal(shape, np.float32), ArraySpec(shape, (None,) * len(shape)))

    def program(caches: list, q: Any, step: Step, *, ops: Any) -> tuple:
        ops = ops.for_step([step])
        # each op's output is the next one's query: none runs beside another
        for k, v in caches:
            q = ops.attention(q, k, v, order, step, SPEC)
        return q, caches

    run = backend.compile(program, ("caches", "q", "step"), ("q", "caches"), consumes="caches")
    caches = [(normal(*shape), normal(*shape)) for _ in range(LAYERS)]
    q, wall, cpu = normal(sum(counts), KV_HEADS, GROUP, DIM), [], []
    for n in range(repeat + 1):
        started, worked = time.perf_counter(), time.process_time()
        out, caches = run(caches, q, step)
        backend.read(out)
        if n:
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - worked)
    times = {"median_ms": statistics.median(wall), "least_ms": min(wall), "processor_ms": min(cpu)}
    return {name: round(t / LAYERS * 1e3, 4) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("jax", "torch"), required=True)
    parser.add_argument("--attention", nargs="+", default=["cpu", "reference"])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--order", choices=("n p k d", "n k p d"), default="n p k d")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in args.case:
        for attention in args.attention:
            backend = get_backend(args.backend, {"attention": attention})
            times = measure(backend, CASES[name], args.order, args.repeat)
            row = {"backend": args.backend, "case": name, "attention": attention, "order": args.order} | times
            print(
                json.dumps(row) if args.json else "  ".join(f"{v:<30}" if v == name else str(v) for v in row.values())
            )


if __name__ == "__main__":
    main()
