"""What a step holds, who waits and why, who is preempted, what is refused: worked by hand."""

from __future__ import annotations

import logging

import pytest
from scheduler_world import add, make_request, make_scheduler, planned, run, step

from octavo.engine.limits import SchedulerConfig, busy_step, queue_order
from octavo.engine.plan import Reason
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler

# golden scenarios of semantics 2.9


@pytest.mark.parametrize("length, cached", [(32, 16), (33, 32)], ids=["G1-32", "G2-33"])
def test_second_equal_prompt_hits_all_but_what_must_be_computed(length, cached):
    s = make_scheduler(block_size=16, budget=64, max_model_len=64)
    first, second = (make_request(name, range(length), 2) for name in "ab")
    run(s, first)
    run(s, second)
    assert (first.num_cached, second.num_cached) == (0, cached)
    assert s.num_prompt_tokens == length + length - cached


def test_g3_long_prompt_gets_what_the_decodes_leave():
    s = make_scheduler(budget=8, caching=False)
    add(s, *(make_request(str(i), 1, 20) for i in range(3)))
    step(s)
    (new,) = add(s, make_request("new", 20, 20))
    for _ in range(4):
        assert new.output == []
        assert step(s) == {"0": 1, "1": 1, "2": 1, "new": 5}
    assert len(new.output) == 1


@pytest.mark.parametrize("budget, together", [(24, True), (22, False)])
def test_g4_without_chunking_a_prompt_runs_whole_or_waits(budget, together):
    s = make_scheduler(budget=budget, max_model_len=22, caching=False, enable_chunked_prefill=False)
    add(s, *(make_request(str(i), 1, 9) for i in range(3)))
    step(s)
    s.add(make_request("new", 20, 2))
    plan = planned(s)
    chunks = {c.request_id: c.num_tokens for c in plan.chunks}
    assert chunks == {"0": 1, "1": 1, "2": 1} | ({"new": 20} if together else {})
    assert plan.reasons == (("new", Reason.ADMITTED if together else Reason.NO_BUDGET),)


def test_g5_last_of_running_is_preempted_and_keeps_what_it_made():
    s = make_scheduler(num_blocks=5)
    a, b = add(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6))
    assert step(s) == {"a": 7, "b": 7}
    assert (a.blocks, b.blocks) == ([[1, 2]], [[3, 4]])
    assert step(s) == {"a": 1, "b": 1}
    plan = planned(s)
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
        plan = planned(s)
        # 3 blocks are needed, of which one can be hit: c would fit, but does not overtake
        assert plan.reasons == (("b", Reason.NO_ROOM),)
        s.update(plan, [0])
    plan = planned(s)
    assert ("b", Reason.RESUMED) in plan.reasons
    assert plan.admitted[0].tokens == (*[2] * 7, 0, 0)
    # its first block was still there
    assert plan.admitted[0].num_computed == 4
    assert b.num_cached == 0


def test_g7_request_hits_blocks_that_its_neighbour_fills_in_the_same_step():
    s = make_scheduler()
    a, b = add(s, make_request("a", range(9)), make_request("b", range(9)))
    assert step(s) == {"a": 9, "b": 1}
    assert b.num_cached == 8
    assert a.blocks[0][:2] == b.blocks[0][:2]
    assert a.blocks[0][2] != b.blocks[0][2]


def test_g8_salts_part_the_cache():
    s = make_scheduler(num_blocks=40)
    cached = []
    for i, salt in enumerate(["x", "y", None, "x", None, "z"]):
        r = make_request(str(i), range(9), 1, cache_salt=salt)
        run(s, r)
        cached.append(r.num_cached)
    assert cached == [0, 0, 0, 8, 8, 0]


def test_g9_nobody_is_looked_at_while_all_seats_are_taken():
    s = make_scheduler(max_num_seqs=2)
    add(s, *(make_request(name, range(9)) for name in "abc"))
    step(s)
    plan = planned(s)
    assert plan.reasons == (("c", Reason.NO_SEAT),)
    assert s.alive["c"].hashes == []


# limits of a step


@pytest.mark.parametrize("rival, first", [(False, 12), (True, 3)], ids=["alone", "with-another"])
def test_long_prefill_is_capped_while_others_want_tokens(rival, first):
    s = make_scheduler(long_prefill_token_threshold=3)
    s.add(make_request("long", 12))
    if rival:
        s.add(make_request("short", 2))
    assert step(s) == {"long": first} | ({"short": 2} if rival else {})


