"""What a step holds, who waits and why, who is preempted, how a request ends: worked by hand."""

from __future__ import annotations

import json
import logging

import pytest
from scheduler_world import World, make_request, make_scheduler

from octavo.engine.plan import Reason, Transfer
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler, SchedulerConfig


def _plan(s: Scheduler):
    plan = s.schedule()
    assert plan is not None
    return plan


def _step(s: Scheduler, token: int = 0):
    """One synchronous step, every sampled token the same; {request id: tokens scheduled}."""
    plan = _plan(s)
    s.update(plan, [token] * len(plan.sampled))
    return {c.request_id: c.num_tokens for c in plan.chunks}


def _run(s: Scheduler, *requests) -> None:
    for r in requests:
        s.add(r)
    while s.has_work:
        _step(s)


def _add(s: Scheduler, *requests):
    for r in requests:
        s.add(r)
    return requests


# golden scenarios of semantics 2.9


@pytest.mark.parametrize("length, cached", [(32, 16), (33, 32)], ids=["G1-32", "G2-33"])
def test_second_equal_prompt_hits_all_but_what_must_be_computed(length, cached):
    s = make_scheduler(block_size=16, budget=64, max_model_len=64)
    first, second = (make_request(name, range(length), 2) for name in "ab")
    _run(s, first)
    _run(s, second)
    assert (first.num_cached, second.num_cached) == (0, cached)
    assert s.num_prompt_tokens == length + length - cached


def test_g3_long_prompt_gets_what_the_decodes_leave():
    s = make_scheduler(budget=8, caching=False)
    _add(s, *(make_request(str(i), 1, 20) for i in range(3)))
    _step(s)
    (new,) = _add(s, make_request("new", 20, 20))
    for step in range(4):
        assert new.output == []
        assert _step(s) == {"0": 1, "1": 1, "2": 1, "new": 5}, step
    assert len(new.output) == 1


@pytest.mark.parametrize("budget, together", [(24, True), (22, False)])
def test_g4_without_chunking_a_prompt_runs_whole_or_waits(budget, together):
    s = make_scheduler(budget=budget, max_model_len=22, caching=False, enable_chunked_prefill=False)
    _add(s, *(make_request(str(i), 1, 9) for i in range(3)))
    _step(s)
    s.add(make_request("new", 20, 2))
    plan = _plan(s)
    chunks = {c.request_id: c.num_tokens for c in plan.chunks}
    assert chunks == {"0": 1, "1": 1, "2": 1} | ({"new": 20} if together else {})
    assert plan.reasons == (("new", Reason.ADMITTED if together else Reason.NO_BUDGET),)


def test_g5_last_of_running_is_preempted_and_keeps_what_it_made():
    s = make_scheduler(num_blocks=5)
    a, b = _add(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6))
    assert _step(s) == {"a": 7, "b": 7}
    assert (a.blocks, b.blocks) == ([[1, 2]], [[3, 4]])
    assert _step(s) == {"a": 1, "b": 1}
    plan = _plan(s)
    assert [c.request_id for c in plan.chunks] == ["a"]
    # the tail of b went first, so a got b's second block
    assert a.blocks == [[1, 2, 4]]
    assert list(s.blocks.pools[0].free) == [3]
    assert plan.reasons == (("b", Reason.PREEMPTED), ("b", Reason.AFTER_PREEMPTION))
    assert list(s.waiting) == [b]
    assert (b.output, b.computed, b.preemptions, s.num_preemptions) == ([0, 0], 0, 1, 1)
    s.update(plan, [0])
    s.add(make_request("c", [3], 1))
    while a.finish_reason is None:
        plan = _plan(s)
        # 3 blocks are needed, of which one can be hit: c would fit, but does not overtake
        assert plan.reasons == (("b", Reason.NO_ROOM),)
        s.update(plan, [0])
    plan = _plan(s)
    assert ("b", Reason.RESUMED) in plan.reasons
    assert plan.admitted[0].tokens == (*[2] * 7, 0, 0)
    # its first block was still there
    assert plan.admitted[0].num_computed == 4
    assert b.num_cached == 0


