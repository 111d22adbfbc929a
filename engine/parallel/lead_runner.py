"""Rank 0's Runner: what it is told, it tells the others first."""

from __future__ import annotations

import contextlib
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.interface import Array
from ...models.logit_edits import LogitsProcessor
from ...models.step import digest_rows, with_rows
from ..backend import Backend
from ..plan import Plan
from ..runner import Hidden, Pending, Runner
from .team import Check, Digest, Forward, Head, Register, Sleep, Team, WakeUp, WarmUp


@dataclass(frozen=True)
class Hashing:
    """A digest on its way."""

    step: int
    plans: int
    found: Array


class StateDigest:
    """The program that hashes a rank's rows, and the hash of all plans so far."""

    def __init__(self, backend: Backend):
        self.backend, self.plans = backend, 0
        self.run = backend.compile(digest_rows, ("rows",), ("digest", "rows"), "rows")

    def planned(self, data: bytes) -> None:
        """Takes in a Forward as it was sent."""
        self.plans = zlib.crc32(data, self.plans)

    def launch(self, runner: Runner, step: int, plans: int) -> Hashing:
        """Starts hashing the runner's rows behind a step, before which the plans came to that; `value` reads it."""
        found, rows = self.run(runner.cache.rows)
        runner.cache, found = with_rows(runner.cache, rows), runner.gathered(found)
        self.backend.prefetch(found)
        return Hashing(step, plans, found)

    def value(self, launched: Hashing) -> Digest:
        found = self.backend.read(launched.found)
        tokens, counts = (zlib.crc32(found[..., i, :].tobytes()) for i in range(2))
        return Digest(launched.step, launched.plans, counts, tokens)


class LeadRunner(Runner):
    """A Runner whose model runs in several processes. `every`: steps from one comparison to the next; 0: none."""

    # while it is being made, so are the others
    team: Team | None = None

    def __init__(self, team: Team, every: int, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        team.await_ready()
        self.team, self.every = team, every
        self.state, self.num_launched = StateDigest(self.backend), 0
        self.unread: list[Hashing] = []

    def launch_forward(self, plan: Plan, taps: tuple[str, ...] = ()) -> Hidden:
        with uninterrupted():
            self.tell_forward(plan, taps)
            return super().launch_forward(plan, taps)

    def launch_head(self, plan: Plan, hidden: Hidden, mask: np.ndarray | None = None) -> Pending:
        with uninterrupted():
            plans = self.tell_head(plan, mask)
            pending = super().launch_head(plan, hidden, mask)
            self.hash_state(plan, plans)
        return pending

    def tell_forward(self, plan: Plan, taps: tuple[str, ...]) -> None:
        """Has the others run their part of a step's forward, and compares what they said about the last ones."""
        assert self.team
        while self.unread:
            self.team.compare(self.state.value(self.unread.pop(0)))
        embeds = {c.request_id: self.embeds[c.request_id] for c in plan.chunks if c.request_id in self.embeds}
        self.state.planned(self.team.tell(Forward(plan, taps, embeds)))

    def tell_head(self, plan: Plan, mask: np.ndarray | None) -> int | None:
        """Has the others run their part of its head. Returns what all plans come to if states are compared then."""
        assert self.team
        self.team.tell(Head(mask))
        self.num_launched += 1
        if not self.every or self.num_launched % self.every:
            return None
        self.team.tell(Check(plan.step))
        return self.state.plans

    def hash_state(self, plan: Plan, plans: int | None) -> None:
        """Starts hashing the rows behind a plan's head, where tell_head has the others do so."""
        if plans is not None:
            self.unread.append(self.state.launch(self, plan.step, plans))

    def register(self, processor: LogitsProcessor) -> None:
        assert self.team
        super().register(processor)
        self.team.tell(Register(processor))

    def reset(self) -> None:
        if self.team is not None:
            # where the others cannot follow, no later step can go better
            vars(self).pop("cache", None)
            self.team.reset()
            self.unread, self.state.plans = [], 0
        super().reset()

    def sleep(self, level: int) -> None:
        assert self.team
        wait = self.team.order(lambda number: Sleep(number, level))
        super().sleep(level)
        wait()

    def wake_up(self, tags: Sequence[str], weights: Any = None) -> None:
        assert self.team
        wait = self.team.order(lambda number: WakeUp(number, tuple(tags), weights))
        super().wake_up(tags, weights)
        wait()

    def warm_up(self) -> int:
        assert self.team
        self.team.tell(WarmUp())
        return super().warm_up()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: the others run it to its end, and would wait for us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