def test_decodes_go_before_prefills_or_after():
    plans = {}
    for order in ("decode_first", "prefill_first"):
        s = make_scheduler(budget=6, order=order, caching=False)
        s.add(make_request("old", 1))
        step(s)
        s.add(make_request("new", 17))
        plans[order] = [step(s) for _ in range(3)]
    assert plans["decode_first"] == [{"old": 1, "new": 5}] * 3
    assert plans["prefill_first"] == [{"new": 6}, {"new": 6}, {"new": 5, "old": 1}]


@pytest.mark.parametrize(
    "seats, n, most, order",
    [
        (2, 1, (1, 9, 2, 3), [0, 1, 3, 2]),
        (4, 1, (1, 9, 2, 3), [0, 1, 2, 3]),
        (9, 1, (1, 9, 2, 3), [0, 1, 2, 3]),
        (3, 2, (4, 1, 2, 5), [0, 1, 3, 2]),
        (3, 1, (1, 10, 30, 11), [0, 1, 2, 3]),
        (3, 1, (1, None, 3, 10), [0, 1, 3, 2]),
    ],
    ids=["two-seats", "all-have-one", "more-seats", "families", "beyond-the-length", "no-limit"],
)
def test_prompts_are_queued_so_that_seats_run_empty_together(seats, n, most, order):
    families = [[make_request(f"{i}-{j}", [1, 2], m) for j in range(n)] for i, m in enumerate(most)]
    assert queue_order(families, seats, 12) == order


def test_busy_steps_are_cut_down_to_full_ones():
    s = make_scheduler(budget=24, caching=False, max_num_seqs=3, num_blocks=60, full=(8, 16))
    add(s, make_request("a", 1, 2), make_request("b", 18), make_request("c", 12), make_request("d", 10))
    assert step(s) == {"a": 1, "b": 15}
    # 1 + 3 + 12 are wanted
    assert step(s) == {"a": 1, "b": 3, "c": 12}
    # a's seat is free for d: nobody else waits, so nothing is held back
    assert step(s) == {"b": 1, "c": 1, "d": 10}


def test_prompts_that_do_not_fill_a_busy_step_wait_for_a_while():
    s = make_scheduler(budget=24, caching=False, max_num_seqs=2, num_blocks=60, full=(8, 16))
    add(s, make_request("a", 1, 20), make_request("b", 7, 1), make_request("c", 5, 1), make_request("d", 6, 1))
    assert step(s) == {"a": 1, "b": 7}
    assert [step(s) for _ in range(3)] == [{"a": 1}] * 3
    assert step(s) == {"a": 1, "c": 5}
    # nobody else is left waiting
    assert step(s) == {"a": 1, "d": 6}


def test_a_full_step_in_which_prompts_get_little_is_not_worth_it():
    config = make_scheduler(budget=24, full=(8, 16)).config
    assert busy_step(config, 24, [1] * 7, 8, 0) == (24, 0)
    assert busy_step(config, 24, [1] * 7, 3, 0) == (8, 0)
    assert busy_step(config, 24, [1] * 7, 12, 2) == (16, 0)


def test_prompts_wait_only_behind_those_that_decode():
    config = make_scheduler(budget=24, full=(16,)).config
    assert busy_step(config, 24, [1, 1, 4], 5, 2) == (2, 3)
    assert busy_step(config, 24, [1, 1, 4], 5, 3) == (24, 0)
    assert busy_step(config, 24, [1, 4, 1], 5, 0) == busy_step(config, 24, [1, 14, 1], 5, 0) == (24, 0)
    assert busy_step(config, 24, [4], 5, 0) == (24, 0)
    assert busy_step(make_scheduler(budget=24, full=(16,), order="prefill_first").config, 24, [1], 5, 0) == (24, 0)


@pytest.mark.parametrize("order, sizes", [("decode_first", [1, 1, 1, 1, 1, 1, 10]), ("prefill_first", [12] + [1] * 6)])
def test_decodes_lose_no_token_to_a_step_that_is_cut(order, sizes):
    s = make_scheduler(budget=24, caching=False, max_num_seqs=7, num_blocks=60, full=(16,), order=order)
    add(s, *(make_request(str(i), 1, 20) for i in range(6)))
    step(s)
    add(s, make_request("a", 12), make_request("b", 12))
    assert list(step(s).values()) == sizes


def test_without_chunking_steps_are_as_full_as_prompts_make_them():
    s = make_scheduler(budget=48, caching=False, max_num_seqs=1, enable_chunked_prefill=False, full=(8,))
    add(s, make_request("a", 13), make_request("b", 13))
    assert step(s) == {"a": 13}