def test_g7_request_hits_blocks_that_its_neighbour_fills_in_the_same_step():
    s = make_scheduler()
    a, b = _add(s, make_request("a", range(9)), make_request("b", range(9)))
    assert _step(s) == {"a": 9, "b": 1}
    assert b.num_cached == 8
    assert a.blocks[0][:2] == b.blocks[0][:2]
    assert a.blocks[0][2] != b.blocks[0][2]


def test_g8_salts_part_the_cache():
    s = make_scheduler(num_blocks=40)
    cached = []
    for i, salt in enumerate(["x", "y", None, "x", None, "z"]):
        r = make_request(str(i), range(9), 1, cache_salt=salt)
        _run(s, r)
        cached.append(r.num_cached)
    assert cached == [0, 0, 0, 8, 8, 0]


def test_g9_nobody_is_looked_at_while_all_seats_are_taken():
    s = make_scheduler(max_num_seqs=2)
    _add(s, *(make_request(name, range(9)) for name in "abc"))
    _step(s)
    plan = _plan(s)
    assert plan.reasons == (("c", Reason.NO_SEAT),)
    assert s.alive["c"].hashes == []


# limits of a step


@pytest.mark.parametrize("rival, first", [(False, 12), (True, 3)], ids=["alone", "with-another"])
def test_long_prefill_is_capped_while_others_want_tokens(rival, first):
    s = make_scheduler(long_prefill_token_threshold=3)
    s.add(make_request("long", 12))
    if rival:
        s.add(make_request("short", 2))
    assert _step(s) == {"long": first} | ({"short": 2} if rival else {})


def test_decodes_go_before_prefills_or_after():
    plans = {}
    for order in ("decode_first", "prefill_first"):
        s = make_scheduler(budget=6, order=order, caching=False)
        s.add(make_request("old", 1))
        _step(s)
        s.add(make_request("new", 17))
        plans[order] = [_step(s) for _ in range(3)]
    assert plans["decode_first"] == [{"old": 1, "new": 5}] * 3
    assert plans["prefill_first"] == [{"new": 6}, {"new": 6}, {"new": 5, "old": 1}]


def test_prompt_is_not_admitted_before_all_of_it_fits():
    s = make_scheduler(num_blocks=7, budget=8)
    _add(s, make_request("a", 8, 2))
    _step(s)
    _add(s, make_request("b", [1] * 17, 1))
    # its first chunk would fit in the four blocks that are left, all of it needs five
    assert ("b", Reason.NO_ROOM) in _plan(s).reasons


@pytest.mark.parametrize("watermark, starts", [(0.0, True), (0.2, False)])
def test_admission_leaves_the_watermark_while_others_run(watermark, starts):
    s = make_scheduler(num_blocks=10, watermark=watermark)
    # alone, it may take what the watermark would keep
    _add(s, make_request("a", 16, 2))
    _step(s)
    _add(s, make_request("b", [1] * 16, 2))
    assert ("b" in _step(s)) == starts


def test_waiting_request_does_not_overtake_a_larger_one_before_it():
    s = make_scheduler(num_blocks=6)
    _add(s, make_request("a", 12, 3), make_request("big", [1] * 12, 1), make_request("small", [2], 1))
    assert _step(s) == {"a": 12}
    assert _step(s) == {"a": 1}


def test_priority_goes_before_arrival():
    s = make_scheduler(policy="priority", max_num_seqs=1)
    for i, (name, priority) in enumerate([("late", 5), ("b", 1), ("a", 0), ("c", 1)]):
        s.add(make_request(name, 1, 1, priority=priority, arrival=i))
    order = []
    while s.has_work:
        order += _step(s)
    assert order == ["a", "b", "c", "late"]


