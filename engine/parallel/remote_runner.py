"""A replica whose ranks are all other processes, as rank 0 sees it (decision 027)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ...models.logit_edits import LogitsProcessor
from ..plan import Plan
from ..prompt_embeds import PromptEmbeds
from ..runner import Hidden, Pending, StepResult
from .lead_runner import uninterrupted
from .team import Check, Forward, Head, Register, Sleep, Team, WakeUp, WarmUp


@dataclass(frozen=True)
class RemotePending(Pending):
    """A step that was told; the first rank of its replica reads it and says what it gave."""

    backend: Any = None
    team: Team | None = None

    def is_ready(self) -> bool:
        assert self.team
        return self.team.has_result()

    def result(self) -> StepResult:
        assert self.team
        return self.team.result()


class RemoteRunner:
    """Told what a Runner is told. `team`: the replica's ranks; `every` as LeadRunner's."""

    load_of_all = None  # counted where the replica is

    def __init__(self, team: Team, every: int):
        team.await_ready()
        # one rank alone has nobody to differ from
        self.team, self.every, self.num_launched = team, every if len(team.peers) > 1 else 0, 0
        self.embeds: WeakValueDictionary[str, PromptEmbeds] = WeakValueDictionary()
        self.has_cache = True

    def launch(self, plan: Plan, mask: np.ndarray | None = None) -> Pending:
        return self.launch_head(plan, self.launch_forward(plan), mask)

    def launch_forward(self, plan: Plan, taps: tuple[str, ...] = ()) -> Hidden:
        embeds = {c.request_id: self.embeds[c.request_id] for c in plan.chunks if c.request_id in self.embeds}
        with uninterrupted():
            self.team.tell(Forward(plan, taps, embeds))
        return Hidden(None, {})

    def launch_head(self, plan: Plan, hidden: Hidden, mask: np.ndarray | None = None) -> Pending:
        with uninterrupted():
            self.team.tell(Head(mask))
            self.num_launched += 1
            if self.every and self.num_launched % self.every == 0:
                self.team.tell(Check(plan.step))
        return RemotePending(plan, None, team=self.team)

    def register(self, processor: LogitsProcessor) -> None:
        self.team.tell(Register(processor))

    def reset(self) -> None:
        self.has_cache = False
        self.team.reset()
        self.has_cache = True

    def sleep(self, level: int) -> None:
        self.team.order(lambda number: Sleep(number, level))()

    def wake_up(self, tags: Sequence[str], weights: Any = None) -> Callable[[], None]:
        """Returns what waits until it has happened there."""
        return self.team.order(lambda number: WakeUp(number, tuple(tags), weights))

    def warm_up(self) -> int:
        """Compiles there; 0: nothing here. Does not wait."""
        self.team.tell(WarmUp())
        return 0


def register(runners: Sequence[Any], team: Team | None, processor: LogitsProcessor) -> None:
    """Has all runners of an engine take one more, or none: ValueError for what not every rank can have."""
    if team:
        team.check_sendable(processor)
    for runner in runners:
        runner.register(processor)
