"""Decode steps whose products find the beginning of their weights in the cache (kernels_triton/weights_ahead.py).

    python benchmarks/weights_ahead.py [--models llama-8b qwen3-0.6b qwen3-30b-a3b] [--seconds 25] [--out FILE]

Each model in a process of its own, dummy weights, torch path. Of a step of 1 sequence: how many bytes are asked for,
and from where; then, with the best of those, how; then 8 and 64 sequences. Graphs are recorded anew between. A step's
time is the median of what steps take while the queue is full (in brackets the middle half); "off" is measured first and
last. Tokens, and a hash of the last step's logits, must be those of "off". "0 MB" asks for 16 kB: what asking costs.
After `--seconds` no more of a model is measured. Writes JSON into $OUT, where that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.engine.bench.machine import machine
from octavo.engine.bench.marks_worker import start
from octavo.engine.bench.workloads import CONFIGS, random_ids
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.kernels_triton import weights_ahead
from octavo.kernels_triton.few_rows import device_name
from octavo.kernels_triton.weights_ahead import Asking
from octavo.models.sampling import PARAMS

MODELS = ("llama-8b", "qwen3-0.6b")
CONTEXT, STEPS, WARM = 200, 40, 4
NOTHING = 1 << 14  # bytes that cost no time of memory
SIZES = tuple(n << 20 for n in (4, 8, 16, 32, 48))
ROWS = 64  # the most rows of a product behind which weights are asked for
TRIED = {"within": (NOTHING, *SIZES), "between": (NOTHING, SIZES[1], SIZES[3]), "beside": (NOTHING, SIZES[1], SIZES[3])}


class Steps(NamedTuple):
    """What steps took, in us: the median, and the middle half; what came out, for comparing."""

    us: float
    low: float
    high: float
    tokens: list[list[int]]
    digests: list[int] | None


def ask(how: Asking | None) -> None:
    """From now on, recordings ask so."""
    weights_ahead.TABLE[device_name(torch.device("cuda"))] = {} if how is None else {ROWS: how}


def record_anew(llm: Any) -> None:
    """Drops all recordings."""
    torch.cuda.synchronize()
    for program in llm.backend.programs:
        program.forget()
    llm.backend.capture.renew()
    torch.cuda.empty_cache()


def steps(llm: Any, batch: int, vocab: int) -> Steps:
    """Of so many sequences, the same whenever it is called."""
    runner, rng, rows = llm.runner, random.Random(batch), range(batch)
    each = -(-(CONTEXT + STEPS + WARM + 2) // runner.block_size)
    params = (0.0,) * len(PARAMS)
    admitted = tuple(
        Admission(r, tuple(random_ids(rng, CONTEXT + 1, vocab)), CONTEXT, CONTEXT + 1, (0, 0), params) for r in rows
    )
    writes = tuple(
        TableWrite(g, r, 0, tuple(range(1 + r * each, 1 + (r + 1) * each)))
        for g in range(len(runner.tables))
        for r in rows
    )

    def plan(i: int, **more: Any) -> Plan:
        return Plan(i, tuple(Chunk(str(r), r, CONTEXT + i, 1, True) for r in rows), **more)

    tokens, ends = [], []
    pending = runner.launch(plan(0, admitted=admitted, table_writes=writes))
    for i in range(1, STEPS + WARM):
        following = runner.launch(plan(i))
        tokens.append(pending.result().token_ids)
        ends.append(time.perf_counter())
        pending = following
    tokens.append(pending.result().token_ids)
    took = sorted(1e6 * (b - a) for a, b in zip(ends[WARM:], ends[WARM + 1 :]))
    runner.digest = True
    last = runner.launch(plan(STEPS + WARM)).result()
    runner.digest = False
    middle = [took[len(took) * n // 4] for n in (2, 1, 3)]
    return Steps(*(round(us, 1) for us in middle), [*tokens, last.token_ids], last.digests)


class Measured:
    """Rows of a model's table, until the time is up."""

    def __init__(self, llm: Any, model: str, seconds: float):
        self.llm, self.vocab, self.until = llm, CONFIGS[model]["vocab_size"], time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []
        self.first: dict[int, Steps] = {}

    def __call__(self, batch: int, how: Asking | None) -> float:
        """Microseconds of a step; infinite where the time was up, or it failed."""
        if time.perf_counter() > self.until and batch in self.first:
            return float("inf")
        ask(how)
        try:
            record_anew(self.llm)
            found = steps(self.llm, batch, self.vocab)
        except RuntimeError as error:
            # a graph that CUDA does not take: the other ways are still of use
            print(batch, how, error, flush=True)
            return float("inf")
        first = self.first.setdefault(batch, found)
        same = found.tokens == first.tokens and found.digests == first.digests
        row = {"batch": batch, "us": found.us, "low": found.low, "high": found.high, "same": same, **described(how)}
        self.rows.append(row)
        print(line(row, first.us), flush=True)
        return found.us


