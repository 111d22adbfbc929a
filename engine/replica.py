"""One copy of the model, with all that it needs to serve requests of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .metrics import EngineMetrics
from .parallel.remote_runner import RemoteRunner
from .plan import Plan
from .routed_experts import RoutedExperts
from .runner import Pending, Runner
from .scheduler import Scheduler
from .step_log import StepLog


@dataclass(eq=False)
class Replica:
    """Its scheduler plans for its runner, and nobody else's; a request has all its steps here (Request.replica).

    An engine without data parallelism has one. Replicas share nothing but the code, so a step that fails in one ends
    that one's requests alone.
    """

    index: int
    scheduler: Scheduler
    runner: Runner | RemoteRunner
    step_log: StepLog | None = None
    metrics: EngineMetrics | None = None
    routed: RoutedExperts | None = None  # where requests are told what they were routed to
    unread: deque[Pending] = field(default_factory=deque)  # the steps in flight, the oldest first

    @property
    def own_runner(self) -> Runner:
        """The runner, of a replica that this process has a part in: the first."""
        assert isinstance(self.runner, Runner)
        return self.runner

    @property
    def is_busy(self) -> bool:
        """Whether there is something to plan, or to read."""
        return self.scheduler.has_work or bool(self.unread)

    def schedule(self) -> Plan | None:
        """The next plan, counted."""
        plan = self.scheduler.schedule()
        if self.metrics:
            self.metrics.planned(plan)
        return plan


def check_alone(engine: Any) -> None:
    """Raises ValueError for an engine of several replicas: for who looks at one scheduler, or one runner, of it."""
    if (size := len(getattr(engine, "replicas", ()))) > 1:
        raise ValueError(f"data_parallel_size {size}: this looks at the inside of one replica, so leave it out")
