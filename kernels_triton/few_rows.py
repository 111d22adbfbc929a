"""Products of few rows: whether an own kernel serves, with which tiles, and its launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from . import few_rows_kernels as kernels
from .arrivals import counters
from .early import early
from .few_rows_table import TABLE
from .products import contraction
from .sizes import cdiv

Tensor = torch.Tensor


class Tiling(NamedTuple):
    """Rows, columns and depth of a tile, splits of the depth; how a program is compiled.

    `ahead`: rows of the weight that a program asks for before it waits.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    ahead: int


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def tiling_of(num_rows: int, depth: int, width: int, gate: bool, device: torch.device) -> Tiling | None:
    """The tiles of a product of so many rows with a weight [depth, width]; None: cuBLAS does it better."""
    rules = TABLE.get(device_name(device), {})
    fits = [most for most in rules if num_rows <= most]
    if not fits:
        return None
    found = rules[min(fits)].get((depth, width, gate))
    return None if found is None else Tiling(*found)


def einsum(spec: str, x: Tensor, w: Tensor, gate: bool, add: Tensor | None) -> Tensor | None:
    """The product `spec` with what stands behind it, `add` consumed; None: it is not for these kernels.

    A norm in front is a launch of its own: within the product, what turns x into its norm held the weight's loads up.
    """
    shared, first = contraction(spec)
    if not first:
        return None
    free, tail, depth = x.shape[: x.ndim - shared], w.shape[shared:], w.shape[:shared].numel()
    tile = tiling_of(free.numel(), depth, tail.numel(), gate, x.device)
    # only bfloat16, of wide range
    if tile is None or x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16 or not w.is_contiguous():
        return None
    plain = x.reshape(-1, depth)
    if plain.stride(-1) != 1:
        return None
    y = product(plain, w.reshape(depth, -1), tile, gate, None if add is None else add.view(len(plain), -1))
    return y.view(*free, *(tail[1:] if gate else tail))


def constants_of(depth: int, width: int, gate: bool, add: bool, tile: Tiling, single: bool = False) -> dict[str, Any]:
    """What a variant is compiled with; `single`: in fp32."""
    end, whole = width // 2 if gate else width, cdiv(depth, tile.splits)
    return {
        "DEPTH": depth, "WIDTH": width, "GATE": gate, "ADD": add, "N": tile.columns, "D": tile.depth, "Z": tile.splits,
        "EACH": cdiv(whole, tile.depth) * tile.depth, "AHEAD": tile.ahead,
        "EVEN": depth % tile.depth == 0 and end % tile.columns == 0, "M": tile.rows,
        "PRECISION": "ieee" if single else "tf32", "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def product(x: Tensor, w: Tensor, tile: Tiling, gate: bool, add: Tensor | None) -> Tensor:
    """add + gate(x @ w), of which there may be either; in add's memory where that is given."""
    (num_rows, depth), (_, width) = x.shape, w.shape
    end = width // 2 if gate else width
    out = torch.empty((num_rows, end), dtype=x.dtype, device=x.device) if add is None else add
    constants = constants_of(depth, width, gate, add is not None, tile, x.dtype == torch.float32)
    tiles, parts, turns = cdiv(end, tile.columns), x, x
    if tile.splits > 1:
        size = tiles * tile.splits * tile.rows * tile.columns * (1 + gate)
        parts, turns = torch.empty(size, dtype=torch.float32, device=x.device), counters(x.device)
    kernels.product[(tiles, tile.splits)](
        x, w, x if add is None else add, out, parts, turns, num_rows, x.stride(0),
        **constants, **early(x.device, tiles * tile.splits),
    )  # fmt: skip
    return out
