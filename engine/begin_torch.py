"""What a start of torch on a GPU waits for and what is not Python's: begun by threads, beside the import of torch.

That import holds Python's lock nearly all the time. What is wrong is not said here: torch meets it again, and says it.
"""

from __future__ import annotations

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def begin(first_gpu: bool) -> None:
    """Begins. `first_gpu`: that is the one which the engine will use."""
    for work in (open_context if first_gpu else start_driver, know_triton):
        threading.Thread(target=work, daemon=True).start()


def start_driver() -> Any:
    """NVIDIA's, where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def open_context() -> None:
    """The one of the first GPU that torch will use. It takes memory there: no process of another GPU may ask for it."""
    if driver := start_driver():
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)


def know_triton() -> None:
    """Its hash, which is part of the name of each kernel on disk."""
    if find_spec("triton") and Path("/proc/driver/nvidia").exists():
        from ..kernels_triton.triton_hash import hash_triton

        hash_triton()
