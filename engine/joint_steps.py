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
    """Plans and launches a step of all replicas. Reads the oldest of each if `max_unread` are in flight, or none could
    be planned; all of them if a head waits for their tokens. Returns the requests that got one.
    """
    replicas = engine.replicas
    # of a JointRunner
    runner: Any = engine.runner
    plans = [replica.schedule() for replica in replicas]
    plan = JointPlan(tuple(plans))
    if any(p and engine.structured.is_late(p) for p in plans):
        hidden = runner.launch_forward(plan)
        touched = _read(engine, everything=True)
        _note(replicas, runner.launch_head(plan, hidden, _masks(engine, plans)))
        return touched
    if any(plans):
        _note(replicas, runner.launch(plan, _masks(engine, plans)))
    elif not any(replica.unread for replica in replicas):
        engine.structured.wait()
    is_full = not any(plans) or max(len(replica.unread) for replica in replicas) >= engine.max_unread
    return _read(engine, everything=False) if is_full else []


def _masks(engine: EngineSteps, plans: Sequence[Plan | None]) -> list[Any]:
    """What the grammars of each replica's requests allow, if there are any."""
    return [p and engine._mask(replica, p) for replica, p in zip(engine.replicas, plans, strict=True)]


def _note(replicas: Sequence[Replica], launched: Sequence[Any]) -> None:
    for replica, pending in zip(replicas, launched, strict=True):
        if pending:
            replica.unread.append(pending)


def _read(engine: EngineSteps, *, everything: bool) -> list[Request]:
    """Reads each replica's oldest step, or all of them."""
    touched = []
    for replica in engine.replicas:
        own = []
        while replica.unread:
            own += engine._read_oldest(replica)
            if not everything:
                break
        if replica.metrics:
            replica.metrics.read(own)
        touched += own
    return touched
