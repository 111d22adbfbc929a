"""repetition_detection against trying every pattern, and in the engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from tiny import PROMPTS, engine

from octavo.engine import SamplingParams
from octavo.engine.repetition import repeats


def by_trying(output: list[int], most: int, least: int, count: int) -> bool:
    return any(
        output[-size * count :] == output[-size:] * count
        for size in range(least, most + 1)
        if size * count <= len(output)
    )


def test_patterns_are_those_found_by_trying() -> None:
    rng, found = np.random.default_rng(0), 0
    for _ in range(3000):
        output = rng.integers(0, 2, rng.integers(0, 14)).tolist()
        least, count = int(rng.integers(1, 4)), int(rng.integers(2, 5))
        most = least + int(rng.integers(0, 4))
        rule = {"max_pattern_size": most, "min_pattern_size": least, "min_count": count}
        assert repeats(output, rule) == by_trying(output, most, least, count), (output, rule)
        found += repeats(output, rule)
    assert 300 < found < 2700


WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "repetition_detection 3 is not a dict"),
    "another name": ({"size": 3}, "unknown field of repetition_detection 'size'"),
    "a half": ({"max_pattern_size": 1.5, "min_count": 2}, "repetition_detection: max_pattern_size 1.5 is not a whole"),
    "no count": ({"max_pattern_size": 2}, "repetition_detection: min_count 0 is no repetition"),
    "sizes": ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size 3 is more than"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        SamplingParams(repetition_detection=value)


def test_a_rule_may_be_an_object_and_may_ask_for_nothing() -> None:
    rule = SimpleNamespace(max_pattern_size=3, min_pattern_size=0, min_count=4)
    want = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}
    assert SamplingParams(repetition_detection=rule).repetition_detection == want
    assert SamplingParams(repetition_detection={"max_pattern_size": 0}).repetition_detection is None


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_ends_where_it_first_repeats_itself(backend: str, overlap: bool) -> None:
    llm = engine(backend=backend, async_scheduling=overlap)
    rule = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}
    free = SamplingParams(seed=3, max_tokens=40, allowed_token_ids=[20, 21], min_tokens=8, stop_token_ids=[90])
    prompts = [PROMPTS[i] for i in (0, 2, 3, 4)]
    whole = llm.generate(prompts, free, use_tqdm=False)
    cut = llm.generate(prompts, replace(free, repetition_detection=rule), use_tqdm=False)
    for a, b in zip(whole, cut, strict=True):
        ids, got = list(a.outputs[0].token_ids), b.outputs[0]
        # not before min_tokens
        end = next(n for n in range(8, 41) if by_trying(ids[:n], 2, 1, 3))
        assert list(got.token_ids) == ids[:end]
        assert (got.finish_reason, got.stop_reason) == ("repetition", "repetition_detected")
    while llm.has_unfinished_requests():
        llm.step()
    assert not llm.scheduler.orphans and llm.scheduler.blocks.usage() == 0
