"""The place of the greatest of each row, in two short launches: torch reads rows of a vocabulary at half the speed.

What is not a number is never the greatest. Of equals the first is taken, as by argmax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .early import early, take_turn
from .sizes import cdiv, next_power_of_2

Tensor = torch.Tensor

TILE = 1024
PROGRAMS = 2048  # that keep enough of a device's memory under way, if a row is long
MOST_PARTS = 64  # of a row


@triton.jit
def first_greatest(top_B, at_B):
    """Of values and their places: the greatest, and its first place."""
    top = tl.max(top_B, 0)
    return top, tl.min(tl.where(top_B == top, at_B, 2147483647), 0)


@triton.jit
def part_kernel(x, tops, places, x_r, V: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr):
    """The greatest of SIZE numbers of a row. Program (row, part)."""
    take_turn(EARLY)
    r, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at_B = part * SIZE + tl.arange(0, B)
    top_B, place_B = tl.full([B], -float("inf"), tl.float32), at_B
    for _ in range(0, SIZE, B):
        v_B = tl.load(x + r * x_r + at_B, mask=at_B < V, other=-float("inf")).to(tl.float32)
        more_B = v_B > top_B
        top_B, place_B = tl.where(more_B, v_B, top_B), tl.where(more_B, at_B, place_B)
        at_B += B
    top, place = first_greatest(top_B, place_B)
    tl.store(tops + r * parts + part, top)
    tl.store(places + r * parts + part, place)


@triton.jit
def place_kernel(tops, places, ids_out, PARTS: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr):
    """The greatest of a row's parts. A program a row."""
    take_turn(EARLY)
    r, p = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    top_P = tl.load(tops + r * PARTS + p, mask=p < PARTS, other=-float("inf"))
    place_P = tl.load(places + r * PARTS + p, mask=p < PARTS, other=2147483647)
    tl.store(ids_out + r, first_greatest(top_P, place_P)[1])


def argmax(x_RV: Tensor) -> Tensor:
    """int32 [R]: the place of the greatest of each row of float32, bfloat16 or float16."""
    num_rows, size = x_RV.shape
    parts = max(1, min(MOST_PARTS, PROGRAMS // num_rows, size // TILE))
    own = cdiv(cdiv(size, parts), TILE) * TILE
    parts = cdiv(size, own)
    tops = torch.empty((num_rows, parts), dtype=torch.float32, device=x_RV.device)
    places, out = torch.empty_like(tops, dtype=torch.int32), tops.new_empty(num_rows, dtype=torch.int32)
    part_kernel[(num_rows, parts)](
        x_RV, tops, places, x_RV.stride(0), V=size, SIZE=own, B=TILE, **early(x_RV.device, num_rows * parts)
    )
    place_kernel[(num_rows,)](
        tops, places, out, PARTS=parts, P=next_power_of_2(parts), num_warps=1, **early(x_RV.device, num_rows)
    )
    return out
