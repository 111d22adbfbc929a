"""The production scheduler under a virtual clock: a fake step that takes as long as a cost model says."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..block_manager import BlockManager
from ..checks import check_names, integer, number
from ..limits import SchedulerConfig
from ..plan import Plan
from ..request import Request
from ..sampling_params import SamplingParams, request_key
from ..scheduler import Scheduler
from .quantiles import Quantiles
from .rerun import quiet

FAKE_VOCAB = 32768
TRACE_FIELDS = ("arrival", "prompt", "output", "prefix", "prefix_len", "priority", "n")


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `base`, and so much for each token computed, each sequence, and each token of context read."""

    base: float = 2e-3
    per_token: float = 2e-5
    per_sequence: float = 1e-5
    per_context: float = 5e-8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number(name, value, 0, float("inf"), open_high=True)

    def seconds(self, plan: Plan) -> float:
        tokens = context = 0
        for c in plan.chunks:
            tokens += c.num_tokens
            context += c.start + c.num_tokens
        return self.base + self.per_token * tokens + self.per_sequence * len(plan.chunks) + self.per_context * context


@dataclass(frozen=True)
class Arrival:
    """One line of a trace: `prompt` and `output` are numbers of tokens, `arrival` is in seconds from the start.

    Requests of the same `prefix` begin with the same `prefix_len` tokens.
    """

    arrival: float
    prompt: int
    output: int
    prefix: str | None = None
    prefix_len: int = 0
    priority: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        number("arrival", self.arrival, 0, float("inf"), open_high=True)
        for name, low in (("prompt", 1), ("output", 1), ("prefix_len", 0), ("n", 1)):
            integer(name, getattr(self, name), low, float("inf"))
        integer("priority", self.priority)
        if self.prefix_len > self.prompt:
            raise ValueError(f"prefix_len {self.prefix_len} is more than the prompt's {self.prompt} tokens")
        if self.prefix_len and self.prefix is None:
            raise ValueError(f"prefix_len {self.prefix_len} needs a prefix: the name of what is shared")


@dataclass
class Report:
    """What a simulation found. Times are seconds of the virtual clock; `hit_rate` is of prompt tokens."""

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_preemptions: int = 0
    hit_rate: float = 0.0
    ttft: Quantiles = field(default_factory=Quantiles)
    latency: Quantiles = field(default_factory=Quantiles)
    per_token: Quantiles = field(default_factory=Quantiles)

    def to_json(self) -> dict[str, Any]:
        names = ("num_requests", "num_steps", "num_tokens", "seconds", "num_preemptions", "hit_rate")
        plain = {name: getattr(self, name) for name in names}
        plain["tokens_per_second"] = self.num_tokens / self.seconds if self.seconds else 0.0
        times = [{"of": n} | getattr(self, n).summary() for n in ("ttft", "latency", "per_token")]
        return plain | {"times": times}


