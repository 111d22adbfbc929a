"""Products of very few rows: which are for column_kernels.py, which weights lie turned as well, and the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from . import column_kernels as kernels
from .early import early
from .few_rows import device_name
from .products import Twofold, contraction
from .sizes import next_power_of_2

Tensor = torch.Tensor


class Cut(NamedTuple):
    """Whether the weight lies turned; columns of a program, depth of a tile, tiles on their way; warps of a program."""

    turned: bool
    columns: int
    depth: int
    tiles: int
    num_warps: int


# as measured, by device: the most rows that a rule is for, then (depth, width, gate). Nothing: not for these kernels.
# A weight that lies turned lies twice: the large products of many rows lose 3 to 13 % by one that is only turned
CUTS: dict[str, dict[int, dict[tuple[int, int, bool], Cut]]] = {
    "NVIDIA H200": {
        1: {
            (1024, 4096, False): Cut(True, 16, 1024, 1, 4),
            (2048, 1024, False): Cut(True, 8, 2048, 1, 4),
            (1024, 6144, True): Cut(True, 16, 1024, 1, 4),
            (3072, 1024, False): Cut(True, 8, 1024, 3, 4),
            (4096, 6144, False): Cut(True, 4, 1024, 2, 4),
            (4096, 4096, False): Cut(True, 8, 1024, 2, 4),
            (4096, 28672, True): Cut(False, 64, 64, 2, 4),
            (14336, 4096, False): Cut(True, 4, 2048, 1, 4),
        },
        2: {
            (1024, 4096, False): Cut(True, 8, 1024, 1, 4),
            (2048, 1024, False): Cut(True, 4, 1024, 2, 4),
            (1024, 6144, True): Cut(True, 4, 1024, 1, 4),
            (3072, 1024, False): Cut(True, 4, 1024, 3, 4),
        },
    }
}


@cache
def cut_of(num_rows: int, depth: int, width: int, gate: bool, device: torch.device) -> Cut | None:
    """How a product of so many rows with a weight [depth, width] is cut; None: it is not for these kernels."""
    rules = CUTS.get(device_name(device), {})
    fits = [most for most in rules if num_rows <= most]
    return rules[min(fits)].get((depth, width, gate)) if fits else None


def is_kept_turned(shape: Sequence[int], product: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of these kernels wants a weight of this shape turned as well."""
    shared, first = contraction(product)
    if not first or dtype != torch.bfloat16:
        return False
    depth, width = math.prod(shape[:shared]), math.prod(shape[shared:])
    cuts = [cut_of(1, depth, width, gate, device) for gate in (False, True)]
    return any(cut is not None and cut.turned for cut in cuts)


def einsum(
    spec: str, x: Tensor, w: Tensor, norm: tuple[Tensor, float] | None, gate: bool, add: Tensor | None
) -> Tensor | None:
    """The product `spec` with what stands before and behind it, `add` consumed; None: it is not for these kernels."""
    shared, first = contraction(spec)
    if not first or x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16 or not w.is_contiguous():
        return None
    free, tail, depth = x.shape[: x.ndim - shared], w.shape[shared:], w.shape[:shared].numel()
    cut = cut_of(free.numel(), depth, tail.numel(), gate, x.device)
    if cut is None or (cut.turned and not isinstance(w, Twofold)):
        return None
    rows, plain = x.reshape(-1, depth), w.reshape(depth, -1)
    if rows.stride(-1) != 1:
        return None
    weight = w.turned if cut.turned and isinstance(w, Twofold) else plain
    y = product(rows, weight, cut, norm, gate, None if add is None else add.view(len(rows), -1))
    return y.view(*free, *(tail[1:] if gate else tail))


def product(
    x: Tensor, w: Tensor, cut: Cut, norm: tuple[Tensor, float] | None, gate: bool, add: Tensor | None
) -> Tensor:
    """add + gate(norm(x) @ w), of which there may be any, in add's memory where that is given; w as `cut` says."""
    (num_rows, depth), width = x.shape, w.shape[0 if cut.turned else 1]
    end, (scale, eps), once = width // (1 + gate), norm or (x, 0.0), cut.num_warps * 32 * kernels.L.value
    if end % cut.columns or depth % (cut.depth * cut.tiles):
        raise ValueError(f"{cut} does not divide {end} columns and a depth of {depth}")
    out = torch.empty((num_rows, end), dtype=x.dtype, device=x.device) if add is None else add
    # however many programs: what they load before their turn is worth more than what turns cost them
    ahead = early(x.device, 1)
    kernels.product[(end // cut.columns,)](
        x, w, scale, out, out, num_rows, x.stride(0), eps,
        TURNED=cut.turned, DEPTH=depth, WIDTH=width, GATE=gate, ADD=add is not None, NORM=norm is not None,
        R=next_power_of_2(num_rows), N=cut.columns, D=cut.depth, S=cut.tiles,
        B=max(1, min(cut.depth, once // cut.columns)), num_warps=cut.num_warps, **ahead,
    )  # fmt: skip
    return out
