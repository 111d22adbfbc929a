"""octavo beside transformers' `generate` on a CPU: SmolLM2-135M, fp32, greedy, the same prompts in the same run.

    python benchmarks/compare_hf.py [--backend torch --backend jax] [--repeats 3] [--json]

32-token prompts, 64 new tokens, end-of-text ignored; 32 prompts at once, and one alone. The engines take turns, and
each figure is the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from octavo.engine import LLM, SamplingParams
from octavo.engine.bench.machine import software
from octavo.engine.loading.aliases import fetch

PROMPT, NEW, MANY = 32, 64, 32  # tokens, tokens, prompts
Run = Callable[[list[list[int]]], int]


def transformers_run() -> Run:
    """Static batching: every prompt has the same length, so nothing is padded."""
    path = fetch("smollm2")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def run(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].numel()

    return run


def octavo_run(backend: str) -> Run:
    llm = LLM("smollm2", backend=backend, max_model_len=256, max_num_seqs=MANY, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))

    return run


def measure(runs: dict[str, Run], repeats: int) -> dict[str, dict[str, float]]:
    """Median output tokens a second of each engine, for many prompts and for one."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 49000, (MANY, PROMPT)).tolist()
    times: dict[str, dict[str, list[float]]] = {name: {"32 at once": [], "single stream": []} for name in runs}
    for repeat in range(-1, repeats):
        for case, batch in (("32 at once", prompts), ("single stream", prompts[:1])):
            for name, run in runs.items():
                start = time.perf_counter()
                made = run(batch)
                assert made == len(batch) * NEW
                if repeat >= 0:
                    times[name][case].append(made / (time.perf_counter() - start))
    return {name: {case: round(statistics.median(t), 1) for case, t in cases.items()} for name, cases in times.items()}


def machine() -> dict[str, Any]:
    of_software = software("octavo", "torch", "transformers", "jax", "numpy")
    return {"cores": torch.get_num_threads(), "cpu": platform.processor()} | of_software


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = {f"octavo {b}": octavo_run(b) for b in args.backend or ("torch", "jax")}
    results = measure({"transformers": transformers_run()} | runs, args.repeats)
    if args.json:
        print(json.dumps({"machine": machine(), "tokens_per_second": results}))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"SmolLM2-135M fp32, {json.dumps(machine())}"
    table = Table("engine", "32 at once, tok/s", "single stream, tok/s", title=title)
    base = results["transformers"]
    for name, cases in results.items():
        table.add_row(name, *(f"{x:.1f} ({x / base[case]:.2f}x)" for case, x in cases.items()))
    Console().print(table)


if __name__ == "__main__":
    main()
