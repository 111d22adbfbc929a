"""The Runner of one stage of a pipeline, where each has a process of its own (decision 026).

Hidden rows go from stage to stage between processes at equal places along the other mesh axes. Rank 0 is in the last
stage; what that one samples the first learns with a later step, from rank 0, which has read it by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...models.interface import Array, StepInput
from ...models.logit_edits import LogitsProcessor
from ...models.stage import HIDDEN, taps_of, with_rows_from_before
from ..plan import Plan
from ..runner import Hidden, Pending, StepResult
from .joint_batch import JointPlan
from .joint_stages import JointStage
from .lead_runner import LeadRunner, uninterrupted
from .pipeline import Stage

AXIS = "pp"


class StageRunner(Stage):
    """Runs its layers between receiving hidden rows and sending them; the head, if it is the last stage."""

    has_begun = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.mesh = self.backend.ops.mesh
        if not self.is_first:
            # what is received lands here, outside of what a CUDA graph records
            self.received = super().room(self.shapes.tokens[-1])
        self.has_begun = True

    def reset(self) -> None:
        if self.has_begun:
            self.mesh.renew(AXIS)
        super().reset()

    def launch_head(self, plan: Plan, hidden: Hidden, mask: np.ndarray | None = None) -> Pending:
        if self.is_last:
            return super().launch_head(plan, hidden, mask)
        return Pending(plan, None, self.backend)

    @property
    def learns_experts(self) -> bool:
        return self.is_last

    def room(self, num_tokens: int) -> Array:
        return self.received[:num_tokens]

    def _run_forward(self, inputs: StepInput) -> Hidden:
        found: dict[str, Array] = {}
        if not self.is_first:
            inputs = with_rows_from_before(inputs, self.room(inputs.num_tokens))
            found = self._receive(inputs)
        if self.is_last:
            last, rows = self._run_layers(inputs)
            return self._kept(last, found | rows)
        own, self.cache = self.forward_stage(self.weights, self.cache, inputs)
        found |= own
        self.mesh.send(found["last"], AXIS, [found[name] for name in taps_of(inputs.taps, range(self.layers.stop))])
        return Hidden(None, {})

    def _receive(self, inputs: StepInput) -> dict[str, Array]:
        """Fills the step's place for rows from before. Returns the taps that the stages before have kept."""
        names, x_TE = taps_of(inputs.taps, range(self.layers.start)), inputs.extra[HIDDEN]
        return dict(zip(names, self.mesh.receive(x_TE, AXIS, [self._kind(name, x_TE) for name in names]), strict=True))

    def _kind(self, tap: str, x_TE: Array) -> tuple[tuple[int, ...], str | None]:
        """Shape and dtype of a tap that goes along with these rows: ids of experts, or rows as they are."""
        if tap.endswith(".experts"):
            assert self.mixture
            return (len(x_TE), self.mixture.routing.num_chosen), "int32"
        return tuple(x_TE.shape), None


class Later:
    """Work that is done once its result is wanted, after all that was put off before it."""

    def __init__(self, waiting: deque[Later], work: Callable[[], Any]):
        self.waiting, self.work, self.found = waiting, work, None
        waiting.append(self)

    def result(self) -> Any:
        """What the work returned. Whoever waits behind one that failed finds nothing."""
        while self in self.waiting:
            first = self.waiting.popleft()
            with uninterrupted():
                first.found = first.work()
        return self.found


@dataclass(frozen=True)
class Unbegun(Pending):
    """A step of which this rank has perhaps not begun its part."""

    later: Later | None = None
    replica: int | None = None  # of those that step together

    def result(self) -> StepResult:
        assert self.later
        found = self.later.result()
        return (found if self.replica is None else found[self.replica]).result()


class LeadStage(LeadRunner, StageRunner):
    """Rank 0 of a pipeline. On CPUs a receive waits, so its own part of a step is done once somebody reads it: by then
    the others know of the steps that come next.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.waiting: deque[Later] = deque()
        super().__init__(*args, **kwargs)
        self.puts_off = self.mesh.device.type == "cpu"

    def launch_forward(self, plan: Plan, taps: tuple[str, ...] = ()) -> Any:
        if not self.puts_off:
            return super().launch_forward(plan, taps)
        with uninterrupted():
            self.tell_forward(plan, taps)
        return Later(self.waiting, partial(super(LeadRunner, self).launch_forward, plan, taps))

    def launch_head(self, plan: Plan, hidden: Any, mask: np.ndarray | None = None) -> Any:
        if not self.puts_off:
            return super().launch_head(plan, hidden, mask)
        with uninterrupted():
            plans = self.tell_head(plan, mask)
        return self._unbegun(plan, Later(self.waiting, partial(self._run_head, plan, hidden, mask, plans)))

    def _unbegun(self, plan: Any, later: Later) -> Any:
        return Unbegun(plan, None, self.backend, later=later)

    def register(self, processor: LogitsProcessor) -> None:
        self._catch_up()
        super().register(processor)

    def reset(self) -> None:
        # what was put off is of steps that are void
        self.waiting.clear()
        super().reset()

    def _run_head(self, plan: Plan, hidden: Later, mask: np.ndarray | None, plans: int | None) -> Any:
        pending = super(LeadRunner, self).launch_head(plan, hidden.result(), mask)
        self.hash_state(plan, plans)
        return pending

    def _catch_up(self) -> None:
        if self.waiting:
            self.waiting[-1].result()


class JointStageRunner(StageRunner, JointStage):
    """That of a stage of replicas that step together. Hidden rows stay in their replica."""


class LeadJointStage(LeadStage, JointStageRunner):
    """Rank 0 of those."""

    def _unbegun(self, plan: JointPlan, later: Later) -> list[Pending | None]:
        return [p and Unbegun(p, None, self.backend, later=later, replica=i) for i, p in enumerate(plan.plans)]
