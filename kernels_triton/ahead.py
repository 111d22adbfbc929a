"""Kernels compiled side by side, before the first of them is launched.

Compiling is most of a cold start, and a launch that finds no kernel waits for its own alone. Programs that run inside
`rehearsal` launch nothing that is missing, but say what they would launch; threads compile it, holding Python's lock
for a twentieth of the time (the rest is LLVM, ptxas and a C compiler). A kernel that is forgotten here is compiled when
it is launched, as ever.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver

from .triton_hash import hash_triton

log = logging.getLogger("octavo")

EMPTY = {torch.empty, torch.empty_like, torch.Tensor.new_empty}
SWITCH = 0.001  # seconds that a thread has Python's lock while others want it, as long as kernels are compiled


class Zeros(TorchFunctionMode):
    """Arrays that a kernel would have filled hold zeros: ids, slots and counts that are legal wherever used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in EMPTY else out


def know_triton() -> None:
    """Has Triton find out what it asks of itself for every kernel: the hash of its 400 MB, its driver, ptxas."""
    hash_triton()
    make_backend(driver.active.get_current_target()).hash()


def compiled(fn: Any, specialization: str) -> Any:
    """The kernel, and on disk what launches it: in Triton 3.6 a C module for each signature, compiled as well."""
    kernel = fn.preload(specialization)
    # one of its own: a launch of another thread finds a kernel either without one or with all that belongs to it
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # pyright: ignore[reportAttributeAccessIssue]
    return kernel


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Threads give way after that long, not 5 ms: every op of torch lets go of the lock, and waits for it again."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def compilers(device: torch.device) -> Iterator[Callable[[Any, str], None]]:
    """Threads for the kernels that what this yields is given. All of those are there and loaded at the end."""
    # a thread begins with the first GPU, whichever its maker uses; "cuda" alone is that one
    used = (torch.cuda.current_device() if device.index is None else device.index,) if device.type == "cuda" else ()
    asked: list[Future[Any]] = []

    def compile(fn: Any, specialization: str) -> None:
        # made here: of two threads that find none, one would lose its kernels
        _ = fn.device_caches[driver.active.get_current_device()]  # pyright: ignore[reportAttributeAccessIssue]
        asked.append(pool.submit(compiled, fn, specialization))

    know_triton()
    # more of them than cores this process may use would only want Python's lock as well
    cores, initializer = len(os.sched_getaffinity(0)), torch.cuda.set_device if used else None
    with switching(SWITCH), ThreadPoolExecutor(cores, initializer=initializer, initargs=used) as pool:
        try:
            yield compile
        finally:
            for future in asked:
                if error := future.exception():
                    # whoever launches it gets the error; perhaps nobody does
                    log.info("a kernel could not be compiled ahead: %s", error)
    for future in asked:
        if not future.exception():
            # asking for what launches it loads it, which a recording forbids unless it is relaxed
            _ = future.result().run
    log.info("compiled %d kernels ahead", len(asked))


@contextmanager
def rehearsal(device: torch.device, told: Callable[[Any, str], None] | None = None) -> Iterator[None]:
    """What this thread runs inside launches no kernel that is missing. All of those are there and loaded at the end.

    `told` hears of each what Triton's hook said of its function, and its specialization.
    """
    me, seen = threading.get_ident(), set[tuple[str, str]]()

    def missing(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        """Triton asks before it compiles; True: it neither compiles nor launches."""
        if threading.get_ident() != me:
            return False
        if (fn.name, key) not in seen:
            seen.add((fn.name, key))
            ask(fn.jit_function, compile["specialization_data"])
            if told:
                told(fn, compile["specialization_data"])
        return True

    with compilers(device) as ask:
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, missing
        try:
            with Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
