"""What the device is told of a decode step, kept: the next one often is told just the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..models.interface import Sampling, StepInput
from .plan import Plan


class Steady:
    """The StepInput and the Samplings of the last step, given again as long as they hold.

    They are the very same values then, at which a program need not look again: nobody may write to their arrays.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.forget()

    def forget(self) -> None:
        """Has the next step laid out anew."""
        self.plan: Plan | None = None
        self.chunks: list[tuple[int, int, bool]] = []
        self.num_left = 0  # steps for which the block tables are wide enough
        self.samplings: dict[Any, Sampling] = {}

    def step_input(self, plan: Plan, make: Callable[[], StepInput]) -> StepInput:
        """That of the plan: made, unless it decodes what the last one did, from the same blocks."""
        chunks = [(c.row, c.num_tokens, c.samples) for c in plan.chunks]
        changed = plan.admitted or plan.table_writes or plan.reads or plan.cuts or chunks != self.chunks
        # every sequence of a decode step is a token longer in the next
        self.num_left -= 1
        if changed or self.num_left < 0:
            self.forget()
            self.inputs = inputs = make()
            if inputs.decode:
                room = inputs.block_tables[0].shape[1] * self.block_size
                self.chunks, self.num_left = chunks, room - max([c.start + 1 for c in plan.chunks])
        self.plan = plan
        return self.inputs

    def sampling(self, plan: Plan, joined: bool, make: Callable[[], Sampling]) -> Sampling:
        """That of the plan, which has neither masks nor ids of its own: made, unless it is as in the last step."""
        if plan is not self.plan or not self.chunks:
            return make()
        kind = joined, plan.variant, plan.num_logprobs
        if kind not in self.samplings:
            self.samplings[kind] = make()
        return self.samplings[kind]
