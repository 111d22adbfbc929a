"""Programs of one launch that leave parts in memory, which the last of them to arrive puts together."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

MOST = 1 << 14  # groups of programs that a launch counts


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Zeros that a launch counts its programs in, and leaves zero. Never made while a graph is recorded."""
    return torch.zeros(MOST, dtype=torch.int32, device=device)


@triton.jit
def is_last(turn, count):
    """Whether this is the last of `count` programs to come here. What the others stored before can then be read.

    From the device's cache: a multiprocessor's own may be older. `turn` is a counter, zero before and after.
    """
    # all threads have stored
    tl.debug_barrier()
    last = tl.atomic_add(turn, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(turn, 0)
    return last
