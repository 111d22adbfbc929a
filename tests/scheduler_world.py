"""A scheduler, a device that is only bookkeeping, and everything that must hold after each step.

The device keeps what K/V stand for: in each slot the digest of all that they depend on (salt, and every token
up to theirs). A step writes first and reads afterwards, and fails if a query sees a token that is not its own past.
So sharing, forking, freeing, windows, eviction and preemption are right or the world stops.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

from octavo.engine.block_manager import BlockManager
from octavo.engine.limits import SchedulerConfig
from octavo.engine.plan import Plan, Reason
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_log import from_json, to_json
from octavo.engine.waiting import rank

ASIDE = (Reason.IN_FLIGHT, Reason.SIBLING)
LATER = (Reason.ENDS_UNREAD, Reason.NO_BUDGET, Reason.IN_FLIGHT, Reason.NEXT_BATCH)
STARTED = (Reason.ADMITTED, Reason.FORKED, Reason.RESUMED)
ALPHABET = 5  # token ids; few, so that prompts share prefixes


def make_scheduler(
    *,
    num_blocks: int | tuple[int, ...] = 20,
    windows: tuple[int | None, ...] = (None,),
    block_size: int = 4,
    caching: bool = True,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 48,
    **config,
) -> Scheduler:
    pools = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    blocks = BlockManager(windows, pools, block_size, caching, budget)
    return Scheduler(SchedulerConfig(max_num_seqs, budget, max_model_len, **config), blocks)


def make_request(id: str, prompt, max_tokens: int | None = 8, *, stop_token_ids=(), eos_ids=(), **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=stop_token_ids)
    prompt = [0] * prompt if isinstance(prompt, int) else list(prompt)
    return Request(id, prompt, params, eos_ids=frozenset(eos_ids), **fields)


def add(scheduler: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for r in requests:
        scheduler.add(r)
    return requests


def planned(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def step(scheduler: Scheduler, token: int = 0) -> dict[str, int]:
    """One synchronous step, every sampled token the same; the number of tokens planned for each request id."""
    plan = planned(scheduler)
    scheduler.update(plan, [token] * len(plan.sampled))
    return {c.request_id: c.num_tokens for c in plan.chunks}


def run(scheduler: Scheduler, *requests: Request) -> None:
    """Adds requests and steps until all have ended."""
    add(scheduler, *requests)
    while scheduler.has_work:
        step(scheduler)


def past(before: int, token: int) -> int:
    """The digest of a token and all before it. Python hashes numbers alike in every process."""
    return hash((before, token))


def pasts(tokens: list[int], salt: str | None) -> list[int]:
    out, last = [], 0 if salt is None else zlib.crc32(salt.encode())
    for token in tokens:
        out.append(last := past(last, token))
    return out


def draw(seed: int, digest: int) -> int:
    """The token a request samples after this past: no schedule can change it."""
    return hash((seed, digest)) % ALPHABET


def alone(r: Request, max_model_len: int) -> tuple[list[int], str]:
    """What a request generates, and why it ends, whatever else runs."""
    digest, out = pasts(r.prompt, r.cache_salt)[-1], []
    while True:
        out.append(draw(r.key[0], digest))
        digest = past(digest, out[-1])
        if out[-1] in r.eos_ids or out[-1] in r.params.stop_token_ids:
            return out, "stop"
        if len(out) == r.max_tokens or len(r.prompt) + len(out) == max_model_len:
            return out, "length"


@dataclass
class Row:
    """What CacheState.rows holds of one row, as digests."""

    pasts: list[int]
    computed: int
    seed: int
    sampled: int | None = None  # a token that the first stage does not know yet


class Device:
    """Does what plans say, in order, and nothing else. Knows no Request."""

    def __init__(self, scheduler: Scheduler):
        blocks = scheduler.blocks
        self.size, self.windows = blocks.block_size, [k.window for k in blocks.keeps]
        self.sinks = [k.sinks for k in blocks.keeps]
        self.slots = [[[None] * self.size for _ in range(n)] for n in blocks.num_blocks]
        longest = blocks.ceil(scheduler.config.max_model_len)
        self.tables = [[[0] * longest for _ in range(scheduler.config.max_num_seqs)] for _ in blocks.windows]
        self.rows: dict[int, Row] = {}
        # several stages: a token that the last one samples reaches the first only in a later plan
        self.stages = scheduler.config.batches > 1

    def launch(self, plan: Plan, salts: dict[str, str | None]) -> list[int]:
        """The sampled tokens. They go to the rows at once, as on a device; the host may read them later."""
        by_row = {c.row: c.request_id for c in plan.chunks}
        for a in plan.admitted:
            assert a.num_computed < len(a.tokens)
            self.rows[a.row] = Row(pasts(list(a.tokens), salts[by_row[a.row]]), a.num_computed, a.key[0])
            for table in self.tables:
                table[a.row] = [0] * len(table[a.row])
        assert self.stages or not plan.tokens
        for at, position, token in plan.tokens:
            row = self.rows[at]
            if position == len(row.pasts):
                assert token == row.sampled
                row.pasts.append(past(row.pasts[-1], token))
            # one that was preempted knows them all
            assert position == len(row.pasts) - 1 and row.pasts[-1] == past(row.pasts[-2], token)
        for w in plan.table_writes:
            self.tables[w.group][w.row][w.index : w.index + len(w.blocks)] = w.blocks
        moved = [(t.group, t.target, list(self.slots[t.group][t.source])) for t in plan.transfers]
        assert len({(group, target) for group, target, _ in moved}) == len(moved)
        for group, target, content in moved:
            self.slots[group][target] = content
        written: Counter[tuple[int, int, int]] = Counter()
        for c in plan.chunks:
            self._write(c, written)
        assert not written or max(written.values()) == 1, "two tokens were written to one slot"
        for c in plan.chunks:
            self._read(c)
        return [self._sample(c.row) for c in plan.chunks if c.samples]

    def _write(self, c, written) -> None:
        row = self.rows[c.row]
        assert row.computed == c.start
        row.computed += c.num_tokens
        assert row.computed <= len(row.pasts)
        assert c.samples == (row.computed == len(row.pasts))
        for group, tables in enumerate(self.tables):
            for position in range(c.start, row.computed):
                index, offset = divmod(position, self.size)
                block = tables[c.row][index]
                assert block, f"token {position} of {c.request_id} is written to the null block"
                written[group, block, offset] += 1
                self.slots[group][block][offset] = row.pasts[position]

    def _read(self, c) -> None:
        row, size = self.rows[c.row], self.size
        for group, window in enumerate(self.windows):
            oldest = 0 if window is None else max(0, c.start - window + 1)
            table, slots = self.tables[group][c.row], self.slots[group]
            for position in (*range(min(self.sinks[group], oldest)), *range(oldest, row.computed)):
                seen = slots[table[position // size]][position % size]
                assert seen == row.pasts[position], f"{c.request_id} reads another's K/V"

    def _sample(self, at: int) -> int:
        row = self.rows[at]
        token = draw(row.seed, row.pasts[-1])
        if self.stages:
            row.sampled = token
        else:
            row.pasts.append(past(row.pasts[-1], token))
        return token


@dataclass
class World:
    """Requests come and go, steps are planned up to `depth` ahead of what is read."""

    scheduler: Scheduler
    depth: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    unread: deque[tuple[Plan, list[int]]] = field(default_factory=deque)
    plans: list[Plan] = field(default_factory=list)
    shadow: Scheduler | None = None  # a loaded copy that gets the same events
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.device = Device(self.scheduler)
        self.salts: dict[str, str | None] = {}

    def both(self) -> list[Scheduler]:
        return [self.scheduler] if self.shadow is None else [self.scheduler, self.shadow]

    def add(self, *family: Request) -> None:
        for r in family:
            r.arrival = len(self.requests)
            self.requests[r.id], self.salts[r.id] = r, r.cache_salt
            if self.shadow:
                # siblings of the shadow are linked to the shadow's own first, dead or alive
                twin = Request(r.id, r.prompt, r.params, r.key, r.eos_ids, r.priority, r.arrival, r.cache_salt)
                twin.index = r.index
                twin.first = None if r.first is None else self.twins[r.first.id]
                self.twins[r.id] = twin
                self.shadow.add(twin)
            self.scheduler.add(r)

    def finish(self, r: Request, reason: str = "abort") -> None:
        self.aborted.add(r.id)
        for s in self.both():
            s.finish(s.alive[r.id], reason)
        check_state(self.scheduler)

    def set_limits(self, rng: random.Random) -> None:
        """Any limits within what the scheduler was made for; all of it, one time in three."""
        c = self.scheduler.config
        low = 1 if c.enable_chunked_prefill else c.max_model_len
        whole = rng.random() < 1 / 3
        budget = c.max_num_batched_tokens if whole else rng.randint(low, c.max_num_batched_tokens)
        seqs = c.max_num_seqs if whole else rng.randint(1, min(budget, c.max_num_seqs))
        for s in self.both():
            s.set_limits(max_num_seqs=seqs, max_num_batched_tokens=budget)

    def split(self) -> None:
        """From now on a copy that went through JSON must do just what the original does."""
        value = self.scheduler.dump()
        self.shadow = Scheduler.load(json.loads(json.dumps(value)))
        assert self.shadow.dump() == value
        self.twins = dict(self.shadow.alive)

    def plan(self) -> bool:
        """One schedule and launch; False if nothing could run."""
        s = self.scheduler
        queue, running = list(s.waiting), list(s.running)
        plan = s.schedule()
        if self.shadow:
            assert self.shadow.schedule() == plan
            assert self.shadow.dump() == s.dump()
        check_state(s)
        self.num_steps += 1
        if plan is None:
            assert self.unread or not s.has_work, "nothing runs, and nothing is to be read"
            return False
        check_plan(s, plan, queue, running)
        assert from_json(json.loads(json.dumps(to_json(plan)))) == plan
        self.plans.append(plan)
        self.unread.append((plan, self.device.launch(plan, self.salts)))
        check_tables(s, self.device)
        return True

    def read(self) -> None:
        """Hands the oldest step's tokens to the scheduler."""
        plan, tokens = self.unread.popleft()
        touched = self.scheduler.update(plan, tokens)
        if self.shadow:
            assert [r.id for r in self.shadow.update(plan, tokens)] == [r.id for r in touched]
        check_state(self.scheduler)

    def step(self) -> None:
        """Plans one step and reads what is more than `depth` behind."""
        went_on = self.plan()
        while self.unread and (len(self.unread) > self.depth or not went_on):
            self.read()
            went_on = True

    def drain(self) -> None:
        """Runs until all has ended, which must happen in a bounded number of steps, and checks what came out."""
        bound = 20 + 4 * sum(r.limit + self.depth + 2 for r in self.scheduler.alive.values())
        for _ in range(bound):
            if not (self.scheduler.has_work or self.unread):
                break
            self.step()
        assert not self.scheduler.alive, f"{list(self.scheduler.alive)} starve: not done after {bound} steps"
        assert not self.scheduler.orphans
        assert len(self.scheduler.free_rows) == self.scheduler.config.max_num_seqs
        for pool in self.scheduler.blocks.pools:
            assert len(pool.free) == pool.num_blocks - 1
        for r in self.requests.values():
            self._check_output(r)

    def _check_output(self, r: Request) -> None:
        tokens, reason = alone(r, self.scheduler.config.max_model_len)
        if r.id in self.aborted:
            assert r.output == tokens[: len(r.output)]
        else:
            assert (r.output, r.finish_reason) == (tokens, reason)
            assert r.stop_reason == (tokens[-1] if reason == "stop" and tokens[-1] not in r.eos_ids else None)


