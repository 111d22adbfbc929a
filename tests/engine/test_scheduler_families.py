"""n > 1: siblings wait for the first, fork from whoever runs, and survive its end."""

from __future__ import annotations

import json

import pytest
from scheduler_world import World, add, make_request, make_scheduler, planned, step

from octavo.engine.draft import Draft
from octavo.engine.plan import Reason, Transfer
from octavo.engine.scheduler import Scheduler


def _family(n: int, prompt, max_tokens: int = 6, **fields):
    first = make_request("0", prompt, max_tokens, **fields)
    return [first] + [make_request(str(i), prompt, max_tokens, first=first, index=i, **fields) for i in range(1, n)]


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_then_share_the_prompt_and_compute_one_token(caching):
    s = make_scheduler(budget=8, caching=caching)
    first, *others = add(s, *_family(3, range(10)))
    plan = planned(s)
    assert plan.reasons == (("0", Reason.ADMITTED), ("1", Reason.NO_BUDGET))
    s.update(plan, [])
    plan = planned(s)
    # the last chunk of the prompt is computed in this very step: a transfer would come too early
    assert [(c.request_id, c.num_tokens) for c in plan.chunks] == [("0", 2)]
    assert plan.reasons == (("1", Reason.SIBLING), ("2", Reason.SIBLING))
    s.update(plan, [0])
    plan = planned(s)
    assert [(c.request_id, c.start, c.num_tokens) for c in plan.chunks] == [("0", 10, 1), ("1", 9, 1), ("2", 9, 1)]
    assert plan.transfers == tuple(Transfer(0, first.blocks[0][2], r.blocks[0][2]) for r in others)
    assert all(r.blocks[0][:2] == first.blocks[0][:2] for r in others)
    assert len({r.blocks[0][2] for r in [first, *others]}) == 3
    assert plan.reasons == (("1", Reason.FORKED), ("2", Reason.FORKED))
    assert s.num_prompt_tokens == 12


def test_nothing_is_copied_where_the_last_prompt_token_begins_a_block():
    s = make_scheduler()
    first, other = add(s, *_family(2, range(9)))
    step(s)
    plan = planned(s)
    assert plan.transfers == ()
    assert other.blocks[0][:2] == first.blocks[0][:2]
    assert other.num_cached == 8


@pytest.mark.parametrize("caching", [True, False])
def test_sibling_forks_from_another_when_the_first_has_ended(caching):
    s = make_scheduler(max_num_seqs=2, caching=caching)
    _, second, third = add(s, *_family(3, range(10)))
    step(s)
    step(s)
    s.finish(s.alive["0"], "abort")
    plan = planned(s)
    assert plan.transfers == (Transfer(0, second.blocks[0][2], third.blocks[0][2]),)
    assert third.num_cached == 9


def test_siblings_compute_themselves_when_the_first_ends_before_its_prompt():
    s = make_scheduler(budget=8, caching=False)
    first, other = add(s, *_family(2, range(10)))
    step(s)
    s.finish(first, "abort")
    assert step(s) == {"1": 8}
    assert step(s) == {"1": 2}
    assert len(other.output) == 1


def test_others_pass_siblings_that_are_set_aside():
    s = make_scheduler(budget=8, max_num_seqs=3, long_prefill_token_threshold=4)
    add(s, *_family(2, range(10)), make_request("other", [9, 9]))
    assert step(s) == {"0": 4, "other": 2}
    assert [r.id for r in s.waiting] == ["1"]


def test_loaded_scheduler_goes_on_from_any_state():
    world = World(make_scheduler(num_blocks=(8, 8), windows=(None, 6), budget=8, max_num_seqs=3), depth=1)
    world.add(*_family(3, [1] * 9, 12, key=(3, 0)))
    for i in range(4):
        world.add(
            make_request(f"x{i}", [1] * (5 + i), 15, stop_token_ids=(4,), key=(i, 0), cache_salt="s" * (i % 2) or None)
        )
    while world.scheduler.has_work:
        world.split()
        world.step()
    world.drain()
    assert world.scheduler.num_preemptions


def test_dump_keeps_a_family_whose_first_has_ended():
    s = make_scheduler(max_num_seqs=2)
    add(s, *_family(3, range(10)))
    step(s)
    step(s)
    s.finish(s.alive["0"], "abort")
    copy = Scheduler.load(json.loads(json.dumps(s.dump())))
    assert set(copy.alive) == {"1", "2"}
    assert planned(copy) == planned(s)
    assert copy.alive["1"].num_cached == 9


def test_nobody_forks_from_a_sibling_that_starts_in_the_same_step():
    """What that one finds in the cache may be computed in this very step, behind the copy."""
    s = make_scheduler(max_num_seqs=3, budget=50)
    s.set_limits(max_num_seqs=2)
    add(s, *_family(3, range(6), 20))
    for _ in range(4):
        step(s)
    # both that run have filled the block in which the prompt ends
    for name in "10":
        s._preempt(s.alive[name], Draft(0))
    assert s.reset_prefix_cache()
    s.set_limits(max_num_seqs=3)
    plan = planned(s)
    assert [(c.request_id, c.start) for c in plan.chunks] == [("0", 0), ("1", 8), ("2", 4)]
    assert plan.transfers == ()
