"""What a start of the JAX path spends its time on, warmup="all": a first one (cold), and one that finds its programs.

    python benchmarks/startup_jax.py [--model qwen3-0.6b] [--device cuda] [--starts cold warm alone]

Random weights, each start in a process of its own; "alone" is a cold one without processes that compile for it.
Seconds of wall time from the process on; tracing, lowering, compiling and loading are summed over the threads, "last"
is when the last of them was over, counted from the beginning of the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.engine.bench.workloads import CONFIGS

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
    "/octavo/saved/loaded": "loading",
}


class Clock:
    """When the parts of a start were over, and what JAX says it did meanwhile."""

    def __init__(self, began: float) -> None:
        self.last, self.parts, self.stages, self.slowest = began, {}, {}, []
        self.warm_up = began

    def part(self, name: str) -> None:
        now = time.time()
        self.parts[name], self.last = round(self.parts.get(name, 0) + now - self.last, 2), now

    def heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        name = STAGES.get(event)
        if name is None:
            return
        found = self.stages.setdefault(name, {"num": 0, "seconds": 0.0, "last": 0.0})
        found["num"] += 1
        found["seconds"] = round(found["seconds"] + duration_secs, 3)
        found["last"] = round(time.time() - self.warm_up, 2)
        if name in ("compiling", "loading"):
            self.slowest.append((round(duration_secs, 2), name, str(kwargs.get("fun_name", ""))))

    def around(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn, as a part; what was before it is the part before `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.part(f"before {name}")
            if name == "programs":
                self.warm_up = time.time()
            found = fn(*args, **kwargs)
            self.part(name)
            return found

        return call


def start(job: dict[str, Any]) -> dict[str, Any]:
    """One start in this process."""
    clock = Clock(job["began"])
    clock.part("Python, import octavo")
    import jax

    clock.part("import jax")
    jax.monitoring.register_event_duration_secs_listener(clock.heard)
    from octavo.engine import LLM, SamplingParams, build, runner
    from octavo.engine.bench.marks_worker import start as engine

    # of modules whose code is no part of a program: those may be changed
    if not job["processes"]:
        backends_of = build.backends_of

        def alone(*args: Any) -> list[Any]:
            found = backends_of(*args)
            found[0].processes = 0
            return found

        build.backends_of = alone
    build.find_platform = clock.around("client", build.find_platform)
    build.runner_on = clock.around("weights and cache", build.runner_on)
    runner.first_runs = clock.around("first runs", runner.first_runs)
    warm_up = runner.Runner.warm_up

    def timed(self: Any) -> int:
        self.backend.precompile = clock.around("programs", self.backend.precompile)
        return warm_up(self)

    runner.Runner.warm_up = timed
    llm: LLM = engine("jax", job["device"], job["model"], compile_cache_dir=job["cache"], **job["arguments"])
    clock.part("rest of the engine")
    seconds = round(time.time() - job["began"], 2)
    began = time.time()
    llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    first = round(time.time() - began, 2)
    saved = list(Path(job["cache"]).rglob("*.program"))
    return {
        "seconds": seconds,
        "first request": first,
        "parts": clock.parts,
        "stages": clock.stages,
        "slowest": sorted(clock.slowest, reverse=True)[:6],
        "blocks": list(llm.memory_plan.num_blocks),
        "kept": {"programs": len(saved), "MB": round(sum(f.stat().st_size for f in saved) / 1e6, 1)},
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Both starts side by side."""
    names = list(found)
    lines = ["".join(f"{x:>12}" for x in names) + "  seconds"]

    def line(label: str, values: list[Any]) -> None:
        lines.append("".join(f"{'-' if v is None else v:>12}" for v in values) + f"  {label}")

    for part in dict.fromkeys(p for r in found.values() for p in r["parts"]):
        line(part, [r["parts"].get(part) for r in found.values()])
    line("the engine is there", [r["seconds"] for r in found.values()])
    line("first request, two tokens", [r["first request"] for r in found.values()])
    for stage in STAGES.values():
        for what in ("num", "seconds", "last"):
            line(f"{stage}: {what}", [r["stages"].get(stage, {}).get(what) for r in found.values()])
    for name, r in found.items():
        lines.append(f"{name}: blocks {r['blocks']}, kept {r['kept']}, slowest {r['slowest']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(CONFIGS)}, or a folder with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--starts", nargs="+", default=["cold", "warm"])
    parser.add_argument("--arguments", type=json.loads, default={}, help="more of the engine's, as JSON")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print("FOUND", json.dumps(start(args.job)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.starts:
            cache = f"{folder}/{'alone' if name == 'alone' else 'programs'}"
            job = {"model": args.model, "device": args.device, "cache": cache, "arguments": args.arguments}
            job["processes"] = name != "alone"
            command = [sys.executable, __file__, "--job", json.dumps(job | {"began": time.time()})]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
            if done.returncode or not lines:
                raise RuntimeError(f"the {name} start ended with {done.returncode}: {done.stdout[-2000:]}")
            found[name] = json.loads(lines[0].removeprefix("FOUND "))
            print(name, json.dumps(found[name]), flush=True)
    out = Path(os.environ.get("OUT", Path(__file__).parent))
    (out / f"startup_jax_{Path(args.model).name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
