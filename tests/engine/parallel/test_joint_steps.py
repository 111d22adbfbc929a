"""Steps of replicas that step together: which of them are read, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.parallel.joint_batch import JointPlan
from octavo.engine.parallel.joint_steps import JointSteps
from octavo.engine.plan import Plan


class Scripted:
    """A replica that plans at the steps that are named; it reads nothing by itself."""

    metrics = None

    def __init__(self, name: str, steps: Sequence[int]):
        self.name, self.steps, self.step, self.unread = name, steps, -1, deque[Any]()
        self.runner = SimpleNamespace(launch=lambda plan, masks: launched(plan))

    def schedule(self) -> Plan | None:
        self.step += 1
        return Plan(self.step, ()) if self.step in self.steps else None


def launched(plan: JointPlan) -> list[str | None]:
    return [p and f"{name}{p.step}" for name, p in zip("ab", plan.plans, strict=True)]


def reads(a: Sequence[int], b: Sequence[int], max_unread: int, calls: int) -> list[list[str]]:
    """What each call of `run` reads of two replicas that plan at these steps."""
    found: list[list[str]] = []
    intake: Any = SimpleNamespace(
        mask=lambda replica, plan: None,
        read_oldest=lambda replica: [replica.unread.popleft()],
        structured=SimpleNamespace(is_late=lambda plan: False, wait=lambda: None),
    )
    replicas: Any = [Scripted("a", a), Scripted("b", b)]
    steps = JointSteps(replicas, intake, max_unread)
    for _ in range(calls):
        found.append(list(map(str, steps.run())))
    assert not steps.in_flight and not any(r.unread for r in replicas)
    return found


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([0, 1, 2], [0, 1, 2], [[], ["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]),
        # each has a part in every other step: nobody waits for one that was just launched
        ([0, 2], [1, 3], [[], ["a0"], ["b1"], ["a2"], ["b3"]]),
        ([1], [0, 1], [[], ["b0"], ["a1", "b1"]]),
    ],
)
def test_the_oldest_step_is_read_of_those_that_have_a_part_in_it(
    a: list[int], b: list[int], want: list[list[str]]
) -> None:
    assert reads(a, b, 2, len(want)) == want


def test_one_at_a_time_is_read_at_once() -> None:
    assert reads([0], [0, 1], 1, 3) == [["a0", "b0"], ["b1"], []]
