"""Checkpoint tensors to one weight: parts rearranged, cast, and written straight into their place in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from einops import EinopsError, rearrange, repeat

from ...models.fit import PADDED
from ...models.interface import Fuse, Part
from .pages import empty
from .source import TensorSource
from .tree import Leaf, names_of

# numbers copied at once: strided copies are up to four times faster in pieces that the processor's cache holds
BLOCK = 1 << 16
THREADS = os.cpu_count() or 1


def arrange(leaf: Leaf, source: TensorSource, sizes: Mapping[str, int], window: tuple[slice, ...] = ()) -> np.ndarray:
    """A fresh array: the parts of leaf.source side by side along its axis, in the leaf's dtype.

    `sizes` tells letters of the patterns. With a `window` only that part of the array is made, and only what lies in it
    is read. Raises ValueError naming the tensor if it does not fit.
    """
    fuse, shape = leaf.source, leaf.spec.shape
    assert isinstance(fuse, Fuse), f"{leaf.path} is a value, not made of tensors"
    window = window or tuple(slice(0, n) for n in shape)
    out = empty(tuple(at.stop - at.start for at in window), leaf.dtype)
    filled = place_parts(out, shape, window, fuse, leaf.path, source, sizes)
    own, axis = window[fuse.axis], fuse.axis
    if filled != shape[axis] and leaf.spec.axes[axis] not in PADDED:
        raise ValueError(f"{', '.join(leaf.names)} fill {filled} of axis {axis}: {leaf.path} has shape {shape}")
    out[(slice(None),) * axis + (slice(max(0, filled - own.start), None),)] = 0
    return out


def place_parts(
    out: np.ndarray,
    shape: tuple[int, ...],
    window: tuple[slice, ...],
    fuse: Fuse,
    path: str,
    source: TensorSource,
    sizes: Mapping[str, int],
) -> int:
    """Writes the parts side by side into `out`, the window of an array of that shape; returns how much of the axis they
    fill. A part that is fused itself fills what is left of the axis evenly with those behind it.
    """
    axis, at, own = fuse.axis, 0, window[fuse.axis]
    fused: list[tuple[np.ndarray, tuple[int, ...], tuple[slice, ...], Fuse]] = []
    for i, part in enumerate(fuse.parts):
        x = fit(source.get(part.name), part, sizes) if isinstance(part, Part) else None
        size = x.shape[axis] if x is not None else (shape[axis] - at) // (len(fuse.parts) - i)
        whole = (*shape[:axis], size, *shape[axis + 1 :])
        if x is not None and (x.shape != whole or at + size > shape[axis]):
            raise ValueError(f"{names_of(part)[0]} gives {x.shape} at {at} of axis {axis}: {path} has shape {shape}")
        first, last = max(at, own.start), min(at + size, own.stop)
        if first < last:
            place = out[(slice(None),) * axis + (slice(first - own.start, last - own.start),)]
            inner = (*window[:axis], slice(first - at, last - at), *window[axis + 1 :])
            if x is not None:
                copy_into(place, x[inner])
            elif not isinstance(part, Fuse):
                place[...] = 0
            else:
                fused.append((place, whole, inner, part))
        at += size
    # experts: there may be hundreds of them, and copying is what takes its time
    with ThreadPoolExecutor(min(THREADS, len(fused)) or 1) as pool:
        for done in [pool.submit(fill, *one, path, source, sizes) for one in fused]:
            done.result()
    return at


def fill(
    place: np.ndarray,
    shape: tuple[int, ...],
    window: tuple[slice, ...],
    fuse: Fuse,
    path: str,
    source: TensorSource,
    sizes: Mapping[str, int],
) -> None:
    """Fills all of `place`, or raises ValueError naming what does not."""
    if place_parts(place, shape, window, fuse, path, source, sizes) != shape[fuse.axis]:
        raise ValueError(f"{', '.join(names_of(fuse))} do not fill {shape} of {path}")


def fit(x: np.ndarray, part: Part, sizes: Mapping[str, int]) -> np.ndarray:
    """x with its axes as the part's pattern says; a view where that is possible."""
    known = {n: sizes[n] for n in re.findall(r"[a-z]\w*", part.pattern) if n in sizes}
    try:
        # only a pattern that says a letter more repeats, and copies
        return repeat(x, part.pattern, **known) if "r" in known else rearrange(x, part.pattern, **known)
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
