"""Two GPUs: what octavo computes on them is what it computes on one, what happens when something breaks, and how fast.

    python benchmarks/parallel_h200.py [--seconds 110] [--device cpu] [--only WORD ...]

Every part (parallel_parts.py) has a process of its own, and a hang costs it alone: then its ranks say where they stand.
What is right comes first, side by side, and meanwhile the timed parts start; then these measure in turn. Prints lines
of JSON as they come, tables last; everything goes to $OUT/parallel_h200.json, or beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import parallel_parts
from parallel_parts import PARTS, SPARE, USUAL, WORK, Part, put, shape_of

from octavo.engine.bench.workloads import CONFIGS, write_config

# seconds that a part has until it is through, or ready; and a timed one for each measurement
START, MEASURE = 65.0, 20.0
SLOWER = {"cuda": 1, "cpu": 8}  # so many times as long
MEASURES = 0.4  # of all the time: for them alone
MOST = {"torch": 6, "jax": 8}  # parts of a backend at once
CORES = 4  # of this machine, for each of them
SHOWN = ("tokens", "told", "logprobs", "routed")  # too long to be printed


@dataclass(eq=False)
class Running:
    """A part under way, and what it has said."""

    part: Part
    process: subprocess.Popen[str]
    errors: Path
    until: float
    began: float = field(default_factory=time.monotonic)
    said: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def is_ready(self) -> bool:
        return self.part.does == "timed" and any("ready" in values for values in self.said)

    def result(self) -> dict[str, Any]:
        """All that it said as one, its measurements by workload."""
        found: dict[str, Any] = {"part": self.part.name, "wall": round(time.monotonic() - self.began, 1)}
        for values in self.said:
            if "work" in values:
                found.setdefault("work", {})[values["work"]] = {k: v for k, v in values.items() if k != "work"}
            else:
                found |= values
        if "error" in found:
            found["stderr"] = self.errors.read_text(errors="replace")[-6000:]
        return found


class Supervisor:
    """Runs parts, until the time is up."""

    def __init__(self, device: str, seconds: float, folder: Path, out: Path):
        self.device, self.seconds, self.folder, self.out = device, seconds, folder, out
        self.until = time.monotonic() + seconds
        self.news: queue.Queue[tuple[Running, str | None]] = queue.Queue()
        self.results: dict[str, dict[str, Any]] = {}

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def run(self, parts: Sequence[Part]) -> None:
        """Starts all, in their order, and has timed ones measure when the others are through."""
        waiting, active, ready = list(parts), [], []
        reserved = MEASURES * self.seconds if any(part.does == "timed" for part in parts) else 0
        while (waiting or active) and self.left > reserved:
            for part in self._next(waiting, active):
                waiting.remove(part)
                active.append(self._start(part))
            self._listen(active)
            ready += [one for one in active if one.is_ready and not one.ended]
            active = [one for one in active if not one.ended and not one.is_ready]
        for part in waiting:
            self._note({"part": part.name, "error": "not run: no time was left"})
        for one in active:
            self._give_up(one, "the time is up")
        for name in WORK:
            for one in ready:
                if name in one.part.work and not one.ended and self.left > 0:
                    self._measure(one, name)
        self._dismiss(ready)

    def _next(self, waiting: Sequence[Part], active: Sequence[Running]) -> list[Part]:
        """Those of which may start now: of each backend as many as cores allow."""
        found: list[Part] = []
        for backend, most in MOST.items():
            slots = max(1, min(most, (os.cpu_count() or 1) // CORES))
            free = slots - sum(one.part.backend == backend for one in active)
            found += [part for part in waiting if part.backend == backend][: max(free, 0)]
        return found

    def _measure(self, one: Running, name: str) -> None:
        one.until = self._until(MEASURE)
        assert one.process.stdin
        with contextlib.suppress(BrokenPipeError):
            one.process.stdin.write(f"{name}\n")
            one.process.stdin.flush()
        while not one.ended and not any(values.get("work") == name for values in one.said):
            self._listen([one])
        if not one.ended:
            self._keep(one.result())

    def _dismiss(self, ready: Sequence[Running]) -> None:
        """Has what was measured end, which need not take long."""
        for one in ready:
            if not one.ended:
                one.process.terminate()
                self._end(one)

    def _until(self, seconds: float) -> float:
        return time.monotonic() + min(seconds * SLOWER[self.device], max(self.left, 0))

    def _start(self, part: Part) -> Running:
        errors = self.folder / f"{part.name.replace(' ', '-')}.err"
        command = [sys.executable, __file__, "--part", part.name, "--device", self.device]
        # SIGABRT then says where every thread is, in the other ranks too
        environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": part.gpu} if part.gpu else {}
        with errors.open("w") as file:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                                       env=environment)  # fmt: skip
        one = Running(part, process, errors, self._until(START))
        assert process.stdout
        threading.Thread(target=self._read, args=(one, process.stdout), daemon=True).start()
        return one

    def _read(self, one: Running, lines: IO[str]) -> None:
        for line in lines:
            self.news.put((one, line))
        self.news.put((one, None))

    def _listen(self, running: Iterable[Running]) -> None:
        """Takes in what has come, and gives up on those that are late."""
        with contextlib.suppress(queue.Empty):
            one, line = self.news.get(timeout=0.2)
            if line is not None and line.startswith("{"):
                one.said.append(json.loads(line))
            elif line is None and not one.ended:
                if status := one.process.wait():
                    one.said.append({"error": f"ended with status {status}"} if not _failed(one) else {})
                self._end(one)
        for one in running:
            if not one.ended and time.monotonic() > one.until:
                self._give_up(one, "it took too long")

    def _give_up(self, one: Running, why: str) -> None:
        for pid in (*_children(one.process.pid), one.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        try:
            one.process.wait(5)
        except subprocess.TimeoutExpired:
            one.process.kill()
        one.said.append({"error": why})
        self._end(one)

    def _end(self, one: Running) -> None:
        one.ended = True
        self._note(one.result())

    def _note(self, result: dict[str, Any]) -> None:
        self._keep(result)
        put(**{name: first_line(x) for name, x in result.items() if name not in (*SHOWN, "stderr")})

    def _keep(self, result: dict[str, Any]) -> None:
        self.results[result["part"]] = result
        (self.out / "parallel_h200.json").write_text(json.dumps(self.results, indent=1) + "\n")


def first_line(x: Any) -> Any:
    """Of a text the beginning; anything else as it is."""
    return x.partition("\n")[0][:200] if isinstance(x, str) else x


def _failed(one: Running) -> bool:
    return any("error" in values for values in one.said)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def compared(found: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """How many outputs are those of one device, and how far their cumulative logprobs are apart at most."""
    tokens, told = ([a == b for a, b in zip(found[name], one[name], strict=True)] for name in ("tokens", "told"))
    apart = [abs(a - b) for a, b, same in zip(found["logprobs"], one["logprobs"], told, strict=True) if same]
    values = {"same": f"{sum(tokens) + sum(told)} of {len(tokens) + len(told)}", "logprobs": max(apart, default=None)}
    if found["routed"] and one["routed"]:
        values["routed"] = sum(a == b for a, b in zip(found["routed"], one["routed"], strict=True))
    return values


def beside(part: Part, results: dict[str, dict[str, Any]]) -> str | None:
    """What a part's tokens are compared with: one device's, of its backend or the other; or another split's."""
    alike = [x for x in PARTS.values() if x.does == "equal" and x.model == part.model and x.name != part.name]
    there = [x for x in alike if "tokens" in results.get(x.name, {})]
    there.sort(key=lambda x: (x.name != x.like, x.backend != part.backend))
    return there[0].name if there else None