def test_priority_preempts_the_worst_even_if_it_is_planned_already():
    s = make_scheduler(policy="priority", num_blocks=5)
    worst, best = _add(
        s, make_request("worst", [1] * 7, 6, priority=9), make_request("best", [2] * 8, 6, priority=1, arrival=1)
    )
    _step(s)
    # the worst is planned first, and has room for one more; the best then needs a third block
    plan = _plan(s)
    assert [c.request_id for c in plan.chunks] == ["best"]
    assert list(s.waiting) == [worst]
    assert worst.in_flight == 0
    assert {w.row for w in plan.table_writes} == {best.row}


def test_budget_of_an_unplanned_victim_goes_to_those_behind():
    s = make_scheduler(policy="priority", num_blocks=40, budget=8, caching=False)
    _add(s, make_request("worst", 12, priority=9))
    _step(s)
    _add(s, make_request("best", 3, priority=0, arrival=1))
    assert _step(s) == {"worst": 4, "best": 3}
    _add(s, make_request("long", 20, priority=1, arrival=2))
    assert _step(s) == {"worst": 1, "best": 1, "long": 6}
    pool = s.blocks.pools[0]
    while pool.free:
        pool.take()
    # the worst has room and is planned; the best needs a second block
    assert _step(s) == {"best": 1, "long": 7}


def test_under_priority_the_pass_goes_on_after_a_request_preempts_itself():
    s = make_scheduler(policy="priority", num_blocks=5, caching=False)
    _add(s, make_request("worst", [1] * 8, 8, priority=9))
    _step(s)
    _step(s)
    _add(s, make_request("best", [2], 8, priority=1, arrival=1))
    for _ in range(3):
        assert _step(s) == {"worst": 1, "best": 1}
    plan = _plan(s)
    assert [c.request_id for c in plan.chunks] == ["best"]
    assert plan.reasons == (("worst", Reason.PREEMPTED), ("worst", Reason.AFTER_PREEMPTION))


# families


def _family(n: int, prompt, max_tokens: int = 6, **fields):
    first = make_request("0", prompt, max_tokens, **fields)
    return [first] + [make_request(str(i), prompt, max_tokens, first=first, index=i, **fields) for i in range(1, n)]


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_then_share_the_prompt_and_compute_one_token(caching):
    s = make_scheduler(budget=8, caching=caching)
    first, *others = _add(s, *_family(3, range(10)))
    plan = _plan(s)
    assert plan.reasons == (("0", Reason.ADMITTED), ("1", Reason.NO_BUDGET))
    s.update(plan, [])
    plan = _plan(s)
    # the last chunk of the prompt is computed in this very step: a transfer would come too early
    assert [(c.request_id, c.num_tokens) for c in plan.chunks] == [("0", 2)]
    assert plan.reasons == (("1", Reason.SIBLING), ("2", Reason.SIBLING))
    s.update(plan, [0])
    plan = _plan(s)
    assert [(c.request_id, c.start, c.num_tokens) for c in plan.chunks] == [("0", 10, 1), ("1", 9, 1), ("2", 9, 1)]
    assert plan.transfers == tuple(Transfer(0, first.blocks[0][2], r.blocks[0][2]) for r in others)
    assert all(r.blocks[0][:2] == first.blocks[0][:2] for r in others)
    assert len({r.blocks[0][2] for r in [first, *others]}) == 3
    assert plan.reasons == (("1", Reason.FORKED), ("2", Reason.FORKED))
    assert s.num_prompt_tokens == 12


def test_nothing_is_copied_where_the_last_prompt_token_begins_a_block():
    s = make_scheduler()
    first, other = _add(s, *_family(2, range(9)))
    _step(s)
    plan = _plan(s)
    assert plan.transfers == ()
    assert other.blocks[0][:2] == first.blocks[0][:2]
    assert other.num_cached == 8


@pytest.mark.parametrize("caching", [True, False])
def test_sibling_forks_from_another_when_the_first_has_ended(caching):
    s = make_scheduler(max_num_seqs=2, caching=caching)
    _, second, third = _add(s, *_family(3, range(10)))
    _step(s)
    _step(s)
    s.finish(s.alive["0"], "abort")
    plan = _plan(s)
    assert plan.transfers == (Transfer(0, second.blocks[0][2], third.blocks[0][2]),)
    assert third.num_cached == 9


