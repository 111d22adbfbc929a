"""Where the start-up of the torch path goes on a GPU, in seconds by phase: cold, warm, and warm beside a sampler.

    python benchmarks/startup_torch.py [--model qwen3-0.6b]

Each start is a process of its own, with warmup="all" and the arguments of `octavo bench marks`; "cold" has an empty
cache of Triton's, "rehearsed" has a full one, and "warm" remembers what was launched too; "listed" remembers that
alone. Phases exclude one another; what is between them is "rest". With the sampler, what the main thread does every
5 ms is counted. Numbers go to $OUT/startup_torch.json, or beside this file.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

EVERY = 0.005  # seconds between samples


class Clock:
    """Seconds and calls by phase; time within an inner phase is not the outer one's."""

    def __init__(self, began: float):
        self.seconds = defaultdict[str, float](float)
        self.calls: Counter[str] = Counter()
        self.stack, self.last, self.main = ["rest"], began, threading.get_ident()

    def enter(self, name: str) -> None:
        self._count()
        self.calls[name] += 1
        self.stack.append(name)

    def leave(self) -> None:
        self._count()
        self.stack.pop()

    def _count(self) -> None:
        now = time.time()
        self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    def watch(self, owner: Any, name: str, phase: str | Callable[..., str]) -> None:
        """Counts what the main thread does in owner.name; `phase` may be made of its arguments."""
        fn = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.main:
                return fn(*args, **kwargs)
            self.enter(phase if isinstance(phase, str) else phase(*args, **kwargs))
            try:
                return fn(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)


class Sampler(threading.Thread):
    """Counts where a thread is: the innermost function of ours, and the innermost of all."""

    def __init__(self, ident: int):
        super().__init__(daemon=True)
        self.ident_of, self.counts, self.done = ident, Counter[str](), threading.Event()

    def run(self) -> None:
        while not self.done.wait(EVERY):
            if frame := sys._current_frames().get(self.ident_of):
                self.counts[described(frame)] += 1


def described(frame: FrameType) -> str:
    inner = at = frame
    while at.f_back and not ("octavo" in at.f_code.co_filename and "benchmarks" not in at.f_code.co_filename):
        at = at.f_back
    names = [f"{Path(f.f_code.co_filename).name} {f.f_code.co_name}" for f in (at, inner)]
    return " | ".join(dict.fromkeys(names))


def watch_engine(clock: Clock) -> None:
    """Puts the phases of an engine's start under the clock."""
    import torch
    from triton.runtime.jit import JITFunction

    from octavo.engine import build, runner, runners, weights_source
    from octavo.engine.backend_torch import TorchBackend
    from octavo.engine.graph_torch import GraphPool, Inputs, Program
    from octavo.kernels_triton import ahead, remembered

    def name_of(program: Any) -> str:
        fn = program.fn.func
        return getattr(fn, "func", fn).__name__

    def within(what: str) -> Callable[..., str]:
        # the program is the innermost phase that has a name of one
        return lambda *_, **__: f"{what}: {of[-1]}"

    of = ["?"]
    call = Program._call

    def named(self: Program, xs: tuple[Any, ...], state: Any, addresses: tuple[int, ...], wanted: bool) -> Any:
        of.append(name_of(self))
        try:
            return call(self, xs, state, addresses, wanted)
        finally:
            of.pop()

    Program._call = named
    clock.watch(build, "open_checkpoint", "config read")
    clock.watch(build, "find_platform", "torch asked for a GPU")
    clock.watch(build, "device_memory", "CUDA begins")
    clock.watch(build, "backends_of", "backend made")
    clock.watch(TorchBackend, "free_memory", "free memory asked")
    clock.watch(build, "memory_plan", "memory plan")
    clock.watch(weights_source.WeightsSource, "first", "weights")
    clock.watch(runners, "_shapes", "shapes")
    clock.watch(runner, "empty_cache", "cache")
    clock.watch(TorchBackend, "rehearse", "rehearsal: the rest")
    clock.watch(Program, "rehearse", lambda program, *_: f"rehearsal: {name_of(program)}")
    clock.watch(remembered, "recall", "kernels recalled")
    clock.watch(subprocess.Popen, "communicate", "rehearsal: waiting for compilers")
    clock.watch(ahead, "load", "kernels loaded")
    clock.watch(Inputs, "__init__", "inputs: places")
    clock.watch(Inputs, "fill", "inputs: filled")
    clock.watch(GraphPool, "try_out", within("op by op"))
    clock.watch(GraphPool, "__call__", within("recording"))
    clock.watch(torch.cuda.CUDAGraph, "capture_begin", "recording begun")
    clock.watch(torch.cuda.CUDAGraph, "capture_end", "recording ended")
    clock.watch(runner, "first_runs", "first runs")
    # named by the phase around it, which says what it is launched for
    clock.watch(JITFunction, "run", lambda *_, **__: f"Triton launches, {clock.stack[-1].partition(':')[0]}")


