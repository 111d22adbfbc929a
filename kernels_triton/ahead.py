"""Kernels compiled side by side, before the first of them is launched.

Compiling is most of a cold start, and a launch that finds no kernel waits for its own alone. Programs that run inside
`rehearsal` launch nothing that is missing, but say what they would launch; a process compiles it (compiling.py), and
threads load it. A kernel that is forgotten here is compiled when it is launched, as ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver

from . import compiling
from .triton_hash import hash_triton

log = logging.getLogger("octavo")

EMPTY = {torch.empty, torch.empty_like, torch.Tensor.new_empty}


class Zeros(TorchFunctionMode):
    """Arrays that a kernel would have filled hold zeros: ids, slots and counts that are legal wherever used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in EMPTY else out


def know_triton() -> None:
    """Has Triton find out what it asks of itself for every kernel: the hash of its 400 MB, its driver, ptxas."""
    hash_triton()
    make_backend(driver.active.get_current_target()).hash()


def load(device: torch.device, kernels: Iterable[tuple[Any, str]]) -> None:
    """Has threads load these functions for these specializations, and compile what is not in Triton's cache."""
    # a thread begins with the first GPU, whichever its maker uses; "cuda" alone is that one
    used = (torch.cuda.current_device() if device.index is None else device.index,) if device.type == "cuda" else ()
    know_triton()
    asked = []
    cores, initializer = len(os.sched_getaffinity(0)), torch.cuda.set_device if used else None
    with ThreadPoolExecutor(cores, initializer=initializer, initargs=used) as pool:
        for fn, specialization in kernels:
            # made here: of two threads that find none, one would lose its kernels
            _ = fn.device_caches[driver.active.get_current_device()]  # pyright: ignore[reportAttributeAccessIssue]
            compiling.settle(fn)
            asked.append(pool.submit(compiling.compiled, fn, specialization))
    for future in asked:
        if error := future.exception():
            # whoever launches it gets the error; perhaps nobody does
            log.info("a kernel could not be compiled ahead: %s", error)
        else:
            # asking for what launches it loads it, which a recording forbids unless it is relaxed
            _ = future.result().run
    log.info("%d kernels are loaded ahead", len(asked))


@contextmanager
def rehearsal(device: torch.device, told: Callable[[Any, str], None] | None = None) -> Iterator[None]:
    """What this thread runs inside launches no kernel that is missing. All of those are there and loaded at the end.

    `told` hears of each what Triton's hook said of its function, and its specialization.
    """
    me, wanted = threading.get_ident(), dict[tuple[str, str], tuple[Any, str]]()

    def missing(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        """Triton asks before it compiles; True: it neither compiles nor launches."""
        if threading.get_ident() != me:
            return False
        if (fn.name, key) not in wanted:
            wanted[fn.name, key] = fn.jit_function, compile["specialization_data"]
            ask(fn.module, fn.name, compile["specialization_data"])
            if told:
                told(fn, compile["specialization_data"])
        return True

    know_triton()
    with compiling.process(driver.active.get_current_target()) as ask:
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, missing
        try:
            with Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
    load(device, wanted.values())
