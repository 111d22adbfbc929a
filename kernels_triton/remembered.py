"""Which kernels an engine launches, kept on disk: its next start compiles or loads them without rehearsing.

A list is trusted as long as the kernels in it are written as they were. What somebody changed around them shows when a
launch wants a kernel that is not there: it is compiled then, and the list is dropped, so that the next start rehearses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from .ahead import load

log = logging.getLogger("octavo")


@dataclass(frozen=True)
class Kernel:
    """A function of Triton's as it is written now, and for what arguments it is compiled."""

    module: str
    name: str
    source: str  # its hash
    specialization: str

    @classmethod
    def of(cls, fn: Any, specialization: str) -> Kernel:
        """What Triton's hook was told about."""
        return cls(fn.module, fn.name, fn.jit_function.cache_key, specialization)

    def function(self) -> JITFunction[Any] | None:
        """The function; None if there is none of that name here, or another one."""
        if self.module.rpartition(".")[0] != __package__:
            return None
        try:
            fn = getattr(import_module(self.module), self.name, None)
        except ImportError:
            return None
        return fn if isinstance(fn, JITFunction) and fn.cache_key == self.source else None


@contextmanager
def noted(kernels: list[Kernel]) -> Iterator[None]:
    """Adds to `kernels` what launches inside have to compile."""

    def missing(*, fn: Any, compile: Any, **_: Any) -> bool:
        kernels.append(Kernel.of(fn, compile["specialization_data"]))
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, missing
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def recall(path: Path, device: torch.device) -> bool:
    """Has the kernels of a list compiled, if need be, and loaded. False, and nothing done, if no list holds."""
    try:
        kernels = [Kernel(*entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return False
    found = [(kernel.function(), kernel.specialization) for kernel in kernels]
    if not found or any(fn is None for fn, _ in found):
        return False
    load(device, found)
    return True


def keep(path: Path, kernels: list[Kernel]) -> None:
    """Writes the list. Where the disk does not take it, the next start rehearses too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump([astuple(kernel) for kernel in dict.fromkeys(kernels)], file)
        os.replace(name, path)
    except OSError as error:
        log.info("the list of kernels is not kept: %s", error)


def drop(path: Path) -> None:
    """No list any more."""
    with contextlib.suppress(OSError):
        path.unlink()
