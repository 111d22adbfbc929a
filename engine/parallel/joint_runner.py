"""The Runner of replicas that step together, because they share experts (decision 028).

Each has its own scheduler, cache and rows. Every program runs for all of them at once, on inputs of the same sizes; a
replica without work runs along on padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...models import step
from ...models.interface import Array, Output, map_tree
from ..batch import edit_values, move_input, reading_inputs, row_values, sampling_input, step_input
from ..read_head import Reads, on_host
from ..runner import Hidden, Pending, Runner
from ..warm_up import filler_of, padding
from .joint_batch import (
    JointPlan,
    Rows,
    alike_moves,
    alike_readings,
    alike_rows,
    alike_samplings,
    alike_steps,
    union,
)
from .lead_runner import LeadRunner


@dataclass(frozen=True)
class OfReplica:
    """Reads one replica's part of arrays that have all of them, as a Backend reads."""

    read: Callable[[Array], np.ndarray]

    def read_tree(self, tree: Any) -> Any:
        return map_tree(self.read, tree)


class JointRunner(Runner):
    """What it is told comes in a JointPlan, a Plan of each replica; `launch` gives a Pending of each that has one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.readers: list[Any] = [OfReplica(partial(self.replicas.read, at=at)) for at in range(self.replicas.num)]

    @property
    def replicas(self) -> Any:
        return self.backend.replicas

    def own(self, specs: Any) -> Any:
        return self.replicas.specs(specs)

    def same(self, args: Any) -> Any:
        return self.replicas.same(args)

    def gathered(self, x: Array) -> Array:
        return self.replicas.gather(x)

    def _empty(self) -> None:
        super()._empty()
        # block tables of each replica
        self.tables_of = [[table.copy() for table in self.tables] for _ in range(self.replicas.num)]

    def launch(self, plan: JointPlan, masks: Any = None) -> list[Pending | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.launch_head(plan, self.launch_forward(plan), masks)

    def launch_forward(self, plan: JointPlan, taps: tuple[str, ...] = ()) -> Hidden:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.prepare(plan)
        nobody = padding(self, self.shapes.seqs[0], self.shapes.seqs[0], True, self.shapes.widths[0])
        steps = [
            step_input(p, tables, self.shapes, self.block_size, self.embeds) if p else nobody
            for p, tables in zip(plan.plans, self.tables_of, strict=True)
        ]
        steps[0] = replace(steps[0], taps=union((steps[0].taps, taps, self.taps)))
        return self._run_forward(self.replicas.stack(alike_steps(steps, self.shapes, self.scratch)))

    def launch_head(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, plan: JointPlan, hidden: Hidden, masks: Sequence[np.ndarray | None] | None = None
    ) -> list[Pending | None]:
        output = None
        if any(p and p.sampled for p in plan.plans):
            output = self._sample_all(plan, hidden.last_RE, masks or [None] * self.replicas.num)
        reads = self._read_all(plan, hidden) if any(p and p.reads for p in plan.plans) else [None] * len(plan.plans)
        routed = tuple(map(self.gathered, hidden.routed))
        for x in routed:
            self.backend.prefetch(x)
        return [
            p and Pending(p, output if p.sampled else None, reader, own, routed)
            for p, reader, own in zip(plan.plans, self.readers, reads, strict=True)
        ]

    def prepare(self, plan: JointPlan) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._admit_all([p.admitted if p else () for p in plan.plans])
        for p, tables in zip(plan.plans, self.tables_of, strict=True):
            for w in p.table_writes if p else ():
                tables[w.group][w.row, w.index : w.index + len(w.blocks)] = w.blocks
        transfers = [p.transfers if p else () for p in plan.plans]
        if any(transfers):
            moves = alike_moves([move_input(own, len(self.tables), self.shapes) for own in transfers])
            groups = self.move_blocks(self.cache.groups, *self.replicas.stack(moves))
            self.cache = replace(self.cache, groups=groups)

    def _admit_all(self, admitted: Sequence[Sequence[Any]]) -> None:
        if not any(admitted):
            return
        for own, tables in zip(admitted, self.tables_of, strict=True):
            for table in tables:
                table[[a.row for a in own]] = 0
        nobody = [filler_of(self.scratch, 1)]
        self._set_rows([row_values(own or nobody, self.shapes, self.scratch) for own in admitted])
        edited = [[a for a in own if a.edits] for own in admitted]
        if any(edited):
            sizes = self.shapes, self.scratch, self.model.vocab_size
            self._set_rows([edit_values(own, *sizes) for own in edited])

    def _set_rows(self, each: Sequence[Rows]) -> None:
        rows = self.set_rows(self.cache.rows, *self.replicas.stack(alike_rows(each, self.scratch)))
        self.cache = step.with_rows(self.cache, rows)

    def _sample_all(self, plan: JointPlan, hidden: Array, masks: Sequence[np.ndarray | None]) -> Output:
        plans = plan.sampled()
        samplings = [
            sampling_input(p, self.shapes, self.scratch, self.digest, mask, self.logprobs_mode)
            for p, mask in zip(plans, masks, strict=True)
        ]
        sampling = self.replicas.stack(alike_samplings(samplings, self.scratch))
        output, rows = self.head_of(plans[0].variant)(self.last_weights, self.cache.rows, hidden, sampling)
        self.cache = step.with_rows(self.cache, rows)
        return self._fetched(output)

    def _fetched(self, output: Output) -> Output:
        found = {name: None if x is None else self.gathered(x) for name, x in vars(output).items()}
        return super()._fetched(Output(**found))

    def _read_all(self, plan: JointPlan, hidden: Hidden) -> list[Reads | None]:
        """Each replica's reads, launched: as many tiles as the one has that has most."""
        mode, (size,), last = self.logprobs_mode, self.shapes.read, hidden.rows["last"]
        num_tokens = last.shape[-2]
        own = [reading_inputs(p, self.shapes, mode, num_tokens) if p else [] for p in plan.plans]
        tiles: list[list[Any]] = [[] for _ in plan.plans]
        for each in alike_readings(own, size, num_tokens, mode):
            output, rows = self.read_head.run(self.weights, self.cache.rows, last, self.replicas.stack(each))
            self.cache, output = step.with_rows(self.cache, rows), self._fetched(output)
            # what holds the whole vocabulary does not stay on the device
            whole = each[0].num_logprobs == self.shapes.logprobs[-1]
            for found, reader in zip(tiles, self.readers, strict=True):
                found.append(on_host(output, reader) if whole else output)
        wanted = union(r.hidden for p in plan.plans if p for r in p.reads)
        gathered = {name: self.gathered(hidden.rows[name]) for name in wanted}
        for x in gathered.values():
            self.backend.prefetch(x)
        names = [union(r.hidden for r in p.reads) if p else () for p in plan.plans]
        return [
            Reads({name: gathered[name] for name in mine}, found[: len(some)])
            for mine, found, some in zip(names, tiles, own, strict=True)
        ]


class LeadJointRunner(LeadRunner, JointRunner):
    """Rank 0's, where replicas are in several processes: all are told what each of them does."""