def test_siblings_compute_themselves_when_the_first_ends_before_its_prompt():
    s = make_scheduler(budget=8, caching=False)
    first, other = _add(s, *_family(2, range(10)))
    _step(s)
    s.finish(first, "abort")
    assert _step(s) == {"1": 8}
    assert _step(s) == {"1": 2}
    assert len(other.output) == 1


def test_others_pass_siblings_that_are_set_aside():
    s = make_scheduler(budget=8, max_num_seqs=3, long_prefill_token_threshold=4)
    _add(s, *_family(2, range(10)), make_request("other", [9, 9]))
    assert _step(s) == {"0": 4, "other": 2}
    assert [r.id for r in s.waiting] == ["1"]


# steps in flight


def test_next_step_is_planned_before_the_token_is_known():
    s = make_scheduler()
    (r,) = _add(s, make_request("a", 3))
    plans = [_plan(s), _plan(s), _plan(s)]
    assert [(p.chunks[0].start, p.chunks[0].num_tokens) for p in plans] == [(0, 3), (3, 1), (4, 1)]
    assert (r.in_flight, r.output) == (3, [])
    for token, plan in enumerate(plans):
        assert s.update(plan, [token]) == [r]
    assert (r.in_flight, r.output) == (0, [0, 1, 2])


def test_request_that_will_end_by_length_is_not_run_beyond():
    s = make_scheduler()
    _add(s, make_request("a", 3, 1), make_request("b", 3, 9))
    first = _plan(s)
    second = _plan(s)
    assert [c.request_id for c in second.chunks] == ["b"]
    assert second.reasons == (("a", Reason.ENDS_UNREAD),)
    s.update(first, [0, 0])
    assert "a" not in s.alive


def test_nothing_to_run_while_all_end_unread():
    s = make_scheduler()
    s.add(make_request("a", 3, 1))
    plan = _plan(s)
    assert s.schedule() is None
    assert s.has_work
    s.update(plan, [0])
    assert not s.has_work


def test_token_of_an_aborted_request_is_dropped_even_if_its_id_is_used_again():
    s = make_scheduler()
    (old,) = _add(s, make_request("a", 3))
    plans = [_plan(s), _plan(s)]
    s.finish(old, "abort")
    assert (old.finish_reason, s.blocks.usage()) == ("abort", 0)
    (new,) = _add(s, make_request("a", [5], 2))
    plans.append(_plan(s))
    assert [s.update(plan, [token]) for plan, token in zip(plans, (1, 2, 3))] == [[], [], [new]]
    assert (old.output, new.output) == ([], [3])


def test_stop_found_late_discards_the_token_behind_it():
    s = make_scheduler()
    (r,) = _add(s, make_request("a", 3, eos_ids={4}))
    plans = [_plan(s), _plan(s)]
    assert s.update(plans[0], [4]) == [r]
    assert s.update(plans[1], [1]) == []
    assert r.output == [4]


def _preempted_with_a_token_in_flight(**fields):
    """The scheduler of G5, its third step planned before the second is read."""
    s = make_scheduler(num_blocks=5)
    a, b = _add(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6, **fields))
    _step(s)
    second, third = _plan(s), _plan(s)
    assert (b.row, b.in_flight) == (None, 1)
    return s, a, b, second, third


def test_preempted_request_is_set_aside_until_its_token_is_read():
    s, a, b, second, third = _preempted_with_a_token_in_flight()
    s.finish(a, "abort")
    assert s.schedule() is None
    s.update(second, [3, 3])
    s.update(third, [3])
    plan = _plan(s)
    assert plan.admitted[0].tokens == (*[2] * 7, 0, 3)
    assert plan.reasons[-1] == ("b", Reason.RESUMED)
    assert b.in_flight == 1