def check_state(s: Scheduler) -> None:
    """References equal table entries, free and used blocks part the pool, keys and holders agree, nobody is lost."""
    assert len(s.running) + len(s.waiting) + len(s.left) == len(s.alive)
    assert {*s.running, *s.waiting, *s.left} == set(s.alive.values())
    assert all(r.row is not None and (r.complete or r.num_tokens == r.limit) for r in s.ending)
    rows = [r.row for r in s.running if r.row is not None]
    assert sorted([*rows, *s.free_rows]) == list(range(s.config.max_num_seqs))
    for r in (*s.waiting, *(s.left - {*s.estates.kept})):
        assert r.row is None
        assert (r.blocks, r.computed) == ([], 0)
    assert all(r.row is None and (r.complete or (r.in_flight, r.num_tokens) == (1, r.limit)) for r in s.left)
    never_run = Counter(r.first for r in s.waiting if r.first and r.num_cached is None)
    assert s.estates.heirs == never_run and all(never_run[r.first or r] for r in s.estates.kept)
    for group, pool in enumerate(s.blocks.pools):
        held = Counter(b for r in (*s.running, *s.estates.kept) for b in r.blocks[group] if b)
        assert [held[b] for b in range(pool.num_blocks)] == pool.refs
        assert sorted(pool.free) == [b for b in range(1, pool.num_blocks) if not held[b]]
        listed = [(key, b) for key, first in pool.holder.items() for b in [first, *pool.duplicates.get(key, [])]]
        assert sorted(listed) == sorted((key, b) for b, key in pool.key_of.items())
        assert all(pool.duplicates.values())
        for r in s.running:
            assert len(r.blocks[group]) == len(r.blocks[0]) >= s.blocks.ceil(r.computed)
            longest = len(r.blocks[0]) * s.blocks.block_size
            assert sum(1 for b in r.blocks[group] if b) <= s.blocks.peak(group, longest, longest)


