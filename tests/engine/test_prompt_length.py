"""Prompts that are too long: refused, cut where the request says so, or cut by the engine when it may."""

from __future__ import annotations

import logging

import pytest
from tiny import GREEDY, MAX_MODEL_LEN, PROMPTS, VOCAB, engine, tokens

from octavo.engine import LLM, SamplingParams

LONG = [(7 * i) % VOCAB for i in range(MAX_MODEL_LEN + 40)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


def kept(llm: LLM, prompt: list[int], **params: object) -> list[int]:
    """The prompt that was computed; its output is that of the cut prompt alone."""
    params = {"temperature": 0, "max_tokens": 4} | params
    output = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]
    ids = list(output.prompt_token_ids)
    plain = SamplingParams(temperature=0, max_tokens=params["max_tokens"])
    assert list(output.outputs[0].token_ids) == tokens(llm, [ids], plain)[0]
    return ids


def test_a_prompt_keeps_its_end_or_its_beginning(llm: LLM) -> None:
    assert kept(llm, LONG, truncate_prompt_tokens=10) == LONG[-10:]
    assert kept(llm, LONG, truncate_prompt_tokens=10, truncation_side="right") == LONG[:10]
    assert kept(llm, PROMPTS[0], truncate_prompt_tokens=100) == PROMPTS[0]
    assert kept(llm, PROMPTS[0], truncate_prompt_tokens=len(PROMPTS[0])) == PROMPTS[0]


def test_minus_one_leaves_room_for_the_output(llm: LLM) -> None:
    ids = kept(llm, LONG, truncate_prompt_tokens=-1, max_tokens=20)
    assert ids == LONG[-(MAX_MODEL_LEN - 20) :]
    assert kept(llm, LONG, truncate_prompt_tokens=-1, max_tokens=None) == LONG[-(MAX_MODEL_LEN - 1) :]
    assert kept(llm, LONG, truncate_prompt_tokens=-1, max_tokens=10**6) == LONG[-1:]


def test_without_being_asked_nothing_is_cut(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(truncate_prompt_tokens=MAX_MODEL_LEN)):
        with pytest.raises(ValueError, match=f"{MAX_MODEL_LEN}"):
            llm.generate([LONG], params, use_tqdm=False)


def test_the_engine_cuts_the_end_when_it_may_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    llm = engine(allow_auto_truncate=True)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert kept(llm, PROMPTS[0]) == PROMPTS[0]
        assert not caplog.records
        assert kept(llm, LONG, max_tokens=1) == LONG[: MAX_MODEL_LEN - 1]
        assert f"{len(LONG)} tokens is cut to its first {MAX_MODEL_LEN - 1}" in caplog.text
        # a request's own wish goes first
        assert kept(llm, LONG, truncate_prompt_tokens=50) == LONG[-50:]


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "3"])
def test_a_length_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        SamplingParams(truncate_prompt_tokens=value)
    with pytest.raises(ValueError, match="truncation_side 'middle'"):
        SamplingParams(truncation_side="middle")
