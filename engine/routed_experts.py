"""The experts of every token of every request, for `enable_return_routed_experts`.

They lie where keys lie: a host array has a place for each slot of a cache group that forgets nothing. So what a request
finds in the prefix cache, or takes over from a sibling, comes with its experts (decision 029).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from ..models.interface import Array, Mixture, ModelSpec
from .backend import Backend
from .plan import Plan

Parts = list[np.ndarray]  # [tokens, layers, chosen] each, of a sequence from its first token on


def expert_taps(mixture: Mixture) -> tuple[str, ...]:
    """What the forward calls the experts of each layer that has some."""
    return tuple(f"layer.{n}.experts" for n in mixture.layers)


class RoutingStack:
    """The program that lays the experts of all layers of a step into one array, [T, layers, chosen]."""

    def __init__(self, backend: Backend, mixture: Mixture):
        self.taps, self.num_chosen = expert_taps(mixture), mixture.routing.num_chosen
        self.run = backend.compile(stacked, ("rows", "experts"), ("routed", "rows"), "rows")

    def launch(self, rows: dict[str, Array], found: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Starts it on what a forward has kept. Consumes rows and returns them."""
        return self.run(rows, tuple(found[name] for name in self.taps))


def stacked(rows: dict[str, Array], experts: tuple[Array, ...], *, ops: Any) -> tuple[Array, dict[str, Array]]:
    """(the experts in one array, rows as they were)."""
    return ops.xp.stack(experts, axis=1), rows


class RoutedExperts:
    """What one replica's requests were routed to, as its steps are read, one after the other."""

    def __init__(self, model: ModelSpec, num_blocks: tuple[int, ...], block_size: int, max_num_seqs: int, length: int):
        assert model.mixture
        self.group = next(g for g, group in enumerate(model.groups) if group.window is None)
        self.size = block_size
        shape = (len(model.mixture.layers), model.mixture.routing.num_chosen)
        # not touched before it is written: the operating system gives no memory before that
        self.slots = np.zeros((num_blocks[self.group], block_size, *shape), np.int16)
        self.table = np.zeros((max_num_seqs + 1, -(-length // block_size)), np.int32)
        self.of_row: list[Parts] = [[] for _ in range(max_num_seqs + 1)]

    def take(self, plan: Plan, routed_TLC: np.ndarray) -> dict[str, Parts]:
        """Takes in a step. Returns, of each request that it admitted, where its experts gather from now on.

        In the order of the device: tables, moved blocks, then what the step computed; at last what was found cached.
        """
        for a in plan.admitted:
            self.table[a.row], self.of_row[a.row] = 0, []
        for w in plan.table_writes:
            if w.group == self.group:
                self.table[w.row, w.index : w.index + len(w.blocks)] = w.blocks
        if moved := [(t.target, t.source) for t in plan.transfers if t.group == self.group]:
            targets, sources = map(list, zip(*moved, strict=True))
            self.slots[targets] = self.slots[sources]
        ends = list(accumulate((c.num_tokens for c in plan.chunks), initial=0))
        for c, at in zip(plan.chunks, ends, strict=False):
            found = routed_TLC[at : at + c.num_tokens].astype(np.int16)
            self.slots[self._places(c.row, c.start, c.start + c.num_tokens)] = found
            self.of_row[c.row].append(found)
        for a in plan.admitted:
            if a.num_computed:
                self.of_row[a.row].insert(0, self.slots[self._places(a.row, 0, a.num_computed)])
        rows = {a.row for a in plan.admitted}
        return {c.request_id: self.of_row[c.row] for c in plan.chunks if c.row in rows}

    def _places(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and offset of places start .. stop - 1 of a row."""
        at = np.arange(start, stop)
        return self.table[row, at // self.size], at % self.size


def experts_of(parts: Parts, num_tokens: int) -> np.ndarray:
    """Of a sequence of so many tokens, int16 [num_tokens - 1, layers, chosen]: the last one went through no layer."""
    return np.concatenate(parts)[: num_tokens - 1]