def described(how: Asking | None) -> dict[str, Any]:
    return {"off": True} if how is None else how._asdict()


def line(row: dict[str, Any], off: float) -> str:
    if "off" in row:
        how = f"{'off':>32}"
    else:
        way = ("pieces" if row["bulk"] else "lines") + (", kept" if row["keep"] else "")
        how = f"{row['place']:>8}{row['most_bytes'] >> 20:>3} MB{row['programs']:>4} x {way:<12}"
    same, more = "same" if row["same"] else "OTHER TOKENS OR LOGITS", 100 * (row["us"] / off - 1)
    return (
        f"{row['batch']:>3} {how:<36}{row['us']:>8.1f} us ({row['low']:.1f} - {row['high']:.1f}){more:>+7.2f} %  {same}"
    )


def ways(best: Asking) -> Iterator[Asking]:
    """Others of asking for as much from there."""
    yield best._replace(keep=True)
    yield best._replace(programs=8)
    yield best._replace(programs=128)
    yield best._replace(bulk=False, programs=128)
    yield best._replace(bulk=False, programs=128, keep=True)


def sweep(measured: Measured) -> None:
    measured(1, None)
    asked = [Asking(size, place) for place, sizes in TRIED.items() for size in sizes]
    found = {how: measured(1, how) for how in asked}
    best = min(found, key=lambda how: found[how])
    found |= {how: measured(1, how) for how in ways(best)}
    best = min(found, key=lambda how: found[how])
    measured(1, None)
    for batch in (8, 64):
        measured(batch, None)
        for size in SIZES:
            measured(batch, best._replace(most_bytes=size))
        measured(batch, None)


def measure(model: str, seconds: float, out: Path) -> None:
    """One model, in this process."""
    started = time.perf_counter()
    more = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**32}
    llm = start("torch", "cuda", model, **more, warmup="lazy")
    print(model, f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    measured = Measured(llm, model, seconds)
    try:
        sweep(measured)
    finally:
        value = (
            json.loads(out.read_text()) if out.exists() else {"machine": machine("torch", "cuda"), "context": CONTEXT}
        )
        out.write_text(json.dumps(value | {model: measured.rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=MODELS)
    parser.add_argument("--seconds", type=float, default=25, help="of measuring a model")
    default = Path(os.environ["OUT"]) if "OUT" in os.environ else Path(__file__).parent
    parser.add_argument("--out", type=Path, default=default / "weights_ahead.json")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return measure(args.models[0], args.seconds, args.out)
    failed = []
    for model in args.models:
        own = ["--models", model, "--seconds", str(args.seconds), "--out", str(args.out), "--here"]
        failed += [model] if subprocess.run([sys.executable, __file__, *own]).returncode else []
    for model, rows in (json.loads(args.out.read_text()) if args.out.exists() else {}).items():
        if model in args.models:
            print(f"\n{model}, us a step, beside the first without asking")
            off = {r["batch"]: r["us"] for r in reversed(rows) if "off" in r}
            print("\n".join(line(row, off[row["batch"]]) for row in rows))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