def test_prompt_is_not_admitted_before_all_of_it_fits():
    s = make_scheduler(num_blocks=7, budget=8)
    add(s, make_request("a", 8, 2))
    step(s)
    add(s, make_request("b", [1] * 17, 1))
    # its first chunk would fit in the four blocks that are left, all of it needs five
    assert ("b", Reason.NO_ROOM) in planned(s).reasons


@pytest.mark.parametrize("watermark, starts", [(0.0, True), (0.2, False)])
def test_admission_leaves_the_watermark_while_others_run(watermark, starts):
    s = make_scheduler(num_blocks=10, watermark=watermark)
    add(s, make_request("a", 16, 2))
    step(s)
    add(s, make_request("b", [1] * 16, 2))
    assert ("b" in step(s)) == starts


def test_watermark_does_not_hold_back_a_request_that_runs_alone():
    s = make_scheduler(num_blocks=10, watermark=0.5)
    add(s, make_request("a", 36, 1))
    assert step(s) == {"a": 16}


def test_waiting_request_does_not_overtake_a_larger_one_before_it():
    s = make_scheduler(num_blocks=6)
    add(s, make_request("a", 12, 3), make_request("big", [1] * 12, 1), make_request("small", [2], 1))
    assert step(s) == {"a": 12}
    assert step(s) == {"a": 1}


def test_priority_goes_before_arrival():
    s = make_scheduler(policy="priority", max_num_seqs=1)
    for i, (name, priority) in enumerate([("late", 5), ("b", 1), ("a", 0), ("c", 1)]):
        s.add(make_request(name, 1, 1, priority=priority, arrival=i))
    order = []
    while s.has_work:
        order += step(s)
    assert order == ["a", "b", "c", "late"]


def test_priority_preempts_the_worst_even_if_it_is_planned_already():
    s = make_scheduler(policy="priority", num_blocks=5)
    worst, best = add(
        s, make_request("worst", [1] * 7, 6, priority=9), make_request("best", [2] * 8, 6, priority=1, arrival=1)
    )
    step(s)
    # the worst is planned first, and has room for one more; the best then needs a third block
    plan = planned(s)
    assert [c.request_id for c in plan.chunks] == ["best"]
    assert list(s.waiting) == [worst]
    assert worst.in_flight == 0
    assert {w.row for w in plan.table_writes} == {best.row}


def test_budget_of_an_unplanned_victim_goes_to_those_behind():
    s = make_scheduler(policy="priority", num_blocks=40, budget=8, caching=False)
    add(s, make_request("worst", 12, priority=9))
    step(s)
    add(s, make_request("best", 3, priority=0, arrival=1))
    assert step(s) == {"worst": 4, "best": 3}
    add(s, make_request("long", 20, priority=1, arrival=2))
    assert step(s) == {"worst": 1, "best": 1, "long": 6}
    pool = s.blocks.pools[0]
    while pool.free:
        pool.take()
    # the worst has room and is planned; the best needs a second block
    assert step(s) == {"best": 1, "long": 7}


def test_under_priority_the_pass_goes_on_after_a_request_preempts_itself():
    s = make_scheduler(policy="priority", num_blocks=5, caching=False)
    add(s, make_request("worst", [1] * 8, 8, priority=9))
    step(s)
    step(s)
    add(s, make_request("best", [2], 8, priority=1, arrival=1))
    for _ in range(3):
        assert step(s) == {"worst": 1, "best": 1}
    plan = planned(s)
    assert [c.request_id for c in plan.chunks] == ["best"]
    assert plan.reasons == (("worst", Reason.PREEMPTED), ("worst", Reason.AFTER_PREEMPTION))


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
    (r,) = add(s, make_request("a", 20, 21))
    while s.has_work:
        step(s)
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


# prefix cache and counts


def test_request_may_skip_reading_the_cache_but_fills_it():
    s = make_scheduler(num_blocks=40)
    run(s, make_request("a", range(9), 1))
    skipping, other = make_request("b", range(13), 1), make_request("c", range(13), 1)
    # SamplingParams does not take it yet
    object.__setattr__(skipping.params, "skip_reading_prefix_cache", True)
    run(s, skipping)
    run(s, other)
    assert (skipping.num_cached, other.num_cached) == (0, 12)


def test_prefix_cache_is_reset_only_when_nothing_runs():
    s = make_scheduler()
    add(s, make_request("a", range(9)))
    step(s)
    assert not s.reset_prefix_cache()
    assert s.blocks.pools[0].holder
    s.finish(s.alive["a"], "abort")
    assert s.reset_prefix_cache()
    again = make_request("b", range(9), 1)
    run(s, again)
    assert again.num_cached == 0


