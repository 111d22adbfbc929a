"""Checkpoint tensors to one weight: parts rearranged, cast, and written straight into their place in it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from einops import EinopsError, rearrange

from ...models.interface import Fuse, Part
from .pages import empty
from .source import TensorSource
from .tree import Leaf, names_of

# numbers copied at once: strided copies are up to four times faster in pieces that the processor's cache holds
BLOCK = 1 << 16


def arrange(leaf: Leaf, source: TensorSource, sizes: Mapping[str, int]) -> np.ndarray:
    """A fresh array: the parts of leaf.source side by side along its axis, in the leaf's dtype.

    `sizes` tells letters of the patterns. Raises ValueError naming the tensor if it does not fit.
    """
    fuse = leaf.source
    assert isinstance(fuse, Fuse), f"{leaf.path} is a value, not made of tensors"
    out = empty(leaf.spec.shape, leaf.dtype)
    filled = place_parts(out, fuse, leaf.path, source, sizes)
    if filled != out.shape[fuse.axis]:
        names = ", ".join(leaf.names)
        raise ValueError(f"{names} fill {filled} of axis {fuse.axis}: {leaf.path} has shape {out.shape}")
    return out


def place_parts(out: np.ndarray, fuse: Fuse, path: str, source: TensorSource, sizes: Mapping[str, int]) -> int:
    """Writes the parts side by side into `out`, each where it stays; returns how much of the axis they fill.

    A part that is fused itself fills what is left of the axis evenly with those behind it.
    """
    axis, at = fuse.axis, 0
    for i, part in enumerate(fuse.parts):
        if isinstance(part, Fuse):
            size = (out.shape[axis] - at) // (len(fuse.parts) - i)
            place = out[(slice(None),) * axis + (slice(at, at + size),)]
            if place_parts(place, part, path, source, sizes) != place.shape[part.axis]:
                raise ValueError(f"{', '.join(names_of(part))} do not fill {place.shape} of {path}")
        else:
            x = fit(source.get(part.name), part, sizes)
            size = x.shape[axis]
            place = out[(slice(None),) * axis + (slice(at, at + size),)]
            if place.shape != x.shape:
                raise ValueError(f"{part.name} gives {x.shape} at {at} of axis {axis}: {path} has shape {out.shape}")
            copy_into(place, x)
        at += size
    return at


def fit(x: np.ndarray, part: Part, sizes: Mapping[str, int]) -> np.ndarray:
    """x with its axes as the part's pattern says; a view where that is possible."""
    letters = re.findall(r"[a-z]\w*", part.pattern.split("->")[0])
    known = {n: sizes[n] for n in letters if n in sizes}
    try:
        return rearrange(x, part.pattern, **known)
    except EinopsError as error:
        raise ValueError(f"{part.name} of shape {x.shape} does not fit {part.pattern!r} with {known}") from error


def copy_into(place: np.ndarray, x: np.ndarray) -> None:
    """place[...] = x with a cast, in blocks."""
    if x.size > BLOCK:
        axis = max((i for i in range(x.ndim) if x.shape[i] > 1), key=lambda i: abs(x.strides[i]))
        front, half = (slice(None),) * axis, x.shape[axis] // 2
        for side in (slice(half), slice(half, None)):
            copy_into(place[(*front, side)], x[(*front, side)])
        return
    # as words: numpy moves elements of a dtype that is not its own (bfloat16) by one call each
    word = f"u{place.itemsize}"
    place.view(word)[...] = x.astype(place.dtype, copy=False).view(word)
