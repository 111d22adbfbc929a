"""Checkpoint tensors to one weight: parts rearranged, cast, and written straight into their place in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

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


class Place(NamedTuple):
    """Where parts go: `out` is the window of an array of that shape."""

    out: np.ndarray
    shape: tuple[int, ...]
    window: tuple[slice, ...]

    def part(self, axis: int, at: int, size: int) -> Place:
        """So much of the array from `at` on along an axis. `out` is empty if the window has nothing of it."""
        own = self.window[axis]
        first = max(at, own.start)
        last = max(first, min(at + size, own.stop))
        return Place(
            self.out[(slice(None),) * axis + (slice(first - own.start, last - own.start),)],
            (*self.shape[:axis], size, *self.shape[axis + 1 :]),
            (*self.window[:axis], slice(first - at, last - at), *self.window[axis + 1 :]),
        )


@dataclass(frozen=True)
class Reader:
    """Writes the tensors of a source where a weight wants them. `sizes` tells letters of the patterns."""

    source: TensorSource
    sizes: Mapping[str, int]
    path: str  # of the weight, for errors

    def write(self, fuse: Fuse, place: Place) -> int:
        """Writes the parts side by side; returns how much of the axis they fill.

        A part that is fused itself fills what is left of the axis evenly with those behind it.
        """
        axis, shape, at = fuse.axis, place.shape, 0
        fused: list[tuple[Fuse, Place]] = []
        for i, part in enumerate(fuse.parts):
            if isinstance(part, Part):
                x = fit(self.source.get(part.name), part, self.sizes)
                own = place.part(axis, at, x.shape[axis])
                if x.shape != own.shape or at + x.shape[axis] > shape[axis]:
                    raise ValueError(
                        f"{part.name} gives {x.shape} at {at} of axis {axis}: {self.path} has shape {shape}"
                    )
                copy_into(own.out, x[own.window])
            else:
                own = place.part(axis, at, (shape[axis] - at) // (len(fuse.parts) - i))
                if part is None:
                    own.out[...] = 0
                elif own.out.size:
                    fused.append((part, own))
            at += own.shape[axis]
        # experts: there may be hundreds of them, and copying is what takes its time
        with ThreadPoolExecutor(min(THREADS, len(fused)) or 1) as pool:
            for done in [pool.submit(self.fill, *one) for one in fused]:
                done.result()
        return at

    def fill(self, fuse: Fuse, place: Place) -> None:
        """The same for parts that must fill the axis. Raises ValueError naming those that do not."""
        if self.write(fuse, place) != place.shape[fuse.axis]:
            raise ValueError(f"{', '.join(names_of(fuse))} do not fill {place.shape} of {self.path}")


def arrange(leaf: Leaf, source: TensorSource, sizes: Mapping[str, int], window: tuple[slice, ...] = ()) -> np.ndarray:
    """A fresh array: the parts of leaf.source side by side along its axis, in the leaf's dtype.

    `sizes` tells letters of the patterns. With a `window` only that part of the array is made, and only what lies in it
    is read. Raises ValueError naming the tensor if it does not fit.
    """
    fuse, shape = leaf.source, leaf.spec.shape
    assert isinstance(fuse, Fuse), f"{leaf.path} is a value, not made of tensors"
    window, axis = window or tuple(slice(0, n) for n in shape), fuse.axis
    place = Place(empty(tuple(at.stop - at.start for at in window), leaf.dtype), shape, window)
    filled = Reader(source, sizes, leaf.path).write(fuse, place)
    if filled != shape[axis] and leaf.spec.axes[axis] not in PADDED:
        raise ValueError(f"{', '.join(leaf.names)} fill {filled} of axis {axis}: {leaf.path} has shape {shape}")
    place.part(axis, filled, shape[axis] - filled).out[...] = 0
    return place.out


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
