"""Where arrays are spread over shards, and the collectives between them: what JaxOps is built on.

"local": one device. "shard_map": a step sees local shards, ops call psum and all_gather. "auto": ops annotate, the
compiler moves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

Axes = tuple[str | None, ...]
MODES = ("local", "shard_map", "auto")
HIDDEN, WHOLE = ("tokens", None), (None, None)  # how hidden rows lie between products, and where all are needed


class Collectives:
    """Shards of logical axes. `rules` maps a logical axis to a mesh axis (or several, or None).

    That of "tokens" holds in steps whose tokens divide, and are at least `least_tokens`; outside of a step it does not.
    """

    def __init__(self, mode: str, rules: Mapping | None, mesh: Any, least_tokens: int) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        self.mode, self.mesh, self.least_tokens = mode, mesh, least_tokens
        self.tokens = (rules or {}).get("tokens")
        self.rules = {axis: names for axis, names in (rules or {}).items() if axis != "tokens"}
        self.left: str | None = None

    def rules_of(self, num_tokens: int) -> dict[str, Any]:
        """The rules of a step of so many tokens."""
        names = (self.tokens,) if isinstance(self.tokens, str) else self.tokens or ()
        parts = math.prod(self.mesh.shape[name] for name in names)
        return self.rules | ({"tokens": names} if num_tokens >= self.least_tokens and num_tokens % parts == 0 else {})

    def shards(self, *axes: str | None) -> tuple[str, ...]:
        """The mesh axes over which this step's local shards of these logical axes are spread; each once."""
        if self.mode != "shard_map":
            return ()
        found = (self.rules.get(axis) or () for axis in axes)
        return tuple(dict.fromkeys(n for names in found for n in ((names,) if isinstance(names, str) else names)))

    def axis_index(self, axis: str) -> jax.Array | int:
        """Which shard of a logical axis this is; 0 where the axis is whole."""
        names = self.shards(axis)
        return jax.lax.axis_index(names) if names else 0

    def axis_size(self, axis: str) -> int:
        """Over how many shards a logical axis is spread."""
        names = self.shards(axis)
        return math.prod(self.mesh.shape[name] for name in names) if names else 1

    def psum(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """The sum of x over the shards of these logical axes, each mesh axis once."""
        names = self.shards(*axes)
        return jax.lax.psum(x, names) if names else x

    def psum_to(self, x: jax.Array, axes: Axes, out: Axes) -> jax.Array:
        """psum over `axes`, laid out along its first dimension as `out` says: each shard sums its own part alone."""
        return self.sum_to(x, self.shards(*axes), out)

    def sum_to(self, x: jax.Array, names: tuple[str, ...], out: Axes) -> jax.Array:
        """The same over mesh axes."""
        to = self.shards(*out[:1])
        if not to or not set(to) <= set(names):
            x = jax.lax.psum(x, names) if names else x
            return self._part(x, out[0], 0) if to else x
        if rest := tuple(name for name in names if name not in to):
            x = jax.lax.psum(x, rest)
        return jax.lax.psum_scatter(x, to, scatter_dimension=0, tiled=True)

    def all_gather(self, x: jax.Array, axis: str | None, dim: int) -> jax.Array:
        """The shards of a logical axis side by side, along dimension `dim` of x."""
        names = self.shards(axis)
        return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x

    def leaving(self, axis: str) -> Self:
        """The same ops, for which `constrain` leaves that logical axis as it lies: `argmax`, `gumbel`, `trim` know."""
        ops = copy.copy(self)
        ops.left = axis if self.shards(axis) else None
        return ops

    def trim(self, x: jax.Array, axis: str, size: int) -> jax.Array:
        """x without what its last axis, a logical one, has beyond `size`; of one that was left, that is -inf."""
        if axis != self.left:
            return x[..., :size]
        place = jnp.arange(x.shape[-1]) + self.axis_index(axis) * x.shape[-1]
        return jnp.where(place < size, x, -float("inf"))

    def constrain(self, x: jax.Array, now: Axes, then: Axes) -> jax.Array:
        """x laid out as `then` says; `now` is how it lies."""
        if self.mode == "auto":
            spec = jax.P(*(self.rules.get(axis) for axis in then))
            return jax.lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, spec))
        for dim, (a, b) in enumerate(zip(now, then, strict=True)):
            if not self.shards(b) and (a is None or a != self.left):
                x = self.all_gather(x, a, dim)
            elif self.shards(b) and not self.shards(a):
                x = self._part(x, b, dim)
        return x

    def _part(self, x: jax.Array, axis: str | None, dim: int) -> jax.Array:
        """This shard's part of a whole x, of which `axis` is the dimension `dim`."""
        names = self.shards(axis)
        size = x.shape[dim] // math.prod(self.mesh.shape[name] for name in names)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names) * size, size, dim)