def test_preempted_request_may_end_while_it_waits():
    s, a, b, second, _ = _preempted_with_a_token_in_flight(stop_token_ids=(3,))
    assert s.update(second, [3, 3]) == [a, b]
    assert (b.finish_reason, b.stop_reason, len(s.waiting)) == ("stop", 3, 0)


def test_abandoned_plans_cannot_be_read():
    s = make_scheduler()
    (r,) = _add(s, make_request("a", range(9)))
    plan = _plan(s)
    s.abandon()
    assert (r.finish_reason, s.has_work, s.blocks.usage()) == ("error", False, 0)
    assert not s.blocks.pools[0].holder
    with pytest.raises(ValueError, match="plan 0 was abandoned"):
        s.update(plan, [1])
    (new,) = _add(s, make_request("a", range(9)))
    assert _step(s) == {"a": 9}
    assert new.num_cached == 0


# ends


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
    (r,) = _add(s, make_request("a", 4, **fields))
    for i, token in enumerate(tokens):
        assert r.finish_reason is None, i
        _step(s, token)
    assert (r.finish_reason, r.stop_reason, r.output) == (reason, stop_reason, tokens)
    assert s.blocks.usage() == 0


def test_plan_reports_ends_since_the_last_one():
    s = make_scheduler()
    a, b, _ = _add(s, *(make_request(name, [i], 1 if name == "a" else 9) for i, name in enumerate("abc")))
    _step(s)
    s.finish(b, "abort")
    assert _plan(s).reasons == (("a", Reason.LENGTH), ("b", Reason.ABORT))
    assert a.finish_reason == "length"


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_frees_everything_at_once(policy, waiting):
    s = make_scheduler(policy=policy, max_num_seqs=1)
    _add(s, *(make_request(name, 9, arrival=i) for i, name in enumerate("abc")))
    _step(s)
    s.finish(s.alive["b" if waiting else "a"], "abort")
    assert [r.id for r in [*s.running, *s.waiting]] == (["a", "c"] if waiting else ["b", "c"])
    assert (s.blocks.usage() > 0) == waiting


# what is refused


@pytest.mark.parametrize(
    "prompt, max_tokens, message",
    [
        (0, 4, "empty prompt"),
        (48, 1, "prompt of 48 tokens.* max_model_len 48"),
        (60, 1, "prompt of 60 tokens.* max_model_len 48"),
        (20, 22, "prompt of 20 tokens and max_tokens 22 may need 11 blocks of 4 tokens, and there are 10"),
        (20, None, "max_tokens None may need 12 blocks"),
    ],
)
def test_request_that_can_never_be_served_is_refused(prompt, max_tokens, message):
    s = make_scheduler(num_blocks=11)
    with pytest.raises(ValueError, match=message):
        s.add(make_request("a", prompt, max_tokens))
    assert not s.has_work


def test_request_that_just_fits_runs_to_its_end():
    s = make_scheduler(num_blocks=11)
    # 20 + 21 tokens, of which the last is never computed
    (r,) = _add(s, make_request("a", 20, 21))
    while s.has_work:
        _step(s)
    assert (len(r.output), r.preemptions) == (21, 0)


def test_id_in_use_is_refused():
    s = make_scheduler()
    s.add(make_request("a", 3))
    with pytest.raises(ValueError, match="'a' is in use"):
        s.add(make_request("a", 3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens 3 is less than max_num_seqs 4"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens 16 < max_model_len 48"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold -1"),
        (
            {"long_prefill_token_threshold": 4, "enable_chunked_prefill": False, "max_model_len": 9},
            "threshold 4 needs chunked prefill",
        ),
        ({"policy": "lifo"}, "policy 'lifo' is none of fcfs, priority"),
        ({"order": "random"}, "order 'random'"),
        ({"watermark": 1.0}, r"watermark 1\.0"),
    ],
)
def test_wrong_limits_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48} | changes)


