"""Steps in flight, and how a request ends: by itself, by abort, by a failed launch."""

from __future__ import annotations

import pytest
from scheduler_world import add, make_request, make_scheduler, planned, step

from octavo.engine.plan import Reason


def test_next_step_is_planned_before_the_token_is_known():
    s = make_scheduler()
    (r,) = add(s, make_request("a", 3))
    plans = [planned(s), planned(s), planned(s)]
    assert [(p.chunks[0].start, p.chunks[0].num_tokens) for p in plans] == [(0, 3), (3, 1), (4, 1)]
    assert (r.in_flight, r.output) == (3, [])
    for token, plan in enumerate(plans):
        assert s.update(plan, [token]) == [r]
    assert (r.in_flight, r.output) == (0, [0, 1, 2])


def test_request_that_will_end_by_length_gives_up_its_seat_before_its_last_token_is_known():
    s = make_scheduler(max_num_seqs=2)
    a, b, c = add(s, make_request("a", 5, 1), make_request("b", [1], 9), make_request("c", [2], 9))
    first, row = planned(s), a.row
    second = planned(s)
    assert [c.request_id for c in second.chunks] == ["b", "c"]
    assert second.reasons == (("a", Reason.ENDS_UNREAD), ("c", Reason.ADMITTED))
    assert (c.row, a.row, s.left, s.num_running) == (row, None, {a}, 3)
    # what it has computed can be hit
    assert s.blocks.lookup(make_request("d", 5)).length == 4
    assert s.update(first, [7, 0]) == [a, b]
    assert (a.output, a.finish_reason, s.left) == ([7], "length", set())


def test_seat_is_kept_while_a_token_before_the_last_is_unread():
    """Two steps ahead: a block that it fills has an unknown token, so nobody could find it."""
    s = make_scheduler(max_num_seqs=1)
    a, _ = add(s, make_request("a", 3, 2), make_request("b", 3))
    plans = [planned(s), planned(s)]
    assert s.schedule() is None and a.row is not None
    s.update(plans[0], [0])
    assert planned(s).reasons == (("a", Reason.ENDS_UNREAD), ("b", Reason.ADMITTED))
    assert s.update(plans[1], [0]) == [a]


def test_request_without_a_seat_may_be_aborted_and_its_id_used_again():
    s = make_scheduler()
    a, _ = add(s, make_request("a", 3, 1), make_request("b", 3))
    plans = [planned(s), planned(s)]
    s.finish(a, "abort")
    (new,) = add(s, make_request("a", [5], 2))
    plans.append(planned(s))
    assert [new in s.update(plan, [4] * len(plan.sampled)) for plan in plans] == [False, False, True]
    assert (a.finish_reason, a.output, new.output, s.left) == ("abort", [], [4], set())


def test_last_token_may_be_a_stop():
    s = make_scheduler()
    (a,) = add(s, make_request("a", 3, 1, eos_ids={4}))
    plan = planned(s)
    assert s.schedule() is None and a in s.left
    s.update(plan, [4])
    assert (a.finish_reason, s.has_work) == ("stop", False)


def test_siblings_fork_from_one_that_has_given_up_its_seat():
    s = make_scheduler(max_num_seqs=1)
    first = make_request("0", range(6), 1)
    _, other = add(s, first, make_request("1", range(6), 1, first=first, index=1))
    planned(s)
    plan = planned(s)
    assert plan.reasons == (("0", Reason.ENDS_UNREAD), ("1", Reason.FORKED))
    assert (other.num_cached, s.blocks.usage() > 0) == (5, True)


def test_lower_limits_preempt_nobody_while_seats_are_given_up():
    s = make_scheduler()
    add(s, make_request("a", 3, 1), make_request("b", 3))
    plan = planned(s)
    s.set_limits(max_num_seqs=1)
    assert (s.num_preemptions, [r.id for r in s.running]) == (0, ["b"])
    s.update(plan, [0, 0])


def test_nothing_to_run_while_all_end_unread():
    s = make_scheduler()
    s.add(make_request("a", 3, 1))
    plan = planned(s)
    assert s.schedule() is None
    assert s.has_work
    s.update(plan, [0])
    assert not s.has_work


def test_token_of_an_aborted_request_is_dropped_even_if_its_id_is_used_again():
    s = make_scheduler()
    (old,) = add(s, make_request("a", 3))
    plans = [planned(s), planned(s)]
    s.finish(old, "abort")
    assert (old.finish_reason, s.blocks.usage()) == ("abort", 0)
    (new,) = add(s, make_request("a", [5], 2))
    plans.append(planned(s))
    assert [s.update(plan, [token]) for plan, token in zip(plans, (1, 2, 3))] == [[], [], [new]]
    assert (old.output, new.output) == ([], [3])


