"""Blocks of layouts that forget: the host's counts against a device that only keeps book of what lies where."""

from __future__ import annotations

import random

import pytest
from scheduler_world import World, add, make_request, planned

from octavo.engine.block_manager import BlockManager, peak_blocks
from octavo.engine.draft import Draft
from octavo.engine.limits import SchedulerConfig
from octavo.engine.plan import Plan
from octavo.engine.scheduler import Scheduler
from octavo.models.keeps import Keeps

H2O, SNAPKV, WHOLE = Keeps(budget=16, section=8), Keeps(budget=12, rolling=False), Keeps(budget=12)
KEEPS = (H2O, SNAPKV, WHOLE)
KINDS = pytest.mark.parametrize("keeps", KEEPS, ids=["h2o", "snapkv", "whole prompt"])


def make(keeps, *, num_blocks=20, windows=(None,), seqs=4, budget=16, max_model_len=96, caching=False, **config):
    blocks = BlockManager(windows, [num_blocks] * len(windows), 4, caching, budget, keeps)
    return Scheduler(SchedulerConfig(seqs, budget, max_model_len, **config), blocks)


class Book:
    """Slots hold (request, position). A cut keeps any of them, in front, and a rolling token takes any place."""

    def __init__(self, scheduler, rng):
        self.keeps, self.size, self.rng = scheduler.blocks.layout_keeps, scheduler.blocks.block_size, rng
        self.slots = {}
        self.tables = {}
        self.held = {}  # what each row must find, slot by slot
        self.prompts, self.done, self.most = {}, {}, 0

    def launch(self, plan: Plan, scheduler: Scheduler) -> list[int]:
        for a in plan.admitted:
            self.tables[a.row], self.held[a.row], self.done[a.row] = {}, [], 0
            self.prompts[a.row] = a.prompt_len
        for w in plan.table_writes:
            self.tables[w.row] |= {w.index + i: b for i, b in enumerate(w.blocks)}
        cut = False
        for c in plan.chunks:
            assert self.done[c.row] == c.start
            cut |= self._compute(c)
        assert cut == plan.cuts
        return [self.rng.randrange(5) for _ in plan.sampled]

    def _compute(self, c) -> bool:
        """Reads what is held, writes the chunk's tokens, cuts; whether anything was dropped."""
        held, k, prompt, end = self.held[c.row], self.keeps, self.prompts[c.row], c.start + c.num_tokens
        assert len(held) == k.left(c.start, prompt)
        for slot, what in enumerate(held):
            assert self._at(c.row, slot) == what, f"{c.request_id}: slot {slot} is another's"
        for position in range(c.start, end):
            mine = (c.request_id, position, self.rng.random())
            if position >= prompt and k.rolling and len(held) == k.budget:
                slot = self.rng.randrange(len(held))
                held[slot] = mine
            else:
                slot = len(held)
                held.append(mine)
            self._put(c.row, slot, mine)
        self.done[c.row] = end
        self.most = max(self.most, len(held))
        assert len(held) == k.slots(end, prompt)
        section = k.section and end < prompt and end % k.section == 0
        target = k.budget - k.section if section else k.budget if end == prompt else len(held)
        if len(held) <= target:
            return False
        self.held[c.row] = held = [held[i] for i in sorted(self.rng.sample(range(len(held)), target))]
        for slot, what in enumerate(held):
            self._put(c.row, slot, what)
        assert len(held) == k.left(end, prompt)
        return True

    def _at(self, row, slot):
        return self.slots.get((self.tables[row].get(slot // self.size, 0), slot % self.size))

    def _put(self, row, slot, what) -> None:
        block = self.tables[row].get(slot // self.size, 0)
        assert block, "written to the null block"
        self.slots[block, slot % self.size] = what


def check(s: Scheduler) -> None:
    for group, pool in enumerate(s.blocks.pools):
        used = [b for r in s.running for b in r.blocks[group] if b]
        assert len(set(used)) == len(used) == pool.num_blocks - 1 - len(pool.free)
        for r in s.running:
            front = [bool(b) for b in r.blocks[group]]
            assert s.blocks.keeps[group].budget is None or front == sorted(front, reverse=True)
            assert sum(front) <= s.blocks.peak(group, len(r.tokens) + r.in_flight, len(r.prompt))


@KINDS
@pytest.mark.parametrize("order", ["decode_first", "prefill_first"])
@pytest.mark.parametrize("seed", range(6))
def test_nobody_reads_what_is_not_its_own(keeps, order, seed):
    """Random lengths, n, preemptions, tiny pools, steps planned ahead; the pool ends empty."""
    rng = random.Random(seed)
    num_blocks = rng.choice([9, 40] if keeps.section else [11, 40])
    s = make(keeps, num_blocks=num_blocks, order=order, max_model_len=52)
    book, unread, depth, count = Book(s, rng), [], rng.choice([0, 1]), 0
    while count < 40 or s.has_work or unread:
        if count < 40 and rng.random() < 0.4:
            prompt, first = rng.choices(range(5), k=rng.randint(1, 30)), None
            for i in range(rng.choice([1, 1, 2])):
                r = make_request(f"{count}-{i}", prompt, rng.randint(1, 22), first=first, index=i)
                first = first or r
                add(s, r)
            count += 1
        # somebody has to go now and then, whether or not the pool is full
        s.set_limits(max_num_seqs=rng.choice([1, 4, 4, 4, 4, 4, 4, 4]))
        plan = s.schedule()
        check(s)
        if plan is not None:
            unread.append((plan, book.launch(plan, s)))
        if unread and (len(unread) > depth or plan is None):
            s.update(*unread.pop(0))
    assert all(len(p.free) == p.num_blocks - 1 for p in s.blocks.pools)
    assert s.num_preemptions > 0
    if keeps.section:
        assert book.most <= keeps.budget


def test_blocks_in_the_middle_of_a_running_sequence_are_freed():
    s = make(SNAPKV)
    (r,) = add(s, make_request("a", range(40), 20))
    while r.computed < 40:
        s.update(plan := planned(s), [0] * len(plan.sampled))
    assert sum(map(bool, r.blocks[0])) == 10 and plan.cuts
    s.update(plan := planned(s), [0])
    assert [bool(b) for b in r.blocks[0]] == [True] * 4 + [False] * 7
    assert [(w.index, w.blocks) for w in plan.table_writes] == [(4, (0,) * 6)]
    assert len(s.blocks.pools[0].free) == 19 - 4


def test_a_long_output_stays_within_its_budget():
    s = make(H2O, num_blocks=5, max_model_len=200)
    (r,) = add(s, make_request("a", range(30), 160))
    while s.has_work:
        plan = planned(s)
        assert sum(map(bool, r.blocks[0])) <= 4
        s.update(plan, [0] * len(plan.sampled))
    assert len(r.output) == 160
    with pytest.raises(ValueError, match="may need 8 blocks of 4 tokens, and there are 4"):
        make(WHOLE, num_blocks=5).check(make_request("a", range(30), 60))


@KINDS
def test_chunks_end_at_cuts_and_an_output_is_computed_again_one_by_one(keeps):
    s = make(keeps, budget=64)
    (r,) = add(s, make_request("a", range(22), 30))
    sizes = []
    while len(r.output) < 5:
        plan = planned(s)
        sizes.append(plan.chunks[0].num_tokens)
        s.update(plan, [0] * len(plan.sampled))
    s._preempt(r, Draft(0))
    again = []
    while len(r.output) < 6:
        plan = planned(s)
        again.append(plan.chunks[0].num_tokens)
        s.update(plan, [0] * len(plan.sampled))
    prompt = [8, 8, 6] if keeps.section else [22]
    assert sizes == [*prompt, 1, 1, 1, 1]
    assert again == [*prompt, *([1] * 5 if keeps.rolling else [5])]


def test_siblings_under_a_budget_compute_their_prompts():
    s = make(SNAPKV, num_blocks=40)
    first = make_request("a", range(20), 4)
    second = make_request("b", range(20), 4, first=first, index=1)
    add(s, first, second)
    computed = 0
    while s.has_work:
        plan = planned(s)
        computed += sum(c.num_tokens for c in plan.chunks)
        assert not plan.transfers
        s.update(plan, [0] * len(plan.sampled))
    assert computed == 2 * (20 + 3)


def test_a_prefix_cannot_be_cached_under_a_budget():
    with pytest.raises(ValueError, match="does not follow from its prefix"):
        make(H2O, caching=True)
    make(H2O, caching=True, windows=(8,))


def test_a_window_with_sinks_is_hit_and_forked():
    """The world of the scheduler's tests checks what each query sees of its window; here also the sinks."""
    for seed in range(8):
        rng = random.Random(seed)
        s = make(Keeps(window=9, sinks=5), num_blocks=24, windows=(None, 6), caching=True, max_model_len=48)
        world = World(s, depth=rng.choice([0, 1]))
        for i in range(30):
            prompt = [1] * rng.randint(0, 30) + rng.choices(range(2), k=rng.randint(1, 5))
            first = make_request(f"{i}-0", prompt, rng.randint(1, 12), key=(seed, i))
            world.add(first)
            if rng.random() < 0.3:
                world.add(make_request(f"{i}-1", prompt, rng.randint(1, 12), key=(seed, 100 + i), first=first, index=1))
            for _ in range(rng.randint(0, 3)):
                world.step()
        world.drain()
        assert s.num_hit_tokens > 0


def test_a_window_frees_what_lies_between_sinks_and_window():
    s = make(Keeps(window=8, sinks=6), caching=True)
    (r,) = add(s, make_request("a", range(40), 20))
    while s.has_work and len(r.output) < 10:
        s.update(plan := planned(s), [0] * len(plan.sampled))
    held = [bool(b) for b in r.blocks[0]]
    assert held[:2] == [True, True] and not any(held[2:9]) and all(held[-2:])
    (again,) = add(s, make_request("b", [*range(40), 1], 2))
    planned(s)
    assert again.num_cached == 40 and again.blocks[0][:2] == r.blocks[0][:2] and again.blocks[0][2] == 0


@pytest.mark.parametrize("keeps", [*KEEPS, Keeps(), Keeps(budget=15, section=3), Keeps(budget=2, section=1)])
def test_the_most_is_the_greatest_of_all_times(keeps):
    for prompt in range(1, 40):
        for tokens in range(1, 60):
            most = max(keeps.slots(n, prompt) for n in range(1, tokens + 1))
            assert keeps.most(tokens, prompt) == most
            assert peak_blocks(keeps, tokens, prompt, 4, 8) == -(-most // 4)
            assert most <= keeps.most(tokens, tokens)
        assert all(keeps.left(n, prompt) <= keeps.slots(n, prompt) for n in range(1, 60))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window 0 must be"),
        ({"sinks": 3}, "sinks 3 must be"),
        ({"section": 4}, "section 4 must divide the budget"),
        ({"window": 8, "section": 4}, "section 4 must divide the budget"),
        ({"budget": 0}, "budget 0 must be"),
        ({"budget": 8, "window": 4}, "budget 8 must be"),
        ({"budget": 8, "section": 3}, "section 3 must divide"),
        ({"budget": 8, "section": 8}, "section 8 must divide"),
    ],
)
def test_what_cannot_be_kept_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Keeps(**values)


def test_a_dump_without_what_the_layout_keeps_is_no_dump():
    value = make(Keeps(budget=16, section=8)).blocks.dump()
    assert BlockManager.load(value).dump() == value
    del value["keeps"]
    with pytest.raises(KeyError, match="keeps"):
        BlockManager.load(value)


@pytest.mark.parametrize("keeps", [*KEEPS, Keeps(), Keeps(forks=False), Keeps(window=8)])
def test_only_who_lets_blocks_go_is_asked_to_each_step(keeps):
    assert make(keeps).blocks.forgets == (keeps.budget is not None or keeps.window is not None)
    assert make(keeps, windows=(6,)).blocks.forgets
