"""A user's tree of arrays as the model wants it that models/fit.py has made of theirs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...models.fit import deal, letters
from ...models.interface import ArraySpec, Fuse, ModelSpec, map_tree


def fit_arrays(arrays: Any, model: ModelSpec, fitted: ModelSpec, deal_over: int = 1) -> Any:
    """The arrays of `model` as those of `fitted`; `deal_over` devices get experts in turn."""
    copies = fitted.attention[0].num_kv_heads // model.attention[0].num_kv_heads

    def one(spec: ArraySpec, source: Any, new: ArraySpec, x: Any) -> np.ndarray:
        x = np.asarray(x)
        if copies > 1 and "kv_heads" in spec.axes:
            x = with_copies(x, spec, source, copies)
        x = np.pad(x, [(0, n - have) for n, have in zip(new.shape, x.shape, strict=True)])
        if deal_over > 1 and "experts" in spec.axes:
            axis = spec.axes.index("experts")
            x = np.take(x, deal(x.shape[axis], deal_over), axis)
        return x

    return map_tree(one, model.weights, model.checkpoint, fitted.weights, arrays)


def with_copies(x: np.ndarray, spec: ArraySpec, source: Fuse, copies: int) -> np.ndarray:
    """Each kv head `copies` times, each with a part of its query heads."""
    k, parts, at = spec.axes.index("kv_heads"), [], 0
    names = [letters(part) for part in source.parts]  # pyright: ignore[reportArgumentType]
    alone = len(names) == 1
    # what is not a query head is one wide
    group = x.shape[source.axis] - sum("g" not in n for n in names)
    for name in names:
        size = x.shape[source.axis] if alone else group if "g" in name else 1
        part = x[(slice(None),) * source.axis + (slice(at, at + size),)]
        at += size
        if "g" in name:
            g = name.index("g")
            assert g == k + 1
            shape = (*part.shape[:k], part.shape[k] * copies, part.shape[g] // copies, *part.shape[g + 1 :])
            parts.append(part.reshape(shape))
        else:
            parts.append(np.repeat(part, copies, k))
    return parts[0] if alone else np.concatenate(parts, source.axis)
