"""The array namespace that models/ may use (`ops.xp`), in torch: a listed subset of the array API, with int32 integers.

Dtypes: bool, int32, float32, bfloat16. Element-wise: abs, astype, clip, exp, isfinite, log, maximum, minimum, round,
tanh, where. Reductions (axis=None, keepdims=False): all, any, max, min, sum; cumulative_sum (axis). Making and joining:
concat, ones_like, stack, zeros_like. Searching: searchsorted.

As in JAX, no integer result is wider than int32: counts, sums of int32 or bool, and places found by searching.
"""

from __future__ import annotations

import builtins

import torch
from torch import abs, bfloat16, bool, exp, float32, int32, isfinite, log, ones_like, round, tanh, zeros_like

# fmt: off
__all__ = [
    "abs", "all", "any", "astype", "bfloat16", "bool", "clip", "concat", "cumulative_sum", "exp", "float32", "int32",
    "isfinite", "log", "max", "maximum", "min", "minimum", "ones_like", "round", "searchsorted", "stack", "sum", "tanh",
    "where", "zeros_like",
]
# fmt: on

Tensor = torch.Tensor


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    return torch.where(condition, x, y)


def clip(x: Tensor, min: float | Tensor | None = None, max: float | Tensor | None = None) -> Tensor:
    return torch.clamp(x, min, max)  # type: ignore[call-overload]


def maximum(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp_min(x, y)


def minimum(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp_max(x, y)


def max(x: Tensor, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    return torch.amax(x, () if axis is None else axis, keepdims)


def min(x: Tensor, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    return torch.amin(x, () if axis is None else axis, keepdims)


def any(x: Tensor, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    return torch.any(x, axis, keepdims)


def all(x: Tensor, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    return torch.all(x, axis, keepdims)


def sum(x: Tensor, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    return torch.sum(x, axis, keepdims, dtype=_sum_dtype(x))


def cumulative_sum(x: Tensor, axis: int = 0) -> Tensor:
    return torch.cumsum(x, axis, dtype=_sum_dtype(x))


def searchsorted(x1: Tensor, x2: Tensor, side: str = "left") -> Tensor:
    return torch.searchsorted(x1, x2, side=side, out_int32=True)


def concat(arrays: list[Tensor] | tuple[Tensor, ...], axis: int = 0) -> Tensor:
    return torch.cat(tuple(arrays), axis)


def stack(arrays: list[Tensor] | tuple[Tensor, ...], axis: int = 0) -> Tensor:
    return torch.stack(tuple(arrays), axis)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else int32
