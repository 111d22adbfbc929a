"""One step of replicas that step together: all plan, one launch runs what they planned, each is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .joint_batch import JointPlan
from .plan import Plan
from .replica import Replica
from .request import Request

if TYPE_CHECKING:
    from .engine_steps import EngineSteps


def run_joint_step(engine: EngineSteps) -> list[Request]:
    """Plans and launches a step of all replicas. Reads of each its oldest if `max_unread` are in flight, or it has none
    planned; all of them if a head waits for their tokens. Returns the requests that got one.
    """
    replicas, touched = engine.replicas, list[Request]()
    # of a JointRunner
    runner: Any = engine.runner
    plans = [replica.schedule() for replica in replicas]
    plan = JointPlan(tuple(plans))
    if any(p and engine.structured.is_late(p) for p in plans):
        hidden = runner.launch_forward(plan)
        touched += _read(engine, [1] * len(replicas))
        _note(replicas, runner.launch_head(plan, hidden, _masks(engine, plans)))
        return touched
    if any(plans):
        _note(replicas, runner.launch(plan, _masks(engine, plans)))
    elif not any(replica.unread for replica in replicas):
        engine.structured.wait()
    return _read(engine, [engine.max_unread if p else 1 for p in plans])


def _masks(engine: EngineSteps, plans: Sequence[Plan | None]) -> list[Any]:
    """What the grammars of each replica's requests allow, if there are any."""
    return [p and engine._mask(replica, p) for replica, p in zip(engine.replicas, plans, strict=True)]


def _note(replicas: Sequence[Replica], launched: Sequence[Any]) -> None:
    for replica, pending in zip(replicas, launched, strict=True):
        if pending:
            replica.unread.append(pending)


def _read(engine: EngineSteps, most: Sequence[int]) -> list[Request]:
    """Reads until fewer than so many of each replica's steps are in flight."""
    touched = []
    for replica, limit in zip(engine.replicas, most, strict=True):
        own = []
        while len(replica.unread) >= limit:
            own += engine._read_oldest(replica)
        if replica.metrics:
            replica.metrics.read(own)
        touched += own
    return touched
