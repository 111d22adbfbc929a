"""Step time of decoding against context (1k to 128k) and batch (1 to 512), and two plots with the bandwidth floor in.

    python benchmarks/slopes.py --backend torch [--model llama-8b] [--out slopes_torch.json]
    python benchmarks/slopes.py --draw slopes_torch.json

A point: rows are told that so many tokens are computed (their keys are whatever the blocks hold), then steps are
launched one behind the other; the median of what a step takes while the queue is full. The floor is what must be read,
weights and keys and values, at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from octavo.engine.bench.machine import gpu, machine
from octavo.engine.bench.marks_worker import start
from octavo.engine.bench.workloads import CONFIGS
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.models.sampling import PARAMS

COPY = 4.3e12  # bytes a second, of a large copy on an H200
STEPS, WARM = 12, 3
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
AGAINST_CONTEXT, AGAINST_BATCH = (1, 8, 64), (1024, 4096)  # batches of one plot's lines, contexts of the other's


def points(num_tokens: int, longest: int) -> list[tuple[int, int]]:
    """(batch, context) of every point that fits in a cache of so many tokens."""
    lines = [(b, c) for b in AGAINST_CONTEXT for c in CONTEXTS] + [(b, c) for c in AGAINST_BATCH for b in BATCHES]
    fits = {(b, min(c, longest - STEPS - WARM - 1)) for b, c in lines if b * c <= num_tokens}
    return sorted(fits)


def bytes_read(config: dict[str, Any], batch: int, context: int) -> float:
    """What a step must read in 16 bits: each weight once but for the embeddings, each sequence's keys and values."""
    e, f, heads, kv, d = (
        config[n]
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = e * d * (heads + 2 * kv) + heads * d * e + 3 * e * f
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * e
    return 2.0 * (weights + batch * context * config["num_hidden_layers"] * 2 * kv * d)


def measure(llm: Any, batch: int, context: int) -> float:
    """Milliseconds of a decode step."""
    runner, size = llm.runner, llm.runner.block_size
    each = -(-(context + STEPS + WARM + 1) // size)
    rows = range(batch)
    admitted = tuple(Admission(r, (0,), context, 1, (0, 0), (0.0,) * len(PARAMS)) for r in rows)
    writes = tuple(
        TableWrite(g, r, 0, tuple(range(1 + r * each, 1 + (r + 1) * each)))
        for g in range(len(runner.tables))
        for r in rows
    )

    def plan(i: int, **more: Any) -> Plan:
        return Plan(i, tuple(Chunk(str(r), r, context + i, 1, True) for r in rows), **more)

    pending = runner.launch(plan(0, admitted=admitted, table_writes=writes))
    pending.result()
    ends = []
    for i in range(1, STEPS + WARM):
        following = runner.launch(plan(i))
        pending.result()
        ends.append(time.perf_counter())
        pending = following
    pending.result()
    took = sorted(b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:]))
    return 1000 * took[len(took) // 2]


def measure_all(llm: Any, config: dict[str, Any], seconds: float) -> list[dict[str, float]]:
    """Every point that fits, the small ones first, until the time is up."""
    runner, found, until = llm.runner, [], time.perf_counter() + seconds
    num_tokens = min((n - 1) * runner.block_size for n in llm.memory_plan.num_blocks)
    for batch, context in points(num_tokens, llm.memory_plan.max_model_len):
        # whole blocks for the tokens of the measured steps too
        whole = batch * (context + STEPS + WARM + 2 * runner.block_size)
        if batch > runner.scratch or whole > num_tokens:
            continue
        if time.perf_counter() > until:
            print("time is up at", batch, context, flush=True)
            break
        found.append({"batch": batch, "context": context, "ms": round(measure(llm, batch, context), 3),
                      "floor_ms": round(1000 * bytes_read(config, batch, context) / COPY, 3)})  # fmt: skip
        print(found[-1], flush=True)
    return found


def draw(path: Path) -> None:
    """Two plots beside the JSON file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    value = json.loads(path.read_text())
    found = value["points"]
    for along, across, lines in (("context", "batch", AGAINST_CONTEXT), ("batch", "context", AGAINST_BATCH)):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for n, line in enumerate(lines):
            of_line = sorted((p for p in found if p[across] == line), key=lambda p: p[along])
            x = [p[along] for p in of_line]
            axes.plot(x, [p["ms"] for p in of_line], "o-", color=f"C{n}", label=f"{across} {line}")
            axes.plot(x, [p["floor_ms"] for p in of_line], ":", color=f"C{n}")
        axes.plot([], [], "k:", label=f"bytes at {COPY / 1e12} TB/s")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel({"context": "context, tokens", "batch": "batch, sequences"}[along])
        axes.set_ylabel("ms a decode step")
        # of several cards in a machine, one is measured
        axes.set_title(f"{value['model']} shape, bf16, {value['backend']}, {value['gpu'].splitlines()[0]}")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
        figure.savefig(path.with_name(f"{path.stem}_{along}.png"), dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--model", choices=list(CONFIGS), default="llama-8b")
    parser.add_argument("--out", type=Path, default=Path("slopes.json"))
    parser.add_argument("--seconds", type=float, default=60, help="of measuring; what does not fit is left out")
    parser.add_argument("--draw", type=Path, help="only draw this file")
    args = parser.parse_args()
    if args.draw:
        return draw(args.draw)
    config = CONFIGS[args.model]
    length = config["max_position_embeddings"]
    llm = start(args.backend, "cuda", args.model, max_model_len=length, max_num_seqs=max(BATCHES), warmup="lazy")
    save(args.out, llm, args.backend, args.model, machine(args.backend, "cuda"), args.seconds)


def save(path: Path, llm: Any, backend: str, model: str, on: dict[str, Any], seconds: float) -> None:
    """Measures and writes the JSON file that `draw` reads."""
    found = measure_all(llm, CONFIGS[model], seconds)
    value = {"backend": backend, "model": model, "gpu": gpu("name"), "machine": on, "points": found}
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
