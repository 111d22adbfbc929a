"""The fixed workloads on the machine at hand: correctness first, then attention alone, then each model, one table last.

Every part's numbers are kept in a JSON file as they are made; a part that is there is not run again. Each model runs in
a process of its own, whose time from start to ready is its start-up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..backend import resolve_backend
from ..checks import choice
from ..json_file import read_json
from .machine import machine
from .workloads import CONFIGS, NAMES

ALONE = ("check", "attention")  # of a GPU, without a model
AFTER = ("identical", "profile")  # in a second process of a model, which starts with warm caches
PARTS = (*ALONE, *NAMES, *AFTER)
ON_GPUS = (*ALONE, "profile")


class Results:
    """Numbers by backend, model ("" for none) and part, in a JSON file."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = read_json(path) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def put(self, key: str, value: Any) -> None:
        # another process may have added its own
        self.values = (read_json(self.path) if self.path.exists() else {}) | {key: value}
        self.path.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        print(key, json.dumps(value), file=sys.stderr, flush=True)


def run(
    backend: str,
    models: Sequence[str],
    parts: Sequence[str] = (),
    *,
    out: Path,
    again: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """All parts (none: all that run here) of these models, shapes of CONFIGS or folders with a config.json; returns
    what `out` has then. `arguments` go to every engine. Raises ValueError for parts that cannot run here, results of
    another machine or other arguments in `out`, and ChildProcessError if a part fails.
    """
    backend = resolve_backend(backend)
    device = platform_of(backend, arguments.pop("device", "auto"))
    for part in parts:
        choice("part", part, PARTS)
        if part in ON_GPUS and device == "cpu":
            raise ValueError(f"part {part!r} needs a GPU, and the {backend} backend runs on the CPU here")
    for model in models:
        check_model(model)
    results, asked = Results(out), list(parts or (p for p in PARTS if device != "cpu" or p not in ON_GPUS))
    _check_same(results, f"{backend}//machine", machine(backend, device))
    _check_same(results, f"{backend}//arguments", arguments)
    jobs = [("", [p for p in asked if p in ALONE])]
    jobs += [(model, [p for p in asked if p in kind]) for model in models for kind in (NAMES, AFTER)]
    for model, wanted in jobs:
        missing = [p for p in wanted if again or f"{backend}/{model}/{p}" not in results]
        if missing:
            _in_a_process({"backend": backend, "device": device, "model": model, "parts": missing, "out": str(out),
                           "again": again, "arguments": arguments})  # fmt: skip
    return Results(out).values


def platform_of(backend: str, device: str) -> str:
    """find_platform, asked in a process of its own: this one is to keep no memory of the GPU from those that follow."""
    if device != "auto":
        return device
    ask = f"from octavo.engine.backend import find_platform; print(find_platform({backend!r}, 'auto'))"
    done = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[-1]


def check_model(name: str) -> None:
    if name not in CONFIGS and not (Path(name) / "config.json").is_file():
        raise ValueError(f"model {name!r} is none of {', '.join(CONFIGS)}, and no folder with a config.json")


def _check_same(results: Results, key: str, value: dict[str, Any]) -> None:
    """Notes where this runs, or with what; figures of another run are not to be mixed with it."""
    # two parts of one run may be made on different days
    there, here = ({k: v for k, v in x.items() if k != "date"} for x in (results.values.get(key, value), value))
    if there != here:
        raise ValueError(f"{results.path} has results with {key} {there}, not {here}: give another --out")
    results.put(key, value)


def _in_a_process(job: dict[str, Any]) -> None:
    """A worker does these parts; what it prints goes to stderr."""
    command = [sys.executable, "-m", f"{__package__}.marks_worker"]
    done = subprocess.run([*command, json.dumps(job | {"began": time.time()})], stdout=sys.stderr)
    if done.returncode:
        raise ChildProcessError(f"parts {', '.join(job['parts'])} of {job['model'] or 'the checks'} failed: see above")