def tables(results: dict[str, dict[str, Any]]) -> None:
    for part in PARTS.values():
        if (found := results.get(part.name)) is None:
            continue
        row: dict[str, Any] = {}
        if part.does == "equal" and "tokens" in found:
            other = beside(part, results)
            row = compared(found, results[other]) | {"as": other} if other else {"same": "nothing to compare with"}
            names = ("replicas", "preemptions", "compared", "compiles", "ready", "seconds")
            row |= {name: found[name] for name in names}
        elif "work" in found:
            row = {name: f"{x['tok_s']} tok/s ({x['compiles']} new)" for name, x in found["work"].items()}
        if part.does != "equal" or "error" in found:
            row |= {name: found[name] for name in ("ready", "said", "same", "of", "seconds", "error") if name in found}
        print(f"{part.name:32}", "  ".join(f"{name} {first_line(x)}" for name, x in row.items()), flush=True)


def write_configs(device: str) -> None:
    """What parts read: once, since they start side by side."""
    for part in PARTS.values():
        CONFIGS[folder_name(part, device)] = shape_of(part.model, device)
        write_config(folder_name(part, device))


def folder_name(part: Part, device: str) -> str:
    return f"two-{part.model}-{device}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WORD",
                        help="parts whose names have one of these; a spare one, if it is named in full")  # fmt: skip
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        from octavo.engine.loading.cache_dir import cache_dir

        folder = cache_dir() / "bench-models" / folder_name(PARTS[args.part], args.device)
        parallel_parts.run(args.part, args.device, str(folder))
    # a rank that is given up says where it stands, and leaves no memory of a GPU behind on disk
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_configs(args.device)
    out = Path(os.environ.get("OUT") or Path(__file__).parent)
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"parallel-{os.getpid()}"
    folder.mkdir()
    chosen = list(USUAL)
    if args.only:
        chosen = [part for part in USUAL if any(word in part.name for word in args.only)]
        chosen += [part for part in SPARE if part.name in args.only]
    supervisor = Supervisor(args.device, args.seconds, folder, out)
    supervisor.run(chosen)
    print()
    tables(supervisor.results)


if __name__ == "__main__":
    main()
