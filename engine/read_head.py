"""Logprobs of known tokens, a tile of hidden rows at a time: the logits of a long prompt never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..models.interface import Array, ArraySpec, ModelSpec, Output, Reading
from ..models.logprobs import of_known
from .backend import Backend
from .batch import Shapes, padded, read_places, reading_inputs, split_reads
from .plan import Plan


@dataclass(frozen=True)
class ReadResult:
    """What one of a plan's reads brought, on the host, one row a place. Names as in runner.StepResult."""

    hidden: dict[str, np.ndarray]  # [places, E], by name
    logprobs: np.ndarray | None = None  # [places], of the targets
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None  # [places, N]
    top_logprobs: np.ndarray | None = None
    id_logprobs: np.ndarray | None = None
    id_ranks: np.ndarray | None = None


@dataclass(frozen=True)
class Reads:
    """A plan's reads, launched and not read yet. A tile is an Output, or is on the host already."""

    hidden: dict[str, Array] = field(default_factory=dict)
    tiles: Sequence[Output | dict[str, np.ndarray]] = ()

    def result(self, plan: Plan, backend: Backend) -> list[ReadResult]:
        """Waits for them. One for each of the plan's reads."""
        rows, places = backend.read_tree(self.hidden), read_places(plan)
        about = split_reads(plan, [tile if isinstance(tile, dict) else on_host(tile, backend) for tile in self.tiles])
        each = zip(plan.reads, places, about, strict=True)
        return [ReadResult({name: rows[name][at] for name in read.hidden}, **found) for read, at, found in each]


class ReadHead:
    """The program that reads a tile, and who launches it."""

    def __init__(self, backend: Backend, model: ModelSpec, shapes: Shapes, mode: str):
        self.backend, self.model, self.shapes, self.mode = backend, model, shapes, mode
        self.run = backend.compile(
            partial(of_known, model=model), ("weights", "rows", "hidden", "reading"), ("output", "rows"), "rows"
        )

    def launch(
        self, plan: Plan, weights: dict[str, Any], rows: dict[str, Array], hidden: dict[str, Array]
    ) -> tuple[Reads, dict[str, Array]]:
        """Starts a plan's reads on the hidden rows of all its tokens. Consumes rows and returns them.

        What holds the whole vocabulary is taken to the host tile by tile, one behind: two of them are on the device at
        a time, however long the prompts are.
        """
        tiles: list[Output | dict[str, np.ndarray]] = []
        last: Output | None = None
        for reading in reading_inputs(plan, self.shapes, self.mode, hidden["last"].shape[0]):
            output, rows = self.run(weights, rows, hidden["last"], reading)
            self._prefetch(vars(output).values())
            if last is not None and reading.num_logprobs == self.shapes.logprobs[-1]:
                tiles[-1] = on_host(last, self.backend)
            tiles.append(last := output)
        wanted = {name: hidden[name] for read in plan.reads for name in read.hidden}
        self._prefetch(wanted.values())
        return Reads(wanted, tiles), rows

    def _prefetch(self, arrays: Any) -> None:
        for x in arrays:
            if x is not None:
                self.backend.prefetch(x)

    def calls(
        self, weights: dict[str, Any], rows: dict[str, Array], own: Callable[[Any], Any]
    ) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The program with arguments of every shape but those of the whole vocabulary and of ids by name."""
        (size,), width = self.shapes.read, self.model.weights["final_norm"].shape[0]
        for num_tokens in self.shapes.tokens:
            hidden = self.backend.zeros(own(ArraySpec((num_tokens, width), (None, None))))
            for num in self.shapes.logprobs[1:-1]:
                reading = Reading(padded((), size, 0), padded((), size, 0), num_tokens, num, self.mode)
                yield self.run, (weights, rows, hidden, reading)


def on_host(tile: Output, backend: Backend) -> dict[str, np.ndarray]:
    """What a tile holds about its tokens, by the names of ReadResult."""
    fields = ("logprobs", "ranks", "top_ids", "top_logprobs", "id_logprobs", "id_ranks")
    arrays = {name: getattr(tile, f"{name}_R" if name in ("logprobs", "ranks") else f"{name}_RN") for name in fields}
    return {name: backend.read(x) for name, x in arrays.items() if x is not None}
