"""Numbers in two bits: codes 0 to 3, four of them in a byte, between the least and the greatest of a group."""

from __future__ import annotations

from typing import Any

from ..interface import Array


def rounded(xp: Any, x: Array, axis: int) -> tuple[Array, Array]:
    """Codes [..., D / 4] of x [..., D], and the range [..., 2] of each group, which is what lies along `axis`.

    A range is the number that code 0 stands for, and that from one code to the next.
    """
    x = xp.astype(x, xp.float32)
    low = xp.min(x, axis=axis, keepdims=True)
    step = (xp.max(x, axis=axis, keepdims=True) - low) / 3
    codes = xp.astype(xp.clip(xp.round((x - low) / xp.where(step > 0, step, 1.0)), 0, 3), xp.int32)
    packed = codes[..., 0::4] + 4 * codes[..., 1::4] + 16 * codes[..., 2::4] + 64 * codes[..., 3::4]
    return packed, xp.stack([low.squeeze(axis), step.squeeze(axis)], axis=-1)


def widened(xp: Any, packed: Array, ranges: Array) -> Array:
    """The numbers [..., D] that codes stand for; a range goes with each of them, or with a 1 for all on an axis."""
    packed, ranges = xp.astype(packed, xp.int32), xp.astype(ranges, xp.float32)
    codes = xp.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    codes = xp.astype(codes.reshape(*packed.shape[:-1], -1), xp.float32)
    return codes * ranges[..., 1] + ranges[..., 0]
