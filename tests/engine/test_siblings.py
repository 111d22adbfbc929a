"""n samples of one prompt: computed once, and at most one token of it again for each sibling."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from backends import BACKENDS
from scheduler_world import add, check_state, make_request, make_scheduler, step
from tiny import PROMPTS, RANDOM, engine

from octavo.engine import LLM, SamplingParams
from octavo.engine.outputs import CompletionOutput
from octavo.engine.scheduler import Scheduler

# ends at different times: some samples with their first token, some at max_tokens
ENDS = replace(RANDOM, max_tokens=6, stop_token_ids=tuple(range(0, 97, 5)))


def generate(llm: LLM, prompt: list[int], params: SamplingParams) -> list[CompletionOutput]:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs


@functools.cache
def single(backend: str) -> LLM:
    return engine(backend=backend, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)


def alone(backend: str, prompt: list[int], params: SamplingParams, index: int) -> CompletionOutput:
    return generate(single(backend), prompt, replace(params, n=1, seed=params.seed + index))[0]


# one token, a whole block, and a part of one behind a chunk
LENGTHS = (1, 8, 29)


@pytest.mark.parametrize(
    "overlap, seqs, caching", [(True, 3, True), (False, 3, True), (False, 16, False), (True, 16, False)]
)
def test_the_prompt_is_computed_once(overlap: bool, seqs: int, caching: bool) -> None:
    for length in LENGTHS:
        for params in (ENDS, replace(ENDS, max_tokens=1), replace(RANDOM, max_tokens=4, logprobs=2)):
            llm = engine(
                backend=BACKENDS[0], async_scheduling=overlap, max_num_seqs=seqs, enable_prefix_caching=caching,
                max_num_batched_tokens=24,
            )  # fmt: skip
            assert len(generate(llm, PROMPTS[3][:length], replace(params, n=5))) == 5
            assert llm.scheduler.num_prompt_tokens <= length + 4, (length, params)
            assert not llm.scheduler.estates.kept and llm.scheduler.blocks.usage() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_sibling_is_the_request_of_its_own_seed(backend: str) -> None:
    params = replace(ENDS, n=5, logprobs=3)
    for length, overlap in ((8, True), (13, False)):
        prompt = PROMPTS[3][:length]
        llm = engine(backend=backend, async_scheduling=overlap, max_num_seqs=3)
        made = generate(llm, prompt, params)
        assert len({len(o.token_ids) for o in made}) > 1
        for i, one in enumerate(made):
            want = alone(backend, prompt, params, i)
            assert (one.index, list(one.token_ids), one.finish_reason) == (i, list(want.token_ids), want.finish_reason)
            assert one.stop_reason == want.stop_reason
            for ours, theirs in zip(one.logprobs, want.logprobs, strict=True):
                assert list(ours) == list(theirs)
                np.testing.assert_allclose(
                    [x.logprob for x in ours.values()], [x.logprob for x in theirs.values()], atol=1e-4
                )


def test_blocks_of_an_ended_first_wait_one_plan_for_its_siblings() -> None:
    s = make_scheduler(num_blocks=12, max_num_seqs=2, block_size=4)
    first = make_request("first", 6, max_tokens=1)
    siblings = [make_request(f"s{i}", 6, max_tokens=3, first=first) for i in range(3)]
    add(s, first, *siblings)
    assert step(s) == {"first": 6}
    assert first.finish_reason == "length" and s.estates.kept == [first]
    check_state(s)
    # two have a seat and fork; the third forks from them later
    assert step(s) == {"s0": 1, "s1": 1}
    assert not s.estates.kept
    while s.has_work:
        step(s)
        check_state(s)
    assert s.num_prompt_tokens == 6 + 3 and s.blocks.usage() == 0


def test_they_are_given_back_when_somebody_needs_them_or_nobody_will() -> None:
    s = make_scheduler(num_blocks=5, max_num_seqs=2, block_size=4, caching=False)
    first = make_request("first", 8, max_tokens=1)
    sibling = make_request("sibling", 8, max_tokens=2, first=first)
    big = make_request("big", 13, max_tokens=3)
    add(s, first, big, sibling)
    assert step(s) == {"first": 8}
    assert step(s) == {"big": 13}
    assert not s.estates.kept
    check_state(s)
    s.finish(big, "abort")
    third = make_request("third", 8, max_tokens=1)
    orphan = make_request("orphan", 8, max_tokens=2, first=third)
    add(s, third, orphan)
    while third.finish_reason is None:
        step(s)
    assert s.estates.kept == [third]
    s.finish(orphan, "abort")
    assert not s.estates.kept
    check_state(s)


def test_blocks_left_by_one_that_is_still_to_be_read_are_in_a_dump():
    s = make_scheduler(max_num_seqs=1)
    first = make_request("first", range(9), 1)
    other = make_request("other", [7] * 3, 1)
    s.add(first)
    s.add(make_request("second", range(9), 1, first=first, index=1))
    s.add(other)
    s.schedule()
    # who ends frees the seats of those of whom nothing but the end is unread
    s.finish(other, "abort")
    assert s.left == {first} and s.estates.kept == [first]
    value = s.dump()
    again = Scheduler.load(value)
    assert again.dump() == value
    assert again.estates.kept == [again.alive["first"]]
