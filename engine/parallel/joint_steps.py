"""The steps of replicas that step together: all plan, one launch runs what they planned, each is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..intake import Intake
from ..plan import Plan
from ..replica import Replica
from ..request import Request
from .joint_batch import JointPlan


class JointSteps:
    """Those of one engine. `max_unread`: one more is launched only once the oldest is read."""

    def __init__(self, replicas: Sequence[Replica], intake: Intake, max_unread: int):
        self.replicas, self.intake, self.max_unread = replicas, intake, max_unread
        # of a JointRunner
        self.runner: Any = replicas[0].runner
        # of each step, the replicas that have a part in it, the oldest step first
        self.in_flight: deque[list[Replica]] = deque()

    def run(self) -> list[Request]:
        """Plans and launches a step of all replicas. Reads the oldest if there are `max_unread`, or none could be
        planned; all of them if a head waits for their tokens. Returns the requests that got one.
        """
        plans = [replica.schedule() for replica in self.replicas]
        plan, structured = JointPlan(tuple(plans)), self.intake.structured
        if any(p and structured.is_late(p) for p in plans):
            hidden = self.runner.launch_forward(plan)
            touched = self._read(len(self.in_flight))
            self._note(self.runner.launch_head(plan, hidden, self._masks(plans)))
            return touched
        if any(plans):
            self._note(self.runner.launch(plan, self._masks(plans)))
        elif not self.in_flight:
            structured.wait()
        return self._read(1) if not any(plans) or len(self.in_flight) >= self.max_unread else []

    def _masks(self, plans: Sequence[Plan | None]) -> list[Any]:
        """What the grammars of each replica's requests allow, if there are any."""
        return [p and self.intake.mask(replica, p) for replica, p in zip(self.replicas, plans, strict=True)]

    def _note(self, launched: Sequence[Any]) -> None:
        each = [(replica, pending) for replica, pending in zip(self.replicas, launched, strict=True) if pending]
        for replica, pending in each:
            replica.unread.append(pending)
        self.in_flight.append([replica for replica, _ in each])

    def _read(self, count: int) -> list[Request]:
        """Reads so many steps, if there are some."""
        touched: list[Request] = []
        for _ in range(min(count, len(self.in_flight))):
            for replica in self.in_flight.popleft():
                own = self.intake.read_oldest(replica)
                if replica.metrics:
                    replica.metrics.read(own)
                touched += own
        return touched
