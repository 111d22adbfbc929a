"""What is read of prompts beside sampled tokens, and requests that sample nothing."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from backends import BACKENDS
from scheduler_world import add, make_request, make_scheduler, planned, step
from tiny import GREEDY, PROMPTS, SHARED, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine.computed import compute
from octavo.engine.plan import Reason
from octavo.engine.reads import Wanted, readers
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_log import from_json, to_json

NAMES = ("last", "embed", "layer.1")


@functools.cache
def expected(prompt: tuple[int, ...]) -> dict[str, np.ndarray]:
    rows = oracle.hidden(spec_of(TINY), numpy_weights(TINY), list(prompt))
    return {"last": rows[-1], "embed": rows[0], "layer.1": rows[2]}


def assert_right(prompt: list[int], wanted: Wanted, parts: list[Any]) -> None:
    for name in wanted.hidden:
        found = np.concatenate([part.hidden[name] for part in parts])
        right = expected(tuple(prompt))[name][wanted.start : wanted.stop]
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, atol=2e-4)


TIGHT = {"num_gpu_blocks_override": 14, "max_model_len": 104}
OPTIONS = [
    {}, {"max_num_batched_tokens": 3, "max_num_seqs": 2}, {"async_scheduling": False, "block_size": 16}, TIGHT,
    {"enable_prefix_caching": False}, {"scheduler_order": "prefill_first", "max_num_batched_tokens": 24},
]  # fmt: skip
# compiling is slow: one with everything that matters
CASES = [("torch", o) for o in OPTIONS] + [("jax", TIGHT | {"max_num_batched_tokens": 24})]


@pytest.mark.parametrize(("backend", "options"), [c for c in CASES if c[0] in BACKENDS], ids=str)
def test_hidden_rows_are_those_of_the_whole_prompt(backend: str, options: dict[str, Any]) -> None:
    """Beside requests that sample, some of which share the beginning of what is read; twice, so that there are hits."""
    llm = engine(backend=backend, **options)
    prompts = [PROMPTS[2], PROMPTS[3], [4], PROMPTS[5], PROMPTS[2]]
    wanted = [
        Wanted(0, 43, hidden=NAMES), Wanted(60, 77, hidden=("last",)), Wanted(0, 1, hidden=NAMES[:2]),
        Wanted(40, 41, hidden=("last",)), Wanted(17, 20, hidden=("layer.1",)),
    ]  # fmt: skip
    for _ in range(2):
        for i, prompt in enumerate(PROMPTS[4:7]):
            llm.add_request(f"sampled {i}", prompt, GREEDY)
        found = compute(llm, prompts, wanted, use_tqdm=False)
        for each in zip(prompts, wanted, found, strict=True):
            assert_right(*each)
        while llm.has_unfinished_requests():
            llm.step()
    if "num_gpu_blocks_override" in options:
        assert llm.scheduler.num_preemptions > 0
    assert not llm.scheduler.alive and not llm.processor.home and llm.scheduler.blocks.usage() == 0
    assert tokens(llm, PROMPTS[:2]) == tokens(engine(backend=backend), PROMPTS[:2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_computed_prompts_fill_the_cache_and_read_it_up_to_what_is_wanted(backend: str) -> None:
    llm = engine(backend=backend)
    computed = lambda: llm.scheduler.num_prompt_tokens  # noqa: E731
    compute(llm, [SHARED], [Wanted(40, 41, hidden=("last",))], use_tqdm=False)
    assert computed() == 41
    compute(llm, [SHARED], [Wanted(40, 41, hidden=("last",))], use_tqdm=False)
    assert computed() == 41 + 1
    compute(llm, [SHARED], [Wanted(20, 41, hidden=("last",))], use_tqdm=False)
    assert computed() == 41 + 1 + 41 - 16
    compute(llm, [SHARED], [Wanted(0, 1, hidden=("last",))], use_tqdm=False)
    assert computed() == 41 + 1 + 41 - 16 + 41


def test_a_prompt_as_long_as_the_model_allows_can_be_computed_but_a_longer_one_not() -> None:
    s = make_scheduler(max_model_len=8, num_blocks=3)
    fits = make_request("a", 8, samples=False, wanted=Wanted(7, 8, hidden=("last",)))
    add(s, fits)
    assert step(s) == {"a": 8}
    assert (fits.finish_reason, fits.output, s.blocks.usage()) == ("stop", [], 0)
    with pytest.raises(ValueError, match="prompt of 9 tokens: it is longer than max_model_len 8"):
        s.add(make_request("b", 9, samples=False, wanted=Wanted(7, 8, hidden=("last",))))
    with pytest.raises(ValueError, match="with at least one token of output it is longer"):
        s.add(make_request("c", 8))
    with pytest.raises(ValueError, match="3 blocks of 4 tokens, and there are 2"):
        make_scheduler(max_model_len=12, num_blocks=3).add(
            make_request("d", 9, samples=False, wanted=Wanted(7, 8, hidden=("last",)))
        )


def test_a_complete_one_waits_to_be_read_and_is_not_computed_again() -> None:
    s = make_scheduler(num_blocks=5)
    a = make_request("a", [1] * 8, 6)
    b = make_request("b", [2] * 8, samples=False, wanted=Wanted(0, 8, hidden=("last",)))
    add(s, a, b)
    first = planned(s)
    assert [c.samples for c in first.chunks] == [True, False] and first.ended == ("b",)
    # a needs a block, and there is one: b has given up its own, although its rows have not been read yet
    second = planned(s)
    assert [c.request_id for c in second.chunks] == ["a"]
    assert (second.reasons, s.num_preemptions) == ((("b", Reason.ENDS_UNREAD),), 0)
    third = planned(s)
    assert [c.request_id for c in third.chunks] == ["a"] and not third.reasons
    assert Scheduler.load(json.loads(json.dumps(s.dump()))).dump() == s.dump()
    assert readers(s, first) == [b]
    assert s.update(first, [0]) == [a, b] and b.finish_reason == "stop" and "b" not in s.alive


def test_what_an_ended_request_had_in_flight_is_not_given_to_the_next_of_its_id() -> None:
    s = make_scheduler()
    wanted = Wanted(0, 4, hidden=("last",))
    old = make_request("a", [1] * 4, samples=False, wanted=wanted)
    add(s, old)
    stale = planned(s)
    s.finish(old, "abort")
    (new,) = add(s, make_request("a", [2] * 4, samples=False, wanted=wanted))
    fresh = planned(s)
    assert readers(s, stale) == [None] and s.update(stale, []) == [] and new.finish_reason is None
    assert readers(s, fresh) == [new] and s.update(fresh, []) == [new]


@pytest.mark.parametrize("seed", range(40))
def test_every_wanted_place_is_read_once_in_order(seed: int) -> None:
    """Random traces with few blocks, small budgets, overlap, aborts, and requests of all kinds."""
    rng = random.Random(seed)
    s = make_scheduler(
        num_blocks=rng.choice([(8, 8), (13, 13)]), windows=(None, 6), budget=rng.choice([4, 7, 16]), max_num_seqs=4,
        max_model_len=20, order=rng.choice(["decode_first", "prefill_first"]), block_size=4,
    )  # fmt: skip
    seen: dict[Request, list[int]] = {}
    behind: list[Any] = []
    depth, left = rng.choice([0, 1]), 25
    while left or s.has_work or behind:
        if left and rng.random() < 0.5:
            left -= 1
            r = _random_request(rng, str(left))
            seen[r] = []
            add(s, r)
        if rng.random() < 0.03 and s.alive:
            s.finish(rng.choice(list(s.alive.values())), "abort")
        plan = s.schedule()
        if plan:
            assert from_json(json.loads(json.dumps(to_json(plan)))) == plan
            behind.append(plan)
        if rng.random() < 0.1:
            assert Scheduler.load(json.loads(json.dumps(s.dump()))).dump() == s.dump()
        while behind and (len(behind) > depth or plan is None):
            _read(s, behind.pop(0), seen)
    for r, places in seen.items():
        if r.wanted and r.finish_reason != "abort":
            assert places == list(range(r.wanted.start, r.wanted.stop))
        assert r.finish_reason == "abort" or len(r.output) == (r.max_tokens or 0)
    assert s.blocks.usage() == 0


def _random_request(rng: random.Random, name: str) -> Request:
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
    start = rng.randrange(len(prompt))
    wanted = Wanted(start, rng.randint(start + 1, len(prompt)), hidden=("last",))
    kind = rng.choice(["sampled", "both", "computed"])
    return make_request(
        name, prompt, rng.randint(1, 6), samples=kind != "computed", wanted=None if kind == "sampled" else wanted
    )


def _read(s: Scheduler, plan: Any, seen: dict[Request, list[int]]) -> None:
    for r, read in zip(readers(s, plan), plan.reads, strict=True):
        chunk = plan.chunks[read.chunk]
        assert chunk.start <= read.start < read.stop <= chunk.start + chunk.num_tokens
        if r:
            seen[r] += range(read.start, read.stop)
    s.update(plan, [0] * len(plan.sampled))


@pytest.mark.parametrize("wrong, message", [
    ({"start": 3, "stop": 3, "hidden": ("last",)}, "places 3 to 3 - 1"),
    ({"start": 0, "stop": 3}, "nothing to read"),
    ({"start": 0, "stop": 3, "targets": (1, 2)}, "2 targets for 3 places"),
])  # fmt: skip
def test_wanting_nonsense_is_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wanted(**wrong)


def test_places_beyond_the_prompt_cannot_be_wanted() -> None:
    with pytest.raises(ValueError, match="wants to read place 8 of 8 tokens"):
        make_scheduler().add(make_request("a", 8, samples=False, wanted=Wanted(0, 9, hidden=("last",))))


@pytest.mark.skipif("jax" not in BACKENDS, reason="torch compiles nothing")
def test_after_warm_up_rows_of_the_last_layer_and_logprobs_of_prompts_compile_nothing() -> None:
    # as test_programs.py: what that has compiled is on disk
    llm = engine(backend="jax", warmup="all", num_gpu_blocks_override=40)
    compute(llm, [[1, 2]], [Wanted(0, 2, hidden=("last",))], use_tqdm=False)
    before = llm.backend.num_compiles()
    for prompt in ([4], SHARED, PROMPTS[0]):
        compute(llm, [prompt], [Wanted(0, len(prompt), hidden=("last",))], use_tqdm=False)
        tokens(llm, [prompt], replace(GREEDY, max_tokens=3, logprobs=3, prompt_logprobs=5))
    assert llm.backend.num_compiles() == before
