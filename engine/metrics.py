"""What the engine has done, counted and timed: plain numbers on one clock, behind the scheduler's back.

Nothing here is asked while statistics are off. The names are in metrics_table.py, their way out in metrics_export.py.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .expert_load import ExpertLoad
from .plan import Plan, Reason
from .request import Request, Times
from .scheduler import Scheduler

STARTED = frozenset((Reason.ADMITTED, Reason.FORKED, Reason.RESUMED))
# what stops the head of the queue, and with it all behind it
HELD_UP = frozenset((Reason.NO_BUDGET, Reason.NEXT_BATCH, Reason.NO_SEAT, Reason.NO_ROOM, Reason.AFTER_PREEMPTION))
OTHERS = frozenset(
    (Reason.PREEMPTED, Reason.STOP, Reason.LENGTH, Reason.REPETITION, Reason.ABORT, Reason.ERROR, Reason.ENDS_UNREAD)
    + (*STARTED, *HELD_UP)
)
NOT_SEEN = "not_seen"  # it came after the last plan that looked at the queue


def decades(steps: Sequence[float], low: int, high: int) -> tuple[float, ...]:
    """Bucket bounds: the steps times each power of ten from 10^low on, then 10^high."""
    return (*(float(f"{step}e{power}") for power in range(low, high) for step in steps), float(f"1e{high}"))


# in seconds. Of the three times that P95 and P99 are asked of, bounds lie a factor of at most 1.28 apart
FINE = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
COARSE = (1.0, 1.6, 2.5, 4.0, 6.3)
LATENCY, PER_TOKEN, PHASE = decades(FINE, -3, 4), decades(FINE, -4, 2), decades(COARSE, -3, 4)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS = (1.0, *(float(2**i) for i in range(3, 15)))


class Buckets:
    """How many values were at most each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # of each bucket alone; the last has no bound
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Takes in a value that occurred so often."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class EngineMetrics:
    """Watches one engine. Its LLM says when a request is queued, planned, read and ended.

    Counters that the scheduler keeps anyway (preemptions, prompt tokens, prefix hits) are read there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.perf_counter,
        expert_load: ExpertLoad | None = None,
    ):
        self.scheduler, self.clock, self.expert_load = scheduler, clock, expert_load
        longest = scheduler.config.max_model_len
        lengths = decades((1.0, 2.0, 5.0), 0, len(str(longest)))
        self.num_queued = self.num_rejected = 0  # requests, since the start
        self.num_generation_tokens = 0
        self.sleep_level = 0  # 0: awake
        self.ends: Counter[str] = Counter()  # requests by finish_reason
        # of the last plan: why the queue's head does not start, and who is set aside
        self.held_up: str = NOT_SEEN
        self.aside: list[tuple[str, str]] = []
        self.siblings: dict[Request, list[int]] = {}  # by the first: the output lengths of those that have ended

        self.first_token, self.inter_token = Buckets(LATENCY), Buckets(PER_TOKEN)
        self.latency, self.per_token = Buckets(LATENCY), Buckets(PER_TOKEN)
        self.queue, self.prefill, self.decode, self.inference = (Buckets(PHASE) for _ in range(4))
        self.prompt_lengths, self.output_lengths, self.longest_outputs, self.max_tokens, self.computed_lengths = (
            Buckets(lengths) for _ in range(5)
        )
        self.step_tokens, self.samples, self.preemptions = map(Buckets, (STEP_TOKENS, COUNTS, (0.0, *COUNTS)))

    def queued(self, request: Request) -> None:
        """A request has been given to the scheduler."""
        request.times = Times(self.clock())
        self.num_queued += 1

    def planned(self, plan: Plan | None) -> None:
        """The scheduler has made a plan."""
        if plan is None:
            return
        self.step_tokens.add(sum([c.num_tokens for c in plan.chunks]))
        self.held_up, self.aside = NOT_SEEN, []
        if not plan.reasons:
            return
        now, alive = self.clock(), self.scheduler.alive
        for name, reason in plan.reasons:
            r = alive.get(name)
            if reason in STARTED:
                if r and r.times and r.times.scheduled is None:
                    r.times.scheduled = now
            elif r is not None and r.row is None:
                if reason in HELD_UP:
                    self.held_up = str(reason)
                elif reason not in OTHERS:
                    self.aside.append((name, str(reason)))

    def read(self, requests: Sequence[Request]) -> None:
        """Each of these got a token from the step that was just read, or was computed only; some have ended with it."""
        now, gap, gaps = self.clock(), -1.0, 0
        self.num_generation_tokens += sum(r.samples for r in requests)
        for r in requests:
            if not r.samples:
                self._end(r, now)
                continue
            times = r.times
            assert times is not None
            if times.last_token is None:
                times.first_token = now
                self.first_token.add(now - r.arrival_time)
            else:
                # most got their last one in the same step, so the gaps are equal
                since = now - times.last_token
                if since != gap:
                    self.inter_token.add(gap, gaps)
                    gap, gaps = since, 0
                gaps += 1
            times.last_token = now
            if r.finish_reason is not None:
                self._end(r, now)
        self.inter_token.add(gap, gaps)

    def ended(self, requests: Iterable[Request]) -> None:
        """Counts those of these that have ended without a token: aborted, or failed."""
        now = self.clock()
        for r in requests:
            if r.times is not None and r.finish_reason is not None:
                self._end(r, now)

    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait for which reason, as of the last plan; together they are all that wait."""
        alive, left = self.scheduler.alive, len(self.scheduler.waiting)
        found: Counter[str] = Counter()
        for name, reason in self.aside:
            if (r := alive.get(name)) is not None and r.row is None and left:
                found[reason] += 1
                left -= 1
        if left:
            found[self.held_up] += left
        return dict(found)

    def _end(self, r: Request, now: float) -> None:
        reason, times = r.finish_reason, r.times
        assert reason is not None and times is not None
        if times.ended:
            return
        times.ended = True
        self.ends[reason] += 1
        if r.samples:
            self._end_sample(r)
        # what was cut short says nothing of how long a request takes
        if reason in (Reason.ABORT, Reason.ERROR) or times.scheduled is None:
            return
        first, last = times.first_token or now, times.last_token or now
        self.latency.add(now - r.arrival_time)
        self.queue.add(times.scheduled - times.queued)
        self.prefill.add(first - times.scheduled)
        self.inference.add(last - times.scheduled)
        self.prompt_lengths.add(len(r.prompt))
        self.computed_lengths.add(len(r.prompt) - (r.num_cached or 0))
        self.preemptions.add(r.preemptions)
        if not r.samples:
            return
        num_tokens = len(r.tokens) - len(r.prompt)
        self.decode.add(last - first)
        self.output_lengths.add(num_tokens)
        if num_tokens > 1:
            self.per_token.add((last - first) / (num_tokens - 1))
        if r.max_tokens is not None:
            self.max_tokens.add(r.max_tokens)

    def _end_sample(self, r: Request) -> None:
        """Counts a prompt's n samples when the last of them has ended."""
        n, lengths = r.params.n, [len(r.tokens) - len(r.prompt)]
        if n > 1:
            lengths += self.siblings.pop(r.first or r, [])
            if len(lengths) < n:
                self.siblings[r.first or r] = lengths
                return
        self.samples.add(n)
        self.longest_outputs.add(max(lengths))
