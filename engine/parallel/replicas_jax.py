"""Replicas that step together in JAX: one program for all, in which each has devices along the mesh axis dp.

What each replica has of its own has a leading axis of replicas, outside of programs; inside of them it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ...models.interface import ArraySpec

AXIS = "replicas"


class JaxReplicas:
    """`num` of them, all in this process."""

    def __init__(self, num: int):
        self.num = num

    def specs(self, tree: Any) -> Any:
        """Specs of what each has of its own."""

        def leading(spec: ArraySpec) -> ArraySpec:
            return replace(spec, shape=(self.num, *spec.shape), axes=(AXIS, *spec.axes))

        return jax.tree.map(leading, tree, is_leaf=lambda x: isinstance(x, ArraySpec))

    def stack(self, trees: Sequence[Any]) -> Any:
        """One tree of host arrays for a program, made of each replica's."""
        return jax.tree.map(lambda *xs: np.stack(xs), *trees)

    def same(self, tree: Any) -> Any:
        """The tree with host arrays that are each replica's."""
        return jax.tree.map(lambda x: np.stack([x] * self.num) if isinstance(x, np.ndarray) else x, tree)

    def gather(self, x: jax.Array) -> jax.Array:
        """What a program returned, as `read` takes it."""
        return x

    def read(self, x: jax.Array, at: int) -> np.ndarray:
        """A replica's part of it, on the host."""
        own = next(shard for shard in x.addressable_shards if shard.index[0].start == at)
        return np.array(own.data)[0]

    def within(self, fn: Callable, args: tuple[str, ...]) -> Callable:
        """fn as it is called inside of shard_map: on each device with its own replica's part."""

        def program(*xs: Any) -> Any:
            own = (x if is_shared(name) else jax.tree.map(lambda a: a[0], x) for name, x in zip(args, xs, strict=True))
            return jax.tree.map(lambda a: a[None], fn(*own))

        return program


def is_shared(name: str) -> bool:
    """Whether the argument of that name is no replica's own."""
    return name.endswith("weights")
