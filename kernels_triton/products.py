"""The matrix products of models/, and weights as they read them fastest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Packed:
    """A weight in another form beside its own."""

    weight: Tensor


def pack(weight: Tensor, product: str | None) -> Tensor | Packed:
    """The weight, ready for `product`."""
    return weight


def matmul(spec: str, x: Tensor, w: Tensor | Packed) -> Tensor:
    """A matrix product on 2-D views: the letters that end x are contracted with those that begin or end w."""
    shared, first = contraction(spec)
    free = x.shape[: x.ndim - shared]
    if first:
        inner, depth = w.shape[shared:], w.shape[:shared].numel()
        return (x.reshape(-1, depth) @ w.reshape(depth, -1)).reshape(*free, *inner)
    inner, depth = w.shape[: w.ndim - shared], w.shape[w.ndim - shared :].numel()
    return torch.nn.functional.linear(x.reshape(-1, depth), w.reshape(-1, depth)).reshape(*free, *inner)


@cache
def contraction(spec: str) -> tuple[int, bool]:
    """How many letters are contracted, and whether they begin w (else they end it)."""
    xs, ws, ys = spec.replace("->", ",").split(",")
    shared = "".join(a for a in xs if a in ws)
    if xs.endswith(shared):
        if ws.startswith(shared) and ys == xs.removesuffix(shared) + ws.removeprefix(shared):
            return len(shared), True
        if ws.endswith(shared) and ys == xs.removesuffix(shared) + ws.removesuffix(shared):
            return len(shared), False
    raise NotImplementedError(f"einsum {spec!r}: the contracted letters must end x, and begin or end w")
