"""The fixed workloads on the machine at hand: correctness first, then attention alone, then each model.

Every part's numbers are kept in a JSON file as they are made; a part that is there is not run again, so whoever was
stopped goes on with the same call. Each model runs in a process of its own, whose time from start to ready is its
start-up, and in a second one. What is timed runs alone; checks run beside each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..checks import choice
from ..json_file import read_json
from ..loading.cache_dir import cache_dir
from .machine import machine
from .marks_kernels import has_tests, kernels
from .workloads import CONFIGS, NAMES

CHECKS = ("check", "kernels")  # of a GPU: is it right
AFTER = ("identical", "profile")  # in a second process of a model, which starts with warm caches
PARTS = (*CHECKS, "attention", *NAMES, *AFTER)
ON_GPUS = (*CHECKS, "attention", "profile")


class Results:
    """Numbers by backend, model ("" for none) and part, in a JSON file, which is whole whenever a process is killed."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = read_json(path) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def put(self, key: str, value: Any) -> None:
        with self._changed():
            self.values[key] = value
        print(key, json.dumps(value), file=sys.stderr, flush=True)

    def forget(self, keys: Sequence[str]) -> None:
        with self._changed():
            for key in keys:
                self.values.pop(key, None)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Reads the file and writes it, as one: other processes add their own."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.values = read_json(self.path) if self.path.exists() else {}
            yield
            whole = self.path.with_name(f".{self.path.name}.partial")
            whole.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
            os.replace(whole, self.path)
        finally:
            os.close(folder)


def run(
    backends: Sequence[str],
    models: Sequence[str],
    parts: Sequence[str] = (),
    *,
    out: Path,
    again: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """All parts (none: all that run here) of these models, shapes of CONFIGS or folders with a config.json; returns
    what `out` has then. `arguments` go to every engine. Raises ValueError for parts that cannot run here, results of
    another machine or other arguments in `out`, and ChildProcessError if a part fails: behind a check nothing is timed,
    behind another all that needs none of its process.
    """
    asked_device = arguments.pop("device", "auto")
    if "compile_cache_dir" in arguments:
        raise ValueError("compile_cache_dir: each model of the marks has caches of its own; set OCTAVO_CACHE instead")
    for part in parts:
        choice("part", part, PARTS)
    for model in models:
        check_model(model)
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}")
    with ThreadPoolExecutor(len(backends)) as pool:
        found = pool.map(lambda backend: platform_of(backend, asked_device), backends)
        devices = dict(zip(backends, found, strict=True))
    for backend, device in devices.items():
        if device == "cpu" and (wrong := [part for part in parts if part in ON_GPUS]):
            raise ValueError(f"part {wrong[0]!r} needs a GPU, and the {backend} backend runs on the CPU here")
    if "kernels" in parts and not has_tests():
        raise ValueError("part 'kernels' runs the tests of a clone, and none are beside this package: leave it out")
    asked = {backend: list(parts or parts_on(device)) for backend, device in devices.items()}
    results = Results(out.absolute())
    for backend, device in devices.items():
        _check_same(results, f"{backend}//machine", machine(backend, device))
        _check_same(results, f"{backend}//arguments", arguments)

    def job(backend: str, model: str, wanted: Sequence[str]) -> dict[str, Any] | None:
        """What a process is to do, if it has anything to do."""
        keys = {part: f"{backend}/{model}/{part}" for part in asked[backend] if part in wanted}
        if again and keys:
            results.forget([*keys.values(), *([f"{backend}/{model}/startup"] if wanted is NAMES else [])])
        if missing := [part for part, key in keys.items() if key not in results]:
            return {"backend": backend, "device": devices[backend], "model": model, "parts": missing,
                    "out": str(results.path), "arguments": arguments}  # fmt: skip
        return None

    # beside each other: compiling and comparing leave most of the GPU idle
    checks: list[Callable[[], None]] = []
    checks += [partial(_in_a_process, one) for backend in backends if (one := job(backend, "", ["check"]))]
    if any("kernels" in wanted for wanted in asked.values()) and (again or "//kernels" not in results):
        checks.append(lambda: results.put("//kernels", kernels(beside=len(checks) - 1)))
    _together(checks)
    errors = []
    for backend in backends:
        for model, wanted in [("", ["attention"]), *((m, kind) for m in models for kind in (NAMES, AFTER))]:
            if one := job(backend, model, wanted):
                try:
                    _in_a_process(one)
                except ChildProcessError as error:
                    # what the others measure stands without it
                    errors.append(str(error))
    if errors:
        raise ChildProcessError("; ".join(errors))
    return Results(results.path).values


def shown(out: Path, backends: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What `out` has, made anywhere, and of which backends; "auto": all. Raises ValueError if one is missing."""
    values = Results(out).values
    there = [key.removesuffix("//machine") for key in values if key.endswith("//machine")]
    chosen = there if "auto" in backends else list(dict.fromkeys(backends))
    if missing := [backend for backend in chosen or backends if backend not in there]:
        raise ValueError(f"{out} has nothing of backend {missing[0]!r}: it has {', '.join(there) or 'nothing'}")
    return values, chosen


def parts_on(device: str) -> Sequence[str]:
    """All that run on it, from here."""
    if device == "cpu":
        return [part for part in PARTS if part not in ON_GPUS]
    return [part for part in PARTS if part != "kernels" or has_tests()]


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


def _together(jobs: Sequence[Callable[[], None]]) -> None:
    """All of them beside each other, to their ends. Raises what went wrong in any."""
    if not jobs:
        return
    with ThreadPoolExecutor(len(jobs)) as pool:
        errors = [str(error) for one in [pool.submit(job) for job in jobs] if (error := one.exception())]
    if errors:
        raise ChildProcessError(f"{'; '.join(errors)}. Nothing was timed")


def _in_a_process(job: dict[str, Any]) -> None:
    """A worker does these parts; what it prints goes to stderr."""
    command = [sys.executable, "-m", f"{__package__}.marks_worker"]
    if job["model"]:
        caches, startup = _caches(job)
        command = ["env", f"OCTAVO_CACHE={caches}", f"TRITON_CACHE_DIR={caches / 'triton'}", *command]
        job = job | {"startup": startup}
    done = subprocess.run([*command, json.dumps(job | {"began": time.time()})], stdout=sys.stderr)
    if not done.returncode:
        return
    results, about = Results(Path(job["out"])), f"of {job['model']} on {job['backend']}"
    about = about if job["model"] else f"on {job['backend']}"
    if missing := [part for part in job["parts"] if f"{job['backend']}/{job['model']}/{part}" not in results]:
        raise ChildProcessError(f"{', '.join(missing)} {about} failed: see above")
    print(f"{', '.join(job['parts'])} {about}: exit status {done.returncode} after all was kept", file=sys.stderr)


def _caches(job: dict[str, Any]) -> tuple[Path, str | None]:
    """Where the processes of a model keep what they compile, and what a start there is: cold, and so from an empty
    folder, until one has been told of; then warm. None if that one was elsewhere, as on another machine.
    """
    named = f"{job['backend']}/{job['model']}"
    about = zlib.crc32(f"{job['out']} {named}".encode())
    folder = cache_dir() / "bench-caches" / f"{about:08x}"
    if f"{named}/startup" not in Results(Path(job["out"])):
        shutil.rmtree(folder, ignore_errors=True)
        return folder, "startup"
    return folder, "startup-warm" if folder.exists() else None
