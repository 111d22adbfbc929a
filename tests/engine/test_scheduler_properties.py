"""What must hold for every scheduler, in every state: random worlds, and the rules written twice."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_oracle import Oracle, Req
from scheduler_world import ALPHABET, World, check_state, make_request, make_scheduler

from octavo.engine.scheduler import Scheduler

WINDOWS = [(None,), (None,), (None, 8), (5,), (None, 1), (3, 9)]


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _random_scheduler(rng: random.Random, **fixed) -> Scheduler:
    budget = rng.choice([8, 16, 50])
    limits = {}
    if rng.random() < 0.3:
        limits["long_prefill_token_threshold"] = rng.choice([1, 3, 6])
    elif budget == 50 and rng.random() < 0.5:
        limits["enable_chunked_prefill"] = False
    return make_scheduler(
        **{
            "num_blocks": rng.choice([14, 20, 60]),
            "windows": rng.choice(WINDOWS),
            "caching": rng.random() < 0.7,
            "budget": budget,
            "max_num_seqs": rng.choice([1, 3, 5]),
            "max_model_len": rng.choice([30, 48]),
            "policy": rng.choice(["fcfs", "priority"]),
            "order": rng.choice(["decode_first", "prefill_first"]),
            "watermark": rng.choice([0.0, 0.1]),
            "batches": rng.choice([1, 1, 2, 3]),
            "full": rng.choice([(), (4, 8, 12, 24)]),
            **limits,
            **fixed,
        }
    )


def _random_family(rng: random.Random, name: int, largest: int = 3):
    """Siblings of one prompt: mostly ones, so that prompts share prefixes."""
    prompt = [rng.randrange(ALPHABET) if rng.random() < 0.1 else 1 for _ in range(rng.randrange(1, 26))]
    options = {
        "max_tokens": rng.choice([1, rng.randrange(1, 20), None]),
        "stop_token_ids": (rng.randrange(ALPHABET),) if rng.random() < 0.3 else (),
        "eos_ids": {2} if rng.random() < 0.2 else (),
        "priority": rng.randrange(3),
        "cache_salt": rng.choice([None, None, "x"]),
    }
    family = []
    for i in range(rng.randint(1, largest)):
        first = family[0] if family else None
        family.append(make_request(f"{i}_{name}", prompt, **options, key=(10 * name + i, 0), index=i, first=first))
    return family


def _fits(scheduler: Scheduler, request) -> bool:
    try:
        scheduler.check(request)
    except ValueError:
        return False
    return True


def _run_world(seed: int, steps: int = 150, limits: bool = False) -> World:
    rng = random.Random(seed)
    scheduler = _random_scheduler(rng)
    world = World(scheduler, depth=rng.choice([0, 1, 1, 2, scheduler.config.batches - 1]))
    for name in range(steps):
        family = _random_family(rng, name) if rng.random() < 0.25 else []
        if family and _fits(world.scheduler, family[0]):
            world.add(*family)
        if world.scheduler.alive and rng.random() < 0.04:
            world.finish(rng.choice(list(world.scheduler.alive.values())))
        if rng.random() < 0.02:
            world.split()
        if limits and rng.random() < 0.05:
            world.set_limits(rng)
        world.step()
    world.drain()
    return world


@pytest.mark.parametrize("seed", range(24))
def test_random_world_holds_together(seed):
    assert _run_world(seed).num_steps >= 150


@pytest.mark.parametrize("seed", range(12))
def test_random_world_holds_together_while_its_limits_change(seed):
    assert _run_world(100 + seed, limits=True).num_steps >= 150


@pytest.mark.slow
def test_random_worlds_hold_together_for_100_000_steps():
    steps, seed = 0, 1000
    while steps < 100_000:
        steps += _run_world(seed, limits=seed % 2 == 0).num_steps
        seed += 1


class Machine(RuleBasedStateMachine):
    """The same world, its events chosen (and made smaller on failure) by hypothesis."""

    @initialize(seed=st.integers(0, 2**32), depth=st.integers(0, 2))
    def start(self, seed, depth):
        self.world = World(_random_scheduler(random.Random(seed), max_model_len=30), depth=9)
        self.depth, self.made = depth, 0

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed):
        self.made += 1
        family = _random_family(random.Random(seed), self.made)
        if _fits(self.world.scheduler, family[0]):
            self.world.add(*family)

    @precondition(lambda self: self.world.scheduler.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.world.finish(data.draw(st.sampled_from(list(self.world.scheduler.alive.values()))))

    @precondition(lambda self: len(self.world.unread) <= self.depth)
    @rule()
    def plan(self):
        self.world.plan()

    @precondition(lambda self: self.world.unread)
    @rule()
    def read(self):
        self.world.read()

    @rule()
    def split(self):
        self.world.split()

    @rule(seed=st.integers(0, 2**32))
    def set_limits(self, seed):
        self.world.set_limits(random.Random(seed))

    @rule()
    def reset(self):
        idle = not self.world.scheduler.running
        results = {s.reset_prefix_cache() for s in self.world.both()}
        assert results == {idle}
        assert not (idle and any(pool.holder for pool in self.world.scheduler.blocks.pools))

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            check_state(self.world.scheduler)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


def _run_machine(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )


def test_any_order_of_events_holds_together():
    _run_machine(40, 40)


@pytest.mark.slow
def test_any_order_of_many_events_holds_together():
    _run_machine(600, 80)


class Twins:
    """A scheduler and the oracle, given the same events."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.s = _random_scheduler(rng, windows=(None,))
        blocks = self.s.blocks
        self.o = Oracle(self.s.config, blocks.num_blocks[0], blocks.block_size, blocks.caching)
        self.depth, self.unread, self.alive = rng.choice([0, 1, 2]), [], {}
        self.ended_ids: set[str] = set()

    def add(self, name: int) -> None:
        (r,) = _random_family(self.rng, name, largest=1)
        r.arrival = name
        if _fits(self.s, r):
            self.s.add(r)
            stops = {*r.eos_ids, *r.params.stop_token_ids}
            self.alive[r.id] = Req(r.id, r.prompt, r.limit, stops, r.priority, name, r.cache_salt)
            self.o.add(self.alive[r.id])

    def abort(self) -> None:
        name = self.rng.choice(list(self.s.alive))
        self.s.finish(self.s.alive[name], "abort")
        self.o.abort(self.alive.pop(name))

    def step(self) -> bool:
        """Both plan, and read a step if enough are unread. Everything must be equal."""
        plan, want = self.s.schedule(), self.o.schedule()
        got = [(c.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks] if plan else []
        assert got == want
        admitted = [(r.id, a.num_computed) for a in (plan.admitted if plan else ()) for r in self._at(a.row)]
        assert admitted == self.o.admitted
        if plan:
            self.unread.append(plan)
        while self.unread and (len(self.unread) > self.depth or not plan):
            plan = self.unread.pop(0)
            self.read(plan)
        self.compare()
        return bool(self.s.alive)

    def _at(self, row: int):
        return [r for r in self.s.running if r.row == row]

    def read(self, plan) -> None:
        tokens = [self.rng.randrange(ALPHABET) for _ in plan.sampled]
        pairs = [(self.alive[c.request_id], t) for c, t in zip(plan.sampled, tokens) if c.request_id in self.alive]
        self.o.update(pairs)
        self.s.update(plan, tokens)
        self.alive = {name: r for name, r in self.alive.items() if name in self.s.alive}

    def compare(self) -> None:
        pool = self.s.blocks.pools[0]
        assert list(pool.free) == self.o.free
        assert [r.id for r in self.s.waiting] == [r.id for r in self.o.waiting]
        assert {r.id: r.blocks[0] for r in self.s.running} == {r.id: r.blocks for r in self.o.running}
        assert list(self.s.running) == [self.s.alive[r.id] for r in self.o.running]
        assert sorted(pool.key_of) == sorted(b for _, b in self.o.cached)
        assert self.s.num_preemptions == self.o.preempted


def _run_twins(seed: int, steps: int = 80) -> int:
    rng = random.Random(seed)
    twins = Twins(rng)
    for name in range(steps):
        if rng.random() < 0.3:
            twins.add(name)
        if twins.s.alive and rng.random() < 0.04:
            twins.abort()
        twins.step()
    while twins.step():
        steps += 1
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_plans_are_those_of_the_oracle(seed):
    assert _run_twins(seed) >= 80


@pytest.mark.slow
def test_plans_are_those_of_the_oracle_for_100_000_steps():
    steps, seed = 0, 1000
    while steps < 100_000:
        steps += _run_twins(seed)
        seed += 1
