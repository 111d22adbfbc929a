"""Shared prefixes read once, and not: workloads whose requests begin alike, with one engine, both ways in turns.

    python benchmarks/prefixes.py --backend torch --model llama-8b [--slopes slopes_torch.json]

"prefix" is that of `octavo bench marks`; "three" has three prefixes; in "arriving" 512 requests of 256 at a time end
after 16 to 112 tokens, so that many steps admit somebody. --slopes measures slopes.py's points with the same engine
afterwards.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from slopes import BATCHES, save

from octavo.engine.bench.machine import machine
from octavo.engine.bench.marks_worker import start
from octavo.engine.bench.workloads import CONFIGS, Workload, random_ids, workload

ROUNDS = 2  # the first one compiles


def workloads(vocab: int) -> dict[str, Workload]:
    rng = random.Random(1)
    prefixes = [random_ids(rng, 2048, vocab) for _ in range(3)]
    return {
        "prefix": workload("prefix", vocab),
        "three": [(prefixes[i % 3] + random_ids(rng, 64, vocab), 64) for i in range(256)],
        "arriving": [(prefixes[0] + random_ids(rng, 64, vocab), rng.randrange(16, 113)) for _ in range(512)],
    }


def run(llm: Any, requests: Workload) -> tuple[float, list[list[int]]]:
    """Output tokens a second, and the tokens."""
    from octavo.engine import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate([p for p, _ in requests], params, use_tqdm=False)
    took = time.perf_counter() - started
    return sum(n for _, n in requests) / took, [list(o.outputs[0].token_ids) for o in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--model", choices=list(CONFIGS), default="llama-8b")
    parser.add_argument("--names", nargs="+", default=["prefix", "three", "arriving"])
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--wait", type=Path, help="start measuring when this file is there")
    parser.add_argument("--done", type=Path, help="make this file at the end")
    parser.add_argument("--slopes", type=Path)
    parser.add_argument("--seconds", type=float, default=30, help="of the slopes")
    args = parser.parse_args()
    config = CONFIGS[args.model]
    more = {"max_model_len": config["max_position_embeddings"], "max_num_seqs": max(BATCHES)} if args.slopes else {}
    llm = start(args.backend, "cuda", args.model, **({"warmup": "lazy"} | more | args.engine))
    prefixes, all_workloads = llm.runner.prefixes, workloads(config["vocab_size"])
    while args.wait and not args.wait.exists():
        time.sleep(0.1)
    for name in args.names:
        found: dict[str, Any] = {"model": args.model, "workload": name}
        tokens = {}
        for shared in (True, False):
            # without its finder the runner runs the programs of a step that shares nothing
            llm.runner.prefixes = prefixes if shared else None
            for _ in range(ROUNDS):
                rate, tokens[shared] = run(llm, all_workloads[name])
            found["shared" if shared else "apart"] = round(rate, 1)
        llm.runner.prefixes = prefixes
        found["same"] = sum(a == b for a, b in zip(tokens[True], tokens[False], strict=True)), len(tokens[True])
        print(json.dumps(found), flush=True)
    if args.slopes:
        save(args.slopes, llm, args.backend, args.model, machine(args.backend, "cuda"), args.seconds)
    if args.done:
        args.done.touch()


if __name__ == "__main__":
    main()
