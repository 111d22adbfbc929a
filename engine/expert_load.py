"""How many tokens went through each expert of each layer: counted on the device, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.interface import Array, ArraySpec, Mixture
from .backend import Backend
from .routed_experts import expert_taps


class ExpertLoad:
    """The counters of one engine, since it started. They are int32: they hold 2^31 tokens an expert."""

    def __init__(self, backend: Backend, mixture: Mixture):
        self.backend, self.layers = backend, mixture.layers
        shape = (len(mixture.layers), mixture.num_experts)
        spec = ArraySpec(shape, (None, None), "int32")
        self.shape, self.counts = shape, backend.zeros(backend.replicas.specs(spec) if backend.replicas else spec)
        self.count = backend.compile(count, ("counts", "experts"), ("counts",), "counts")
        self.taps, self.num_chosen = expert_taps(mixture), mixture.routing.num_chosen

    def add(self, rows: Mapping[str, Array]) -> None:
        """Takes in the tapped experts of a step."""
        self.counts = self.count(self.counts, tuple(rows[name] for name in self.taps))

    def read(self) -> list[list[int]]:
        """Tokens by layer, of those that have experts, and expert."""
        # each replica has counted for all
        return self.backend.read(self.counts).reshape(-1, *self.shape)[0].tolist()

    def by_expert(self) -> dict[str, float]:
        """Tokens that went through each expert, all layers together."""
        return {str(i): sum(column) for i, column in enumerate(zip(*self.read(), strict=True))}

    def balancedness(self) -> dict[str, float]:
        """Of each layer, the mean load of its experts beside the greatest: 1 is even, 1 / experts is all in one."""
        loads = zip(self.layers, self.read(), strict=True)
        return {str(n): sum(load) / len(load) / max(load) if any(load) else 1.0 for n, load in loads}


class ExpertLoads(ExpertLoad):
    """Those of several stages, to be read as one."""

    def __init__(self, parts: Sequence[ExpertLoad]):
        self.parts, self.layers = parts, tuple(n for part in parts for n in part.layers)

    def read(self) -> list[list[int]]:
        return [layer for part in self.parts for layer in part.read()]


def count(counts_LX: Array, experts: tuple[Array, ...], *, ops: Any) -> Array:
    """The counters, and one more for each token that went through an expert. Padding went through none."""
    ids_LM = ops.xp.stack([ids_TC.reshape(-1) for ids_TC in experts])
    found_LX = ops.tally(ids_LM, ops.xp.ones_like(ids_LM), counts_LX.shape[1])
    found_LX = ops.psum(found_LX, "replicas")
    # written in place: a CUDA graph is bound to where its state lies
    return ops.scatter(counts_LX, (slice(None),), counts_LX + found_LX)
