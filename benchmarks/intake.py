"""What a generate costs the host around its steps: before the first is launched, in launches, waiting for the device.

    python benchmarks/intake.py [--backend torch] [--device none] [--model qwen3-0.6b] [--workloads prefill prefix]

Device "none" computes nothing (host.py): processor time, so that a busy machine does not count; on a GPU wall time, of
the second run of each workload, compiled lazily. Milliseconds; the best of `--runs`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from octavo.engine import LLM, SamplingParams, runner
from octavo.engine.bench.marks_worker import start
from octavo.engine.bench.workloads import NAMES, workload

VOCAB = 151936


class Watch:
    """Times of an engine's launches and readings."""

    def __init__(self, llm: LLM, clock: Any):
        self.clock, self.launches, self.reads, self.collections = clock, [], [], []
        launch, result = llm.runner.launch, runner.Pending.result

        def launched(*args: Any) -> Any:
            began = clock()
            found = launch(*args)
            self.launches.append((began, clock()))
            return found

        def read(pending: Any) -> Any:
            began = clock()
            found = result(pending)
            self.reads.append((began, clock()))
            return found

        def collected(phase: str, info: dict[str, int]) -> None:
            self.collections.append(clock() * (1 if phase == "stop" else -1))

        gc.callbacks.append(collected)
        llm.runner.launch, runner.Pending.result = launched, read  # type: ignore[method-assign]

    def run(self, llm: LLM, name: str) -> dict[str, float]:
        """Milliseconds of one workload."""
        requests = workload(name, VOCAB)
        llm.reset_prefix_cache()
        self.launches.clear()
        self.reads.clear()
        self.collections.clear()
        began = self.clock()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
        llm.generate([p for p, _ in requests], params, use_tqdm=False)
        ended = self.clock()
        found = {
            "all": ended - began,
            "before the first launch": self.launches[0][0] - began,
            "the first launch": self.launches[0][1] - self.launches[0][0],
            "the other launches": sum(end - start for start, end in self.launches[1:]),
            "waiting": sum(end - start for start, end in self.reads),
            "after the last read": ended - self.reads[-1][1],
            "collecting garbage": sum(self.collections),
        }
        return {"steps": float(len(self.launches)), **{what: round(1e3 * s, 1) for what, s in found.items()}}


def without_device() -> LLM:
    """An engine of the small shape whose programs compute nothing."""
    import host

    return host.engine(layers=28, vocab=VOCAB, blocks=272 * host.ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--device", choices=("none", "cuda"), default="none")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=["prefill", "prefix"])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.device == "none":
        llm, clock = without_device(), time.process_time
    else:
        llm, clock = start(args.backend, args.device, args.model, warmup="lazy"), time.perf_counter
    watch, found = Watch(llm, clock), {}
    for name in args.workloads:
        first, *rest = [watch.run(llm, name) for _ in range(args.runs + 1)]
        found[name] = {what: min(x[what] for x in rest) for what in first}
    about = {"backend": args.backend, "device": args.device, "python": platform.python_version()}
    out = os.environ.get("OUT")
    path = Path(out) / "intake.json" if out else Path(__file__).with_name("intake.json")
    path.write_text(json.dumps(about | found, indent=1))
    print(*("workload", *next(iter(found.values()))), sep=" | ")
    for name, row in found.items():
        print(name, *row.values(), sep=" | ")


if __name__ == "__main__":
    main()
