"""The trees of a ModelSpec, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ...models.interface import ArraySpec, Fuse, ModelSpec, Part

# numpy knows "bfloat16" by name only after ml_dtypes is imported; so say what it is
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Placer(Protocol):
    """What loading asks of a backend."""

    @property
    def dtype(self) -> str:
        """Of weights whose spec names none."""
        ...

    def place_weight(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """x placed and packed; shares no memory with x."""
        ...

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        """The part of an array that this process places; () is all of it."""
        ...

    def place_shard(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight of that part, alone."""
        ...

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight of x's numbers, repeated to fill the spec's shape (np.resize)."""
        ...


@dataclass(frozen=True)
class Leaf:
    """One weight of a model: where it is in the tree ("layers.0.qkv"), what it is, and what it is made of."""

    path: str
    spec: ArraySpec
    source: Fuse | np.ndarray  # an array is the value itself (init "host")
    dtype: np.dtype  # in which it is placed

    @property
    def names(self) -> list[str]:
        """The checkpoint tensors that it is made of."""
        return names_of(self.source) if isinstance(self.source, Fuse) else []

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.spec.shape))


def names_of(source: Fuse | Part | None) -> list[str]:
    """The tensors of a part, or of all parts."""
    if source is None:
        return []
    return [source.name] if isinstance(source, Part) else [name for part in source.parts for name in names_of(part)]


def map_leaves(f: Callable[[Leaf], Any], model: ModelSpec, dtype: str) -> dict[str, Any]:
    """f over the model's weights, as a tree. `dtype` is that of leaves whose spec names none."""

    def walk(spec: Any, source: Any, path: str) -> Any:
        if isinstance(spec, dict):
            return {k: walk(v, source[k], f"{path}.{k}") for k, v in spec.items()}
        if isinstance(spec, list | tuple):
            return type(spec)(walk(v, source[i], f"{path}.{i}") for i, v in enumerate(spec))
        name = spec.dtype or dtype
        return f(Leaf(path[1:], spec, source, BFLOAT16 if name == "bfloat16" else np.dtype(name)))

    return walk(model.weights, model.checkpoint, "")


def leaves_of(model: ModelSpec, dtype: str) -> list[Leaf]:
    """The model's weights in the order of map_leaves."""
    found: list[Leaf] = []
    map_leaves(found.append, model, dtype)
    return found


Here = Callable[[Leaf], bool]  # whether a leaf is wanted in this process; None stands in a tree for one that is not


def everywhere(leaf: Leaf) -> bool:
    return True


def place_tree(
    read: Callable[[Leaf], np.ndarray], model: ModelSpec, backend: Placer, here: Here = everywhere
) -> dict[str, Any]:
    """The weights placed one by one, each dropped on the host before the next is read."""

    def place(leaf: Leaf) -> Any:
        if not here(leaf):
            return None
        value = leaf.source if isinstance(leaf.source, np.ndarray) else read(leaf)
        return backend.place_weight(value, leaf.spec)

    return map_leaves(place, model, backend.dtype)
