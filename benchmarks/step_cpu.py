"""Milliseconds of one step (forward and greedy head) of a SmolLM2-135M shape, weights random, either backend.

    python benchmarks/step_cpu.py --backend torch --rows 1 32 --context 100 512 --prefill 32 512 --json

A step is what Runner.launch does with one Plan, input building and reading the tokens included: median of --repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from octavo.engine.backend import get_backend
from octavo.engine.batch import Shapes
from octavo.engine.loading.cache_dir import cache_dir
from octavo.engine.loading.weights import dummy_weights
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.engine.runner import Runner
from octavo.models.layouts.paged import HeadMajor, TokenMajor
from octavo.models.llama import LlamaConfig, spec
from octavo.models.rope import RopeConfig
from octavo.models.sampling import PARAMS

SMOLLM2 = LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 2048, RopeConfig(theta=100_000.0), tied=True)
LAYOUTS = {"token": TokenMajor, "head": HeadMajor}


def make_runner(args) -> Runner:
    """A runner with room for the most rows at the longest context."""
    options = {"dtype": args.dtype, "attention": args.attention}
    if args.backend == "torch" and not args.no_native:
        options["compiled"] = str(cache_dir() / "compiled")
    backend = get_backend(args.backend, options)
    layout, rows = LAYOUTS[args.layout](args.block_size), max(args.rows)
    length = max([n + args.repeat + 3 for n in args.context] + [n + 1 for n in args.prefill])
    blocks = -(-length // args.block_size)
    model = spec(SMOLLM2)
    exact = getattr(backend, "eager", False)
    budget = max([*args.prefill, rows])
    shapes = Shapes.chain(rows, budget, length, args.block_size, model.vocab_size, exact=exact)
    return Runner(
        backend, model, layout, dummy_weights(model, backend), num_blocks=[1 + rows * blocks], max_num_seqs=rows,
        max_model_len=length, shapes=shapes,
    )  # fmt: skip


def admission(runner: Runner, row: int, known: int, computed: int, scatter: np.random.Generator | None) -> tuple:
    """A row with random tokens and its blocks: consecutive ones, or any if `scatter`."""
    tokens = np.random.default_rng(row).integers(0, runner.model.vocab_size, known)
    params = tuple(float(name == "top_p") for name in PARAMS)
    blocks = runner.tables[0].shape[1]
    ids = 1 + row * blocks + np.arange(blocks)
    if scatter is not None:
        ids = scatter.permutation(ids)
    count = runner.cache.groups[0][0]["k"].shape[0]
    ids = tuple(int(i) for i in ids if i < count)
    return Admission(row, tuple(map(int, tokens)), computed, known, (row, 1), params), TableWrite(0, row, 0, ids)


def timed(runner: Runner, plans: list[Plan]) -> dict[str, float]:
    """Median, least and first milliseconds over the plans; the first two are not counted."""
    spent = []
    for plan in plans:
        start = time.perf_counter()
        runner.launch(plan).result()
        spent.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(spent[2:]), "least_ms": min(spent[2:]), "first_ms": spent[0]}


def decode(runner: Runner, rows: int, context: int, args) -> dict[str, float]:
    rng = np.random.default_rng(0) if args.scatter else None
    admitted, writes = zip(*(admission(runner, r, context + 1, context, rng) for r in range(rows)), strict=True)
    plans = []
    for n in range(args.repeat + 2):
        chunks = tuple(Chunk(str(r), r, context + n, 1, True) for r in range(rows))
        plans.append(Plan(n, chunks, admitted if n == 0 else (), writes if n == 0 else ()))
    found = timed(runner, plans)
    return found | {"tokens_per_s": rows * 1e3 / found["median_ms"]}


def prefill(runner: Runner, tokens: int, args) -> dict[str, float]:
    admitted, write = admission(runner, 0, tokens, 0, None)
    plans = [Plan(n, (Chunk("0", 0, 0, tokens, True),), (admitted,), (write,)) for n in range(args.repeat + 2)]
    found = timed(runner, plans)
    return found | {"tokens_per_s": tokens * 1e3 / found["median_ms"]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", default="torch")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--attention", default="auto")
    p.add_argument("--layout", default="token", choices=LAYOUTS)
    p.add_argument("--block-size", type=int, default=16, help="tokens")
    p.add_argument("--rows", type=int, nargs="*", default=[1, 32])
    p.add_argument("--context", type=int, nargs="*", default=[100], help="tokens in the cache of each row")
    p.add_argument("--prefill", type=int, nargs="*", default=[], help="tokens of one prompt")
    p.add_argument("--scatter", action="store_true", help="a row's blocks lie in random order")
    p.add_argument("--no-native", action="store_true", help="torch's own ops alone")
    p.add_argument("--repeat", type=int, default=20)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    runner, found = make_runner(args), {}
    for rows in args.rows:
        for context in args.context:
            found[f"decode rows={rows} context={context}"] = decode(runner, rows, context, args)
    for tokens in args.prefill:
        found[f"prefill tokens={tokens}"] = prefill(runner, tokens, args)
    if args.json:
        print(json.dumps({"args": vars(args), "found": found}))
        return
    for name, f in found.items():
        print(f"{name:32} " + "  ".join(f"{k} {v:9.2f}" for k, v in f.items()))


if __name__ == "__main__":
    main()
