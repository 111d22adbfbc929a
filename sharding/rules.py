"""Which mesh axis shares which logical axis. Names only: no array library, no model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

MeshAxes = str | tuple[str, ...] | None
AXIS_NAMES = {
    "kv_heads": "num_kv_heads",
    "mlp": "mlp_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "expert_mlp": "expert_dim",
}
SIZE_NAMES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
# Megatron's split (arXiv:1909.08053): whole kv heads with their query heads, the mlp's inside, the vocabulary. An
# expert's inside is an axis of its own, so that experts can be shared out whole where other mlps are split
TENSOR = {"kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp", "vocab": "tp"}
LOGICAL_AXES = ("vocab", "kv_heads", "mlp", "experts", "expert_mlp", "tokens")
# hidden rows between products, by tokens: Megatron's sequence parallelism (arXiv:2205.05198). No weight has this axis
SEQUENCE = {"tokens": "tp"}
# axes of arrays, or of lists of them, for which there is no rule that a program could follow
WHOLE = {"blocks": "each device holds all", "layers": "pipeline_parallel_size shares them"}
# where experts lie on several replicas' devices, each replica's tokens go to all of them, and "replicas" are an axis
EXPERT_AXES = ("experts", "expert_mlp")


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


def preset(
    mesh_shape: Mapping[str, int], expert_parallel: bool = False, sequence_parallel: bool = False
) -> ShardingRules:
    """The rules of a mesh with axes dp, pp and tp: what each shares where it is larger than 1.

    Experts are split inside by tp, or shared out whole over dp and tp; hidden rows are shared by tp if asked.
    """
    shared = tuple(name for name in ("dp", "tp") if mesh_shape.get(name, 1) > 1)
    wanted = TENSOR | (SEQUENCE if sequence_parallel else {})
    rules: dict[str, MeshAxes] = {name: axis for name, axis in wanted.items() if mesh_shape.get(axis, 1) > 1}
    if expert_parallel and shared:
        rules.pop("expert_mlp", None)
        rules["experts"] = shared
    if mesh_shape.get("pp", 1) > 1:
        rules["layers"] = "pp"
    return ShardingRules(rules)


def with_replicas(rules: ShardingRules, mesh_shape: Mapping[str, int]) -> ShardingRules:
    """The rules; where replicas share experts, one more: what each replica has of its own is shared out over dp."""
    shared = {name for axis in EXPERT_AXES for name in as_tuple(rules.get(axis))}
    if mesh_shape.get("dp", 1) == 1 or "dp" not in shared:
        return rules
    return ShardingRules({**rules, "replicas": "dp"})


def check_known(rules: ShardingRules, mesh_shape: Mapping[str, int]) -> None:
    """Raises ValueError for a logical axis that no array has or that stays whole, or a mesh axis that no mesh has."""
    for axis, names in rules.items():
        if axis in WHOLE:
            can = ", ".join(LOGICAL_AXES)
            raise ValueError(f"sharding_rules: {axis!r} cannot be shared out, {WHOLE[axis]}: {can} can")
        if axis not in LOGICAL_AXES:
            raise ValueError(f"sharding_rules: no array has an axis {axis!r}: {', '.join(LOGICAL_AXES)} there are")
        for name in as_tuple(names):
            if name not in mesh_shape:
                raise ValueError(f"sharding_rules: {axis!r} goes to {name!r}: mesh axes are {', '.join(mesh_shape)}")
            if name == "dp" and axis not in EXPERT_AXES:
                can = " and ".join(EXPERT_AXES)
                raise ValueError(f"sharding_rules: {axis!r} goes to 'dp', where tokens are others: {can} can go there")
        if axis == "tokens" and as_tuple(names) not in ((), ("tp",)):
            raise ValueError(f"sharding_rules: 'tokens' goes to {names!r}: 'tp' alone has all tokens of a step")


def place_of(mesh_shape: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a process stands along each axis of a mesh: the last axis is the fastest.

    But along pp ranks count down: rank 0 is in the last stage, so that what is sampled is where the scheduler is.
    """
    place: dict[str, int] = {}
    for name, size in reversed(tuple(mesh_shape.items())):
        rank, at = divmod(rank, size)
        place[name] = size - 1 - at if name == "pp" else at
    return place


class Place(Protocol):
    """One position of a mesh."""

    def size(self, names: tuple[str, ...]) -> int: ...
    def index(self, names: tuple[str, ...]) -> int: ...


def shard_of(
    shape: tuple[int, ...], axes: tuple[str | None, ...], rules: ShardingRules, place: Place
) -> tuple[slice, ...]:
    """The part of an array that lies at one place of a mesh. Its axes divide."""
    found = []
    for size, names in zip(shape, rules.mesh_axes(axes), strict=True):
        part, at = size // place.size(names), place.index(names)
        found.append(slice(part * at, part * (at + 1)))
    return tuple(found)


def misfit(specs: Any, rules: ShardingRules, mesh_shape: Mapping[str, int]) -> tuple[str, str] | None:
    """The first axis of a tree of ArraySpecs that does not split evenly, and words that say so; None: all do."""
    for axis, size in axis_sizes(specs, rules).items():
        names = as_tuple(rules[axis])
        parts = math.prod(mesh_shape[name] for name in names)
        if size % parts:
            given = " x ".join(SIZE_NAMES.get(name, name) for name in names)
            return axis, f"{AXIS_NAMES.get(axis, axis)} {size} is not divisible by {given} {parts}"
    return None


def axis_sizes(specs: Any, rules: ShardingRules) -> dict[str, int]:
    """What each shared logical axis measures: the greatest common divisor over all arrays."""
    sizes: dict[str, int] = {}
    for spec in spec_leaves(specs):
        for axis, size, names in zip(spec.axes, spec.shape, rules.mesh_axes(spec.axes), strict=True):
            if names:
                sizes[axis] = math.gcd(size, sizes.get(axis, 0))
    return sizes


def spec_leaves(tree: Any) -> Iterator[Any]:
    """The ArraySpecs in dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from spec_leaves(branch)
    else:
        yield tree