def read_trace(path: str | Path) -> Iterator[Arrival]:
    """The requests of a trace, a JSON object a line, one at a time. Raises ValueError naming the line.

    Arrivals must not fall: a trace may be longer than memory, so it is not sorted here.
    """
    last = 0.0
    # bytes: what is no text is an error of its line
    with open(path, "rb") as file:
        for number_, line in enumerate(file, 1):
            try:
                value = json.loads(line.decode())
                check_names("field of a trace", value, TRACE_FIELDS, {})
                arrival = Arrival(**value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: line {number_}: {error}") from error
            if arrival.arrival < last:
                raise ValueError(f"{path}: line {number_} arrives at {arrival.arrival}, before the line above it")
            last = arrival.arrival
            yield arrival


class Simulation:
    """One run. Memory grows with the requests that are alive, not with those that have ended."""

    def __init__(self, scheduler: Scheduler, cost: Cost, *, overlap: bool = True):
        self.scheduler, self.cost, self.depth = scheduler, cost, 2 if overlap else 1
        self.clock = 0.0
        self.report = Report()
        self.arrived: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.unread: deque[tuple[Plan, float]] = deque()
        self.device_free = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Simulates until every request has ended."""
        with quiet():
            self._run(iter(arrivals))
        return self._finished()

    def _run(self, waiting: Iterator[Arrival]) -> None:
        for number_, a in enumerate(waiting):
            self.run_until(a.arrival)
            self.add(family_of(a, number_), a.arrival)
        self.run_until(float("inf"))

    def run_until(self, when: float) -> None:
        """Runs steps until the clock is there, or nothing can go on before: it is set to that time then."""
        while self.clock < when and (self.scheduler.has_work or self.unread):
            plan = self.scheduler.schedule()
            if plan is not None:
                self._launch(plan)
            if self.unread and (plan is None or len(self.unread) >= self.depth):
                self._read()
        if when < float("inf"):
            self.clock = max(self.clock, when)

    def add(self, family: Iterable[Request], arrival: float) -> None:
        """Queues the requests of one arrival."""
        for request in family:
            self.arrived[request.id] = arrival
            self.scheduler.add(request)

    def _launch(self, plan: Plan) -> None:
        """The device runs steps one after the other; the host goes on at once, and waits where it reads."""
        start = max(self.clock, self.device_free)
        self.device_free = start + self.cost.seconds(plan)
        self.unread.append((plan, self.device_free))
        self.report.num_steps += 1

    def _read(self) -> None:
        plan, done = self.unread.popleft()
        self.clock = max(self.clock, done)
        # no token ends a text here, so any will do; but texts differ, and so do the blocks they fill
        sampled = plan.sampled
        tokens = [hash((c.request_id, c.start)) % FAKE_VOCAB for c in sampled]
        for request in self.scheduler.update(plan, tokens):
            self.first.setdefault(request.id, self.clock)
            self.report.num_tokens += 1
            if request.finish_reason is not None:
                self._ended(request)

    def _ended(self, request: Request) -> None:
        arrived, first = self.arrived.pop(request.id), self.first.pop(request.id)
        r, more = self.report, len(request.tokens) - len(request.prompt) - 1
        r.num_requests += 1
        r.ttft.add(first - arrived)
        r.latency.add(self.clock - arrived)
        if more:
            r.per_token.add((self.clock - first) / more)

    def _finished(self) -> Report:
        r, s = self.report, self.scheduler
        r.seconds, r.num_preemptions = self.clock, s.num_preemptions
        r.hit_rate = s.num_hit_tokens / s.num_queried_tokens if s.num_queried_tokens else 0.0
        return r


def make_scheduler(
    num_blocks: int,
    *,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    policy: Any = "fcfs",
    **limits: Any,
) -> Scheduler:
    """A scheduler as an LLM would make it; `limits` are SchedulerConfig's, `policy` is what as_policy takes."""
    config = SchedulerConfig(**limits)
    blocks = BlockManager(
        windows, [num_blocks] * len(windows), block_size, enable_prefix_caching, config.max_num_batched_tokens
    )
    return Scheduler(config, blocks, policy)


def family_of(a: Arrival, number_: int) -> list[Request]:
    """The n requests of one line of a trace, the number_-th from 0."""
    name, prompt, params = str(number_), list(_prompt(a, number_)), _params(a.output, a.n)
    family: list[Request] = []
    for i in range(a.n):
        request_id, first = name if a.n == 1 else f"{i}_{name}", family[0] if family else None
        key = request_key(number_ + 1, i)
        family.append(Request(request_id, prompt, params, key, priority=a.priority, arrival=number_, index=i))
        family[-1].first = first
    return family


@functools.lru_cache(maxsize=1 << 14)
def _params(output: int, n: int) -> SamplingParams:
    # checking them is what takes time, and few are different
    return SamplingParams(max_tokens=output, n=n, temperature=1.0, ignore_eos=True)


def _prompt(a: Arrival, number_: int) -> Iterator[int]:
    """Tokens of which only the prefix is shared: the first of the rest tells requests apart."""
    yield from (_word(f"{a.prefix}:{i}") for i in range(a.prefix_len if a.prefix is not None else 0))
    start = a.prefix_len if a.prefix is not None else 0
    for i in range(start, a.prompt):
        yield number_ % FAKE_VOCAB if i == start else (number_ // FAKE_VOCAB + i) % FAKE_VOCAB


@functools.lru_cache(maxsize=1 << 16)
def _word(text: str) -> int:
    return sum(text.encode()) * 31 % FAKE_VOCAB


def cost_from(value: Mapping[str, float]) -> Cost:
    """The cost model that a mapping gives. Raises ValueError for a name that it does not have."""
    check_names("field of a cost model", value, Cost.__dataclass_fields__, {})
    return Cost(**value)
