"""Kernels that are launched before the one before them has ended (programmatic dependent launch, from Hopper on).

Such a kernel calls `take_turn` before it touches what an earlier kernel may write or read. So whatever a kernel writes
is seen by all that come after it, and only launching overlaps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Lets the next kernel be launched, and waits for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def hold_turn(EARLY: tl.constexpr):
    """Waits for the kernel before, and only then lets the next be launched.

    That one may read, before its own turn, what the kernel before this wrote.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


# of a launch that is worth it: taking turns costs each program a little, and launching is but a small part of a large
# launch (65,536 programs of one warp took 80 us for 50, 2,048 the same, 512 and fewer gained)
MOST_PROGRAMS = 1024


@cache
def has_turns(device: torch.device) -> bool:
    """Whether a device can launch a kernel before the last one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def early(device: torch.device, programs: int) -> dict[str, Any]:
    """The constant EARLY of a kernel that takes turns, and how so many programs of it are launched on that device."""
    if programs <= MOST_PROGRAMS and has_turns(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
