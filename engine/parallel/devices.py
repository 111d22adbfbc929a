"""What each device of a mesh holds, and what devices tell each other in one step; from specs alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.interface import ArraySpec, ModelSpec
from ...sharding.rules import as_tuple, place_of
from ..config import EngineConfig
from .shares import divisors_of


@dataclass(frozen=True)
class Collective:
    """One that happens `count` times a step. Bytes are those of its result, for each token, or each sampled row."""

    kind: str  # all-reduce, all-gather, reduce-scatter or send
    where: str
    mesh_axes: tuple[str, ...]
    count: int
    of_rows: bool  # of sampled rows, not of tokens
    bytes_each: int  # a token or row
    seldom: bool = False  # instead of "tokens", in steps whose sampling has to see all logits (decision 025)
    parts: int = 1  # devices that share out its result
    steps: str = "all"  # or those whose hidden rows are "shared" out by tokens, or "whole" (decision 029)

    def bytes_of(self, num_tokens: int, num_rows: int) -> int:
        """Bytes of one of them in a step of padded sizes."""
        return self.bytes_each * (num_rows if self.of_rows else num_tokens) // self.parts

    def runs_in(self, kind: str) -> bool:
        """Whether it happens in a greedy step of that kind (kind_of_step)."""
        return not self.seldom and self.steps in ("all", kind)


@dataclass(frozen=True)
class Stage:
    """What one device of a pipeline stage holds; its neighbours along tp hold as much."""

    devices: str
    layers: str
    weights_bytes: int
    cache_bytes: int


def stages(num_layers: int, num_stages: int) -> list[range]:
    """Which layers each stage has: neighbours, as evenly as can be, the first ones more."""
    ends = [-(-num_layers * i // num_stages) for i in range(num_stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def kind_of_step(config: EngineConfig, num_tokens: int) -> str:
    """Whether hidden rows of a step of so many tokens are "shared" out by tokens, or "whole"."""
    parts = divisors_of(config).get("tokens", 1)
    return "shared" if parts > 1 and num_tokens >= config.sp_min_token_num and num_tokens % parts == 0 else "whole"


def stage_layers(config: EngineConfig, model: ModelSpec, rank: int | None) -> range | None:
    """The layers of the one pipeline stage that a process has; None: of all of them, or there is one stage."""
    if rank is None or config.backend != "torch" or (count := config.pipeline_parallel_size) == 1:
        return None
    return stages(len(model.attention), count)[place_of(config.mesh_shape, rank)["pp"]]


def collectives_of(config: EngineConfig, model: ModelSpec, itemsize: int) -> list[Collective]:
    """Those of one step: forward, then head. `itemsize` is that of the dtype that the model is run in."""
    sizes, wide = divisors_of(config), 4
    # jax adds partial sums up in float32, torch in the model's dtype; sums over experts are float32 in both
    product = wide if config.backend == "jax" else itemsize
    dim = model.weights["embed"].shape[1]
    found: list[Collective] = []

    def note(kind: str, where: str, axes: Sequence[str], count: int, of_rows: bool, bytes_each: int,
             without: Sequence[str] = (), **more: Any) -> None:  # fmt: skip
        shared = (name for axis in axes for name in as_tuple(config.rules.get(axis)) if config.mesh_shape[name] > 1)
        if count and (names := tuple(name for name in dict.fromkeys(shared) if name not in without)):
            found.append(Collective(kind, where, names, count, of_rows, bytes_each, **more))

    def note_sum(where: str, axes: Sequence[str], count: int, bytes_each: int, **more: Any) -> None:
        scatters = parts > 1 and any("tp" in as_tuple(config.rules.get(axis)) for axis in axes)
        note("all-reduce", where, axes, count, False, bytes_each, steps="whole" if scatters else "all", **more)
        if scatters:
            note("reduce-scatter", where, ["tokens"], count, False, bytes_each, parts=parts, steps="shared")

    parts = sizes.get("tokens", 1)
    if _is_split(model.weights["embed"], sizes):
        note_sum("embed", ["vocab"], 1, dim * itemsize)
    if parts > 1:
        # what attention and MLPs or experts read, and what each stage leaves
        gathers = 2 * len(model.attention) + config.pipeline_parallel_size
        note("all-gather", "hidden", ["tokens"], gathers, False, dim * itemsize, steps="shared")
    products: dict[tuple[str, str, int], int] = {}
    for layer in model.weights["layers"]:
        for name, spec in layer.items():
            for axis in _contracted(spec):
                key = name, axis, _made(spec)
                products[key] = products.get(key, 0) + (sizes.get(axis, 1) > 1)
    for (name, axis, made), count in products.items():
        note_sum(name, [axis], count, made * product)
    mixed = sum(any("experts" in spec.axes for spec in layer.values()) for layer in model.weights["layers"])
    if mixed and model.mixture and (replicas := config.num_joint) > 1:
        # the tokens of all replicas, and a weight and an id of each chosen expert
        note("all-gather", "experts", ["replicas"], mixed, False, replicas * dim * itemsize)
        note("all-gather", "routing", ["replicas"], mixed, False, replicas * model.mixture.routing.num_chosen * 8)
        note("reduce-scatter", "experts", ["replicas"], mixed, False, dim * wide)
        if config.backend == "torch":
            note("all-gather", "results", ["replicas"], 1, True, replicas * 4)
    together = as_tuple(config.rules.get("replicas"))
    note_sum("experts", ["experts", "expert_mlp"], mixed, dim * wide, without=together)
    table = model.weights.get("unembed", model.weights["embed"])
    if _is_split(table, sizes):
        # each device's best: bits of a float32, and an int32 id
        note("all-gather", "tokens", ["vocab"], 1, True, 8 * sizes["vocab"])
        note("all-gather", "logits", ["vocab"], 1, True, table.shape[0] * itemsize, seldom=True)
    senders = stages(len(model.attention), config.pipeline_parallel_size)[:-1]
    sends = Counter(dim * itemsize + _experts_along(config, model, stage.stop) for stage in senders)
    return found + [Collective("send", "stages", ("pp",), count, False, size) for size, count in sends.items()]


def _experts_along(config: EngineConfig, model: ModelSpec, stop: int) -> int:
    """Bytes a token of the experts in layers below `stop`, which go along with hidden rows there (decision 026)."""
    asked = config.expert_load_metrics or config.enable_return_routed_experts
    if config.backend != "torch" or not asked or model.mixture is None:
        return 0
    return sum(n < stop for n in model.mixture.layers) * model.mixture.routing.num_chosen * 4


def _is_split(spec: ArraySpec, sizes: Mapping[str, int]) -> bool:
    return any(sizes.get(axis or "", 1) > 1 for axis in spec.axes)


def _contracted(spec: ArraySpec) -> list[str]:
    """The logical axes of a weight over which its product sums."""
    if not spec.product:
        return []
    x, w, y = spec.product.replace("->", ",").split(",")
    return [axis for axis, letter in zip(spec.axes, w, strict=True) if axis and letter in x and letter not in y]


def _made(spec: ArraySpec) -> int:
    """Numbers that a product makes a token."""
    x, w, y = str(spec.product).replace("->", ",").split(",")
    return math.prod(n for n, letter in zip(spec.shape, w, strict=True) if letter in y and letter not in x)
