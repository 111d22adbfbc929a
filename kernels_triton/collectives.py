"""Where arrays are spread over processes, and the collectives between them: what TorchOps is built on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch

Tensor = torch.Tensor
HIDDEN, WHOLE = ("tokens", None), (None, None)  # how hidden rows lie between products, and where all are needed


class Collectives:
    """Shards of logical axes. `mesh` is this process's place among others; `rules` map logical axes to its axes.

    That of "tokens" holds in steps whose tokens divide, and are at least `least_tokens`; outside of a step it does not.
    """

    def __init__(self, rules: Mapping[str, Any] | None, mesh: Any, least_tokens: int) -> None:
        self.mesh, self.least_tokens = mesh, least_tokens
        self.tokens = (rules or {}).get("tokens") if mesh else None
        self.rules = {axis: names for axis, names in (rules or {}).items() if axis != "tokens"}
        self.left: str | None = None

    def rules_of(self, num_tokens: int) -> dict[str, Any]:
        """The rules of a step of so many tokens."""
        names = (self.tokens,) if isinstance(self.tokens, str) else self.tokens or ()
        parts = self.mesh.size(names) if names else 1
        return self.rules | ({"tokens": names} if num_tokens >= self.least_tokens and num_tokens % parts == 0 else {})

    def shards(self, *axes: str | None) -> tuple[str, ...]:
        """The mesh axes over which local shards of these logical axes are spread; each once."""
        if self.mesh is None:
            return ()
        found = (self.rules.get(axis) or () for axis in axes)
        return tuple(dict.fromkeys(n for names in found for n in ((names,) if isinstance(names, str) else names)))

    def axis_index(self, axis: str) -> int:
        """Which shard of a logical axis this is; 0 where the axis is whole."""
        names = self.shards(axis)
        return self.mesh.index(names) if names else 0

    def axis_size(self, axis: str) -> int:
        """Over how many shards a logical axis is spread."""
        names = self.shards(axis)
        return self.mesh.size(names) if names else 1

    def psum(self, x: Tensor, *axes: str | None) -> Tensor:
        """The sum of x over the shards of these logical axes; each mesh axis once. Consumes x."""
        names = self.shards(*axes)
        return self.mesh.all_reduce(x, names) if names else x

    def psum_to(self, x: Tensor, axes: tuple, out: tuple) -> Tensor:
        """psum over `axes`, laid out along its first dimension as `out` says: each shard sums its own part alone."""
        return self.sum_to(x, self.shards(*axes), out)

    def sum_to(self, x: Tensor, names: tuple[str, ...], out: tuple) -> Tensor:
        """The same over mesh axes."""
        to = self.shards(*out[:1])
        if not to or not set(to) <= set(names):
            x = self.mesh.all_reduce(x, names) if names else x
            return self._part(x, out[0], 0) if to else x
        if rest := tuple(name for name in names if name not in to):
            x = self.mesh.all_reduce(x, rest)
        return self.mesh.reduce_scatter(x, to)

    def all_gather(self, x: Tensor, axis: str | None, dim: int) -> Tensor:
        """The shards of a logical axis side by side, along dimension `dim` of x."""
        names = self.shards(axis)
        return self.mesh.all_gather(x, names, dim) if names else x

    def leaving(self, axis: str) -> Self:
        """The same ops, for which `constrain` leaves that logical axis as it lies: `argmax`, `gumbel`, `trim` know."""
        ops = copy.copy(self)
        ops.left = axis if self.shards(axis) else None
        return ops

    def trim(self, x: Tensor, axis: str, size: int) -> Tensor:
        """x without what its last axis, a logical one, has beyond `size`; of one that was left, that is -inf."""
        if axis != self.left:
            return x[..., :size]
        place = torch.arange(x.shape[-1], device=x.device) + self.axis_index(axis) * x.shape[-1]
        return torch.where(place < size, x, -float("inf"))

    def constrain(self, x: Tensor, now: tuple, then: tuple) -> Tensor:
        """x laid out as `then` says; `now` is how it lies."""
        if self.mesh is not None:
            for dim, (a, b) in enumerate(zip(now, then, strict=True)):
                if not self.shards(b) and (a is None or a != self.left):
                    x = self.all_gather(x, a, dim)
                elif self.shards(b) and not self.shards(a):
                    x = self._part(x, b, dim)
        return x

    def _part(self, x: Tensor, axis: str | None, dim: int) -> Tensor:
        """This shard's part of a whole x, of which `axis` is the dimension `dim`."""
        names = self.shards(axis)
        size = x.shape[dim] // self.mesh.size(names)
        return x.narrow(dim, self.mesh.index(names) * size, size)