def check_plan(s: Scheduler, plan: Plan, queue: list[Request], running: list[Request]) -> None:
    """Limits are kept, and nobody goes before somebody who was ahead. Both lists are from before the step."""
    c, most, why = s.config, s.limits, dict(plan.reasons)
    ids = [chunk.request_id for chunk in plan.chunks]
    assert len(set(ids)) == len(ids)
    assert len({chunk.row for chunk in plan.chunks}) == len(ids)
    assert {w.row for w in plan.table_writes} <= {chunk.row for chunk in plan.chunks}
    assert all(chunk.num_tokens >= 1 for chunk in plan.chunks)
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= most.max_num_batched_tokens
    assert len(s.running) <= most.max_num_seqs
    assert all(chunk.start + chunk.num_tokens < c.max_model_len for chunk in plan.chunks)
    if c.long_prefill_token_threshold and len(plan.chunks) > 1:
        assert max(chunk.num_tokens for chunk in plan.chunks) <= c.long_prefill_token_threshold, plan
    if not c.enable_chunked_prefill:
        assert all(chunk.samples for chunk in plan.chunks)
    started = [r for r in queue if r.row is not None]
    if started:
        # whoever was ahead of the last one that started has started too, or is set aside for a reason of its own
        last = max(queue.index(r) for r in started)
        for r in queue[:last]:
            assert r in started or why[r.id] in ASIDE, f"{r.id} is overtaken"
    for r in started:
        assert why[r.id] in STARTED
        assert r.id in ids
    assert all(why[r.id] == Reason.ENDS_UNREAD for r in running if r in s.left)
    running = [r for r in running if r not in s.left]
    victims = [r for r in running if r.row is None]
    worst_last = sorted(running, key=rank) if c.policy == "priority" else running
    assert set(victims) == set(worst_last[len(running) - len(victims) :])
    assert not (victims and started), "a step that preempts admits nobody"
    for r in running:
        assert r.id in ids or r in victims or why[r.id] in LATER, f"{r.id}: no reason"
    if c.batches > 1:
        check_batch(s, plan, queue, running)


def check_batch(s: Scheduler, plan: Plan, queue: list[Request], running: list[Request]) -> None:
    """A plan has its share, nobody whose token is unread, and of the running ones those that have waited longest."""
    ids = {chunk.request_id: chunk for chunk in plan.chunks}
    everybody = min(len(queue) + len(running), s.limits.max_num_seqs)
    assert len(ids) <= max(1, -(-everybody // s.config.batches))
    for r in (*queue, *running):
        if r.id in ids:
            assert r.in_flight == ids[r.id].samples, f"{r.id} is in two batches"


def check_tables(s: Scheduler, device: Device) -> None:
    """The deltas in plans add up to the tables that the scheduler has in mind."""
    for r in s.running:
        assert r.row is not None
        for group, table in enumerate(r.blocks):
            assert device.tables[group][r.row][: len(table)] == table
