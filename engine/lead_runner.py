"""Rank 0's Runner: what it is told, it tells the others first."""

from __future__ import annotations

import contextlib
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..models.interface import Array
from ..models.logit_edits import LogitsProcessor
from ..models.step import digest_rows, with_rows
from .backend import Backend
from .child import pickled
from .plan import Plan
from .runner import Hidden, Pending, Runner
from .team import OTHERS, Check, Digest, Forward, Head, Register, Sleep, Team, WakeUp, WarmUp


class StateDigest:
    """The program that hashes a rank's rows, and the hash of all plans so far."""

    def __init__(self, backend: Backend):
        self.backend, self.plans = backend, 0
        self.run = backend.compile(digest_rows, ("rows",), ("digest", "rows"), "rows")

    def planned(self, data: bytes) -> None:
        """Takes in a Forward as it was sent."""
        self.plans = zlib.crc32(data, self.plans)

    def launch(self, runner: Runner) -> tuple[int, Array]:
        """Starts hashing the runner's rows; `value` reads it."""
        found, rows = self.run(runner.cache.rows)
        runner.cache, found = with_rows(runner.cache, rows), runner.gathered(found)
        self.backend.prefetch(found)
        return self.plans, found

    def value(self, step: int, launched: tuple[int, Array]) -> Digest:
        return Digest(step, launched[0], zlib.crc32(self.backend.read(launched[1]).tobytes()))


class LeadRunner(Runner):
    """A Runner whose model runs in several processes. `every`: steps from one comparison to the next; 0: none."""

    # while it is being made, so are the others
    team: Team | None = None

    def __init__(self, team: Team, every: int, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        team.await_ready()
        self.team, self.every = team, every
        self.state, self.num_launched = StateDigest(self.backend), 0
        self.unread: tuple[int, tuple[int, Array]] | None = None

    def launch_forward(self, plan: Plan, taps: tuple[str, ...] = ()) -> Hidden:
        assert self.team
        if self.unread is not None:
            step, launched = self.unread
            self.unread = None
            self.team.compare(self.state.value(step, launched))
        embeds = {c.request_id: self.embeds[c.request_id] for c in plan.chunks if c.request_id in self.embeds}
        with uninterrupted():
            self.state.planned(self.team.tell(Forward(plan, taps, embeds)))
            return super().launch_forward(plan, taps)

    def launch_head(self, plan: Plan, hidden: Hidden, mask: np.ndarray | None = None) -> Pending:
        assert self.team
        with uninterrupted():
            self.team.tell(Head(mask))
            pending = super().launch_head(plan, hidden, mask)
            self.num_launched += 1
            if self.every and self.num_launched % self.every == 0:
                self.team.tell(Check(plan.step))
                self.unread = plan.step, self.state.launch(self)
        return pending

    def register(self, processor: LogitsProcessor) -> None:
        assert self.team
        # one that cannot be sent is nobody's
        pickled(processor, OTHERS)
        super().register(processor)
        self.team.tell(Register(processor))

    def reset(self) -> None:
        if self.team is not None:
            # where the others cannot follow, no later step can go better
            vars(self).pop("cache", None)
            self.team.reset()
            self.unread, self.state.plans = None, 0
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
