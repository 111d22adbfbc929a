"""A process that compiles kernels for this one, which finds them in Triton's cache.

Compiling holds Python's lock for a quarter of its time: beside threads that do it, whoever says what to compile waits
at each of its calls. The process imports Triton alone, and forks for each kernel.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import cache, driver

log = logging.getLogger("octavo")

CODE = (
    "import sys; sys.path[:] = sys.argv[4:]; from importlib import import_module; "
    "import_module(sys.argv[1]).serve(*sys.argv[2:4])"
)
NICE = 5  # the asking process goes first
ROOM = 1 << 20  # bytes of what is asked before the process is there


def settle(fn: Any) -> None:
    """Has Triton hash a function. It is another hash if what it calls was hashed before: so always in one order."""
    _ = fn.cache_key


def compiled(fn: Any, specialization: str) -> Any:
    """The kernel, and on disk what launches it: in Triton 3.6 a C module for each signature, compiled as well."""
    kernel = fn.preload(specialization)
    # one of its own: a launch of another thread finds a kernel either without one or with all that belongs to it
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # pyright: ignore[reportAttributeAccessIssue]
    return kernel


@contextmanager
def process(target: GPUTarget) -> Iterator[Callable[[str, str, str], None]]:
    """What this yields asks for a kernel: its module, its name, its specialization. At the end all are made.

    Those that are not, because of an error, are left to whoever launches them.
    """
    about = json.dumps([target.backend, target.arch, target.warp_size])
    made = subprocess.Popen(
        [sys.executable, "-c", CODE, __name__, about, cache.triton_key(), *sys.path],
        stdin=subprocess.PIPE,
        # stdout may be a file of results
        stdout=2,
        start_new_session=True,
        text=True,
        pipesize=ROOM,
    )
    asked = made.stdin
    assert asked is not None

    def ask(*kernel: str) -> None:
        # if it is gone, its status says so
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(kernel), file=asked, flush=True)

    try:
        yield ask
        made.communicate()
    except BaseException:
        made.kill()
        made.communicate()
        raise
    if made.returncode:
        log.warning("the process that compiles kernels ended with %d: this one makes what is missing", made.returncode)


class Elsewhere:
    """What compiling asks of a driver, for a device that it does not touch."""

    def __init__(self, target: GPUTarget):
        from triton.backends.nvidia.driver import CudaLauncher

        self.target, self.launcher_cls = target, CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0


def without_torch() -> None:
    """Puts an empty module in its place: modules of kernels import it, and a kernel needs nothing of it."""
    empty: Any = ModuleType("torch")
    empty.Tensor, sys.modules["torch"] = object, empty


def serve(about: str, key: str) -> None:
    """The process: compiles for such a target what stdin asks for, several kernels at a time. `key`: Triton's hash."""
    os.nice(NICE)
    without_torch()
    target = GPUTarget(*json.loads(about))
    driver.set_active(Elsewhere(target))  # pyright: ignore[reportArgumentType]
    cache.triton_key = lambda: key  # pyright: ignore[reportAttributeAccessIssue]
    # asks ptxas for its version, once for all
    make_backend(target).hash()
    at_work, most = 0, len(os.sched_getaffinity(0))
    for line in sys.stdin:
        module, name, specialization = json.loads(line)
        fn = getattr(import_module(module), name)
        settle(fn)
        if at_work == most:
            os.wait()
            at_work -= 1
        at_work += 1
        if not os.fork():
            try:
                compiled(fn, specialization)
            finally:
                os._exit(0)
    for _ in range(at_work):
        os.wait()