def work(model: str, began: float, run: str, folder: str) -> dict[str, Any]:
    """One start-up, in this process."""
    clock = Clock(began)
    clock._count()
    clock.seconds["the interpreter"] = clock.seconds.pop("rest")
    sampler = Sampler(threading.get_ident())
    gc.callbacks.append(lambda phase, _: clock.enter("garbage collection") if phase == "start" else clock.leave())
    clock.enter("import octavo")
    from octavo.engine.begin_torch import begin
    from octavo.engine.bench.marks_worker import start
    from octavo.engine.collector import Paused

    clock.leave()
    if run == "sampled":
        sampler.start()
    clock.enter("import torch")
    begin(first_gpu=True)
    with Paused():
        import torch

    clock.leave()
    clock.enter("import the rest")
    from octavo.engine import build

    # lists of this benchmark's own
    setattr(build, "cache_dir", lambda: Path(folder))  # noqa: B010
    if run == "rehearsed":
        shutil.rmtree(Path(folder) / "compiled" / "triton", ignore_errors=True)
    clock.leave()
    clock.enter("put under the clock")
    watch_engine(clock)
    clock.leave()
    llm = start("torch", "cuda", model)
    clock._count()
    total = clock.last - began
    sampler.done.set()
    clock.enter("after it: device's arrears")
    torch.cuda.synchronize()
    clock.leave()
    return {
        "total": total,
        "compiles": llm.backend.num_compiles(),
        "seconds": dict(clock.seconds),
        "calls": dict(clock.calls),
        "samples": sampler.counts.most_common(30),
    }


def fresh(model: str, run: str, cache: str, lists: str) -> dict[str, Any]:
    """One start-up, in a process of its own, with these caches of Triton's and of ours."""
    job = json.dumps({"model": model, "began": time.time(), "run": run, "folder": lists})
    done = subprocess.run(
        [sys.executable, __file__, "--job", job], env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise ChildProcessError(f"a start-up of {model} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    for where, count in found["sampled"]["samples"]:
        print(f"{count * EVERY:7.2f}  {where}")
    names = dict.fromkeys(name for run in found.values() for name in run["seconds"])
    most = {name: max(run["seconds"].get(name, 0.0) for run in found.values()) for name in names}
    print(f"\n{'':42} {'calls':>6} " + " ".join(f"{run:>8}" for run in found))
    for name in sorted(names, key=lambda name: -most[name]):
        if most[name] >= 0.01:
            seconds = " ".join(f"{run['seconds'].get(name, 0.0):8.2f}" for run in found.values())
            print(f"{name:42} {found['warm']['calls'].get(name, 0):6} {seconds}")
    print(f"{'from start to ready':42} {'':6} " + " ".join(f"{run['total']:8.2f}" for run in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(work(**json.loads(args.job))))
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = (f"{folder}/{name}" for name in ("first", "second"))
        found = {run: fresh(args.model, run, first, first) for run in ("cold", "rehearsed", "warm", "sampled")}
        found["listed"] = fresh(args.model, "listed", second, first)
    out = Path(os.environ.get("OUT") or Path(__file__).parent) / "startup_torch.json"
    out.write_text(json.dumps({args.model: found}, indent=1), encoding="utf-8")
    print_tables(found)


if __name__ == "__main__":
    main()