def test_stop_found_late_discards_the_token_behind_it():
    s = make_scheduler()
    (r,) = add(s, make_request("a", 3, eos_ids={4}))
    plans = [planned(s), planned(s)]
    assert s.update(plans[0], [4]) == [r]
    assert s.update(plans[1], [1]) == []
    assert r.output == [4]


def _preempted_with_a_token_in_flight(**fields):
    """The scheduler of G5, its third step planned before the second is read."""
    s = make_scheduler(num_blocks=5)
    a, b = add(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6, **fields))
    step(s)
    second, third = planned(s), planned(s)
    assert (b.row, b.in_flight) == (None, 1)
    return s, a, b, second, third


def test_preempted_request_is_set_aside_until_its_token_is_read():
    s, a, b, second, third = _preempted_with_a_token_in_flight()
    s.finish(a, "abort")
    assert s.schedule() is None
    s.update(second, [3, 3])
    s.update(third, [3])
    plan = planned(s)
    assert plan.admitted[0].tokens == (*[2] * 7, 0, 3)
    assert plan.reasons[-1] == ("b", Reason.RESUMED)
    assert b.in_flight == 1


def test_preempted_request_may_end_while_it_waits():
    s, a, b, second, _ = _preempted_with_a_token_in_flight(stop_token_ids=(3,))
    assert s.update(second, [3, 3]) == [a, b]
    assert (b.finish_reason, b.stop_reason, len(s.waiting)) == ("stop", 3, 0)


def test_abandoned_plans_cannot_be_read():
    s = make_scheduler()
    (r,) = add(s, make_request("a", range(9)))
    plan = planned(s)
    s.abandon()
    assert (r.finish_reason, s.has_work, s.blocks.usage()) == ("error", False, 0)
    assert not s.blocks.pools[0].holder
    with pytest.raises(ValueError, match="plan 0 was abandoned"):
        s.update(plan, [1])
    (new,) = add(s, make_request("a", range(9)))
    assert step(s) == {"a": 9}
    assert new.num_cached == 0


@pytest.mark.parametrize(
    "tokens, fields, reason, stop_reason",
    [
        ([1, 4], {"eos_ids": {4}}, "stop", None),
        ([1, 4], {"stop_token_ids": (4,)}, "stop", 4),
        ([1, 4], {"eos_ids": {4}, "stop_token_ids": (4,)}, "stop", None),
        ([1, 2, 4], {"max_tokens": 3, "stop_token_ids": (4,)}, "stop", 4),
        ([1, 2, 1], {"max_tokens": 3, "stop_token_ids": (4,)}, "length", None),
        ([1, 4, 1], {"max_tokens": 3}, "length", None),
        ([1] * 6, {"max_tokens": None}, "length", None),
        ([1] * 6, {"max_tokens": 99}, "length", None),
    ],
    ids=["eos", "stop-id", "eos-first", "stop-before-length", "length", "ignored-eos", "no-max-tokens", "model-len"],
)
def test_request_ends_in_the_order_of_the_stop_tests(tokens, fields, reason, stop_reason):
    s = make_scheduler(max_model_len=10)
    (r,) = add(s, make_request("a", 4, **fields))
    for i, token in enumerate(tokens):
        assert r.finish_reason is None, i
        step(s, token)
    assert (r.finish_reason, r.stop_reason, r.output) == (reason, stop_reason, tokens)
    assert s.blocks.usage() == 0


def test_plan_reports_ends_since_the_last_one():
    s = make_scheduler()
    a, b, _ = add(s, *(make_request(name, [i], 1 if name == "a" else 9) for i, name in enumerate("abc")))
    step(s)
    s.finish(b, "abort")
    assert planned(s).reasons == (("a", Reason.LENGTH), ("b", Reason.ABORT))
    assert a.finish_reason == "length"


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_frees_everything_at_once(policy, waiting):
    s = make_scheduler(policy=policy, max_num_seqs=1)
    add(s, *(make_request(name, 9, arrival=i) for i, name in enumerate("abc")))
    step(s)
    s.finish(s.alive["b" if waiting else "a"], "abort")
    assert [r.id for r in [*s.running, *s.waiting]] == (["a", "c"] if waiting else ["b", "c"])
    assert (s.blocks.usage() > 0) == waiting
