"""Which mesh axis shares which logical axis. Names only: no array library, no model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MeshAxes = str | tuple[str, ...] | None
AXIS_NAMES = {
    "kv_heads": "num_kv_heads",
    "mlp": "mlp_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "expert_mlp": "expert_dim",
}
SIZE_NAMES = {"tp": "tensor_parallel_size"}


@dataclass(frozen=True, eq=False)
class ShardingRules(Mapping[str, MeshAxes]):
    """Logical axis -> mesh axis, several of them, or None. What has no rule is replicated."""

    table: Mapping[str, MeshAxes]

    def __getitem__(self, axis: str) -> MeshAxes:
        return self.table[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def mesh_axes(self, axes: tuple[str | None, ...]) -> tuple[tuple[str, ...], ...]:
        """For each axis of an array, the mesh axes that share it. Raises ValueError where one would share two."""
        found = tuple(as_tuple(self.get(axis)) if axis else () for axis in axes)
        used = [name for names in found for name in names]
        for name in used:
            if used.count(name) > 1:
                both = " and ".join(axis for axis, names in zip(axes, found, strict=True) if axis and name in names)
                raise ValueError(f"mesh axis {name!r} would share {both} of one array with axes {axes}")
        return found


def as_tuple(names: MeshAxes) -> tuple[str, ...]:
    """A rule's mesh axes as a tuple."""
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else names


def tensor_parallel() -> ShardingRules:
    """Megatron's split (arXiv:1909.08053): whole kv heads with their query heads, the mlp's inside, the vocabulary.

    An expert's inside is an axis of its own, so that experts can be shared out whole where other mlps are split.
    """
    return ShardingRules({"kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp", "vocab": "tp"})


def check_divides(specs: Any, rules: ShardingRules, mesh_shape: Mapping[str, int]) -> None:
    """Raises ValueError unless every array of a tree of ArraySpecs splits evenly; the message says what would."""
    sizes: dict[str, int] = {}
    for spec in spec_leaves(specs):
        for axis, size, names in zip(spec.axes, spec.shape, rules.mesh_axes(spec.axes), strict=True):
            if names:
                sizes[axis] = math.gcd(size, sizes.get(axis, 0))
    for axis, size in sizes.items():
        names = as_tuple(rules[axis])
        parts = math.prod(mesh_shape[name] for name in names)
        if size % parts:
            common = math.gcd(*(s for a, s in sizes.items() if as_tuple(rules[a]) == names))
            would = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            given = " x ".join(SIZE_NAMES.get(name, name) for name in names)
            raise ValueError(f"{AXIS_NAMES.get(axis, axis)} {size} is not divisible by {given} {parts}: {would} would")


def spec_leaves(tree: Any) -> Iterator[Any]:
    """The ArraySpecs in dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from spec_leaves(branch)
    else:
        yield tree