def test_blocks_counted_for_another_budget_are_refused():
    with pytest.raises(ValueError, match="16 tokens a step, not for max_num_batched_tokens 20"):
        Scheduler(SchedulerConfig(4, 20, 48), make_scheduler().blocks)


# prefix cache, counts, state


def test_request_may_skip_reading_the_cache_but_fills_it():
    s = make_scheduler(num_blocks=40)
    _run(s, make_request("a", range(9), 1))
    skipping, other = make_request("b", range(13), 1), make_request("c", range(13), 1)
    # SamplingParams does not take it yet
    object.__setattr__(skipping.params, "skip_reading_prefix_cache", True)
    _run(s, skipping)
    _run(s, other)
    assert (skipping.num_cached, other.num_cached) == (0, 12)


def test_prefix_cache_is_reset_only_when_nothing_runs():
    s = make_scheduler()
    _add(s, make_request("a", range(9)))
    _step(s)
    assert not s.reset_prefix_cache()
    assert s.blocks.pools[0].holder
    s.finish(s.alive["a"], "abort")
    assert s.reset_prefix_cache()
    again = make_request("b", range(9), 1)
    _run(s, again)
    assert again.num_cached == 0


def test_preemption_warns_at_powers_of_two_with_the_count(caplog):
    s = make_scheduler(num_blocks=5, caching=False)
    with caplog.at_level(logging.WARNING, "octavo"):
        for i in range(5):
            _run(s, make_request(f"a{i}", [1] * 7, 6), make_request(f"b{i}", [2] * 7, 6))
    assert s.num_preemptions == 5
    counts = [m.message.split("total_cumulative_preemption_cnt=")[1] for m in caplog.records]
    assert counts == ["1", "2", "4"]


def test_plan_takes_the_largest_head_that_a_sampled_row_needs():
    s = make_scheduler(budget=8)
    _add(s, make_request("a", 2), make_request("b", 12))
    s.alive["a"].variant, s.alive["a"].num_logprobs = 1, 0
    s.alive["b"].variant, s.alive["b"].num_logprobs = 2, 5
    # b's chunk is not its last, so it samples nothing
    first, second = _plan(s), _plan(s)
    assert (first.variant, first.num_logprobs) == ("sample", 0)
    assert [c.samples for c in second.chunks] == [True, True]
    assert (second.variant, second.num_logprobs) == ("truncate", 5)


def test_add_reads_the_head_off_the_parameters():
    s = make_scheduler()
    r = make_request("a", 2)
    r.params = SamplingParams(temperature=0.5, top_k=3, logprobs=4, max_tokens=5, min_tokens=2, stop_token_ids=[9, 7])
    r.eos_ids = frozenset({1})
    s.add(r)
    plan = _plan(s)
    assert (plan.variant, plan.num_logprobs) == ("penalties", 4)
    (a,) = plan.admitted
    assert (a.params, a.min_tokens, a.stop_ids, a.prompt_len) == ((0.5, 3.0, 1.0, 0.0), 2, (1, 7, 9), 2)


def test_min_tokens_without_stop_ids_forbids_nothing():
    s = make_scheduler()
    r = make_request("a", 2)
    r.params = SamplingParams(max_tokens=5, min_tokens=2)
    s.add(r)
    assert (_plan(s).admitted[0].min_tokens, r.eos_ids) == (0, frozenset())


def test_hits_and_queries_are_counted_once_a_request():
    s = make_scheduler(num_blocks=5)
    _run(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6))
    assert s.num_preemptions == 1
    assert (s.num_queried_tokens, s.num_hit_tokens) == (14, 0)
    # b's prompt is computed again behind the block that it hit
    assert s.num_prompt_tokens == 7 + 7 + 3


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
    _add(s, *_family(3, range(10)))
    _step(s)
    _step(s)
    s.finish(s.alive["0"], "abort")
    copy = Scheduler.load(json.loads(json.dumps(s.dump())))
    assert set(copy.alive) == {"1", "2"}
    assert _plan(copy) == _plan(s)
    assert copy.alive["1"].num_cached == 9
