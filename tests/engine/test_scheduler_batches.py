"""Several batches in flight: shares of the requests, none of them in two, and nobody passed over."""

from __future__ import annotations

from itertools import pairwise

import pytest
from scheduler_world import add, make_request, make_scheduler, planned

from octavo.engine.plan import Plan, Reason
from octavo.engine.scheduler import Scheduler


def ids(plan: Plan) -> str:
    return "".join(c.request_id for c in plan.chunks)


def decoding(num: int, batches: int, **more) -> Scheduler:
    """Requests a, b, c ... behind their prompts, everything read."""
    s = make_scheduler(batches=batches, max_num_seqs=8, num_blocks=60, **more)
    add(s, *(make_request(name, 3, max_tokens=20) for name in "abcdefgh"[:num]))
    plans = []
    while any(r.computed < 3 for r in s.alive.values()):
        plans.append(planned(s))
    for plan in plans:
        s.update(plan, [0] * len(plan.sampled))
    return s


@pytest.mark.parametrize(
    ("num", "batches", "want"),
    [(4, 2, ["ab", "cd"]), (5, 2, ["abc", "de"]), (8, 4, ["ab", "cd", "ef", "gh"]), (3, 4, ["a", "b", "c"])],
)
def test_all_are_shared_out_over_the_batches(num, batches, want):
    s = decoding(num, batches)
    plans = [planned(s) for _ in want]
    assert [ids(p) for p in plans] == want
    # all have a token unread
    assert s.schedule() is None
    s.update(plans[0], [0] * len(want[0]))
    again = planned(s)
    assert ids(again) == want[0]
    assert {r for r, why in again.reasons if why == Reason.IN_FLIGHT} == {*"".join(want[1:])}


def test_newcomers_fill_a_batch_to_its_share_of_all():
    s = make_scheduler(batches=2, max_num_seqs=8, num_blocks=60)
    add(s, *(make_request(name, 3) for name in "abcdef"))
    first, second = planned(s), planned(s)
    assert (ids(first), ids(second)) == ("abc", "def")
    assert first.reasons[-1] == ("d", Reason.NEXT_BATCH)


def test_those_that_find_no_room_leave_others_their_batches():
    """Three run and nobody else can: two batches all the same."""
    s = make_scheduler(batches=2, max_num_seqs=8, num_blocks=7, block_size=4, caching=False)
    add(s, *(make_request(name, 5, max_tokens=3) for name in "abcde"))
    first = planned(s)
    assert ids(first) == "abc"
    s.update(first, [0] * 3)
    assert [ids(planned(s)), ids(planned(s))] == ["ab", "c"]


def test_a_prompt_goes_on_in_the_next_batch():
    s = make_scheduler(batches=2, max_num_seqs=4, budget=8, num_blocks=30)
    add(s, make_request("a", 20))
    plans = [planned(s) for _ in range(3)]
    assert [[c.num_tokens for c in p.chunks] for p in plans] == [[8], [8], [4]]
    assert s.schedule() is None


def test_who_has_waited_longest_goes_first():
    """Read at once, so that nobody is in flight: the first ones must not take every batch."""
    s, turns = decoding(3, 2), []
    for _ in range(6):
        turns.append({*ids(plan := planned(s))})
        s.update(plan, [0] * len(plan.sampled))
    assert {len(turn) for turn in turns} == {2}
    assert all(a | b == {*"abc"} for a, b in pairwise(turns))


def test_a_plan_says_which_tokens_were_sampled_elsewhere():
    s = decoding(2, 2)
    plan = planned(s)
    (r,) = (r for r in s.running if r.id == "a")
    assert plan.tokens == ((r.row, 3, 0),)
    s.update(plan, [4])
    planned(s)
    assert planned(s).tokens == ((r.row, 4, 4),)


def test_one_batch_says_nothing_of_tokens():
    s = decoding(2, 1)
    assert planned(s).tokens == ()


def test_batches_are_at_least_one():
    with pytest.raises(ValueError, match="batches 0 must be at least 1"):
        make_scheduler(batches=0)
