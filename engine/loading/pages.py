"""Memory for what is dropped soon."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np


def empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """An array of pages of its own, which go back to the system with it.

    malloc keeps freed pieces of up to 32 MB, in holes between what was placed meanwhile: a third of a model.
    """
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize * prod(shape)
    if nbytes < mmap.PAGESIZE:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype).reshape(shape)
