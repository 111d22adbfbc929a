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


@cache
def early(device: torch.device) -> dict[str, Any]:
    """The constant EARLY of a kernel that takes turns, and how it is launched on that device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