def test_preemption_warns_at_powers_of_two_with_the_count(caplog):
    s = make_scheduler(num_blocks=5, caching=False)
    with caplog.at_level(logging.WARNING, "octavo"):
        for i in range(5):
            run(s, make_request(f"a{i}", [1] * 7, 6), make_request(f"b{i}", [2] * 7, 6))
    assert s.num_preemptions == 5
    counts = [m.message.split("total_cumulative_preemption_cnt=")[1] for m in caplog.records]
    assert counts == ["1", "2", "4"]


def test_plan_takes_the_largest_head_that_a_sampled_row_needs():
    s = make_scheduler(budget=8)
    add(s, make_request("a", 2), make_request("b", 12))
    s.alive["a"].variant, s.alive["a"].num_logprobs = 1, 0
    s.alive["b"].variant, s.alive["b"].num_logprobs = 2, 5
    # b's chunk is not its last, so it samples nothing
    first, second = planned(s), planned(s)
    assert (first.variant, first.num_logprobs) == ("sample", 0)
    assert [c.samples for c in second.chunks] == [True, True]
    assert (second.variant, second.num_logprobs) == ("truncate", 5)


def test_add_reads_the_head_off_the_parameters():
    s = make_scheduler()
    r = make_request("a", 2)
    r.params = SamplingParams(temperature=0.5, top_k=3, logprobs=4, max_tokens=5, min_tokens=2, stop_token_ids=[9, 7])
    r.eos_ids = frozenset({1})
    s.add(r)
    plan = planned(s)
    assert (plan.variant, plan.num_logprobs) == ("edits", 4)
    (a,) = plan.admitted
    assert (a.params, a.min_tokens, a.stop_ids, a.prompt_len) == ((0.5, 3.0, 1.0, 0.0, 1.0, 0.0, 0.0), 2, (1, 7, 9), 2)


def test_min_tokens_without_stop_ids_forbids_nothing():
    s = make_scheduler()
    r = make_request("a", 2)
    r.params = SamplingParams(max_tokens=5, min_tokens=2)
    s.add(r)
    assert (planned(s).admitted[0].min_tokens, r.eos_ids) == (0, frozenset())


def test_hits_and_queries_are_counted_once_a_request():
    s = make_scheduler(num_blocks=5)
    run(s, make_request("a", [1] * 7, 6), make_request("b", [2] * 7, 6))
    assert s.num_preemptions == 1
    assert (s.num_queried_tokens, s.num_hit_tokens) == (14, 0)
    # b's prompt is computed again behind the block that it hit
    assert s.num_prompt_tokens == 7 + 7 + 3


def test_lower_limits_are_kept_from_the_next_step_on():
    s = make_scheduler(max_num_seqs=4, budget=16, num_blocks=60)
    add(s, *(make_request(str(i), [i] * 4) for i in range(5)))
    assert step(s) == {"0": 4, "1": 4, "2": 4, "3": 4}
    s.set_limits(max_num_seqs=2, max_num_batched_tokens=3)
    assert step(s) == {"0": 1, "1": 1}
    assert [r.id for r in s.waiting] == ["2", "3", "4"]
    s.set_limits(max_num_seqs=3)
    assert step(s) == {"0": 1, "1": 1, "2": 1}
    s.set_limits(max_num_seqs=4, max_num_batched_tokens=16)
    assert set(step(s)) == {"0", "1", "2", "3"}


def test_limits_beyond_what_was_compiled_name_the_bound():
    s = make_scheduler(max_num_seqs=4, budget=16)
    for limits, words in (
        ({"max_num_seqs": 5}, "max_num_seqs 5 is more than the 4"),
        ({"max_num_batched_tokens": 17}, "max_num_batched_tokens 17 is more than the 16"),
        ({"max_num_batched_tokens": 3}, "3 is less than max_num_seqs 4"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"max_num_seqs": "2"}, "'2' is not a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            s.set_limits(**limits)
    whole = make_scheduler(budget=50, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="40 is less than max_model_len 48"):
        whole.set_limits(max_num_batched_tokens=40)
    assert (s.limits.max_num_seqs, s.limits.max_num_batched_tokens) == (4, 16)


def test_a_seat_given_up_is_no_sign_of_a_small_cache(caplog):
    s = make_scheduler(max_num_seqs=4, num_blocks=60)
    add(s, *(make_request(str(i), 2) for i in range(4)))
    step(s)
    s.set_limits(max_num_seqs=1)
    step(s)
    assert s.num_preemptions == 3 and "KV cache" not in caplog.text
