"""Scores of continuations against a dense float64 model."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from backends import BACKENDS
from tiny import GREEDY, MAX_MODEL_LEN, PROMPTS, SHARED, TINY, VOCAB, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM
from octavo.engine.score import ScoreOutput

CONTINUATIONS: list[Any] = [[[3, 4], [8], [5, 6, 7, 8, 9] * 5], [[1]], [[2, 3], [2, 4]]]
ASKED = [SHARED, [4], PROMPTS[3]]


def assert_right(output: ScoreOutput, prompt: list[int], continuation: list[int]) -> None:
    x = oracle.logits(spec_of(TINY), numpy_weights(TINY), [*prompt, *continuation])[len(prompt) - 1 : -1]
    right = x - np.log(np.exp(x).sum(-1, keepdims=True))
    assert list(output.token_ids) == continuation and list(output.prompt_token_ids) == prompt
    picked = [row[token] for row, token in zip(right, continuation)]
    np.testing.assert_allclose(output.logprobs, picked, atol=2e-4)
    assert output.logprob == pytest.approx(sum(picked), abs=2e-4 * len(picked))
    for rank, row, value in zip(output.ranks, right, picked):
        assert max(1, (row >= value + 2e-4).sum()) <= rank <= (row >= value - 2e-4).sum()


@pytest.mark.parametrize(("backend", "options"), [
    ("torch", {}), ("torch", {"max_num_batched_tokens": 3, "max_num_seqs": 2}), ("torch", {"async_scheduling": False}),
    ("torch", {"num_gpu_blocks_override": 14, "max_model_len": 104}), ("torch", {"enable_prefix_caching": False}),
    ("jax", {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 14, "max_model_len": 104}),
], ids=str)  # fmt: skip
def test_scores_are_those_of_a_dense_model(backend: str, options: dict[str, Any]) -> None:
    """Beside requests that sample."""
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    llm = engine(backend=backend, **options)
    llm.add_request("a", PROMPTS[2], GREEDY)
    outputs = llm.score(ASKED, CONTINUATIONS, use_tqdm=False)
    for prompt, several, scores in zip(ASKED, CONTINUATIONS, outputs, strict=True):
        for continuation, output in zip(several, scores, strict=True):
            assert_right(output, prompt, continuation)
    while llm.has_unfinished_requests():
        llm.step()
    assert not llm.scheduler.alive and not llm.processor.home and llm.scheduler.blocks.usage() == 0


def test_continuations_share_their_prompt_but_for_its_last_block() -> None:
    llm = engine(backend=BACKENDS[0])
    llm.score([SHARED], [[[i] for i in range(10)]], use_tqdm=False)
    assert llm.scheduler.num_prompt_tokens == 41 + 9 * 1
    assert llm.score(SHARED, [3, 4], use_tqdm=False)[0][0].token_ids == [3, 4]


def test_what_greedy_decoding_says_is_greedy() -> None:
    llm = engine(backend=BACKENDS[0])
    (said,) = tokens(llm, [SHARED])
    ((same, other),) = llm.score(SHARED, [said, [*said[:-1], (said[-1] + 1) % VOCAB]], use_tqdm=False)
    assert same.is_greedy and not other.is_greedy
    assert same.ranks == [1] * len(said) and other.ranks[-1] > 1 and same.logprob > other.logprob
    assert same.decoded_tokens is None


def test_the_last_token_of_a_continuation_needs_no_room() -> None:
    llm = engine(backend=BACKENDS[0])
    longest = [1] * (MAX_MODEL_LEN - 1)
    ((output,),) = llm.score([longest], [[2, 3]], use_tqdm=False)
    assert_right(output, longest, [2, 3])


@pytest.mark.parametrize("prompts, continuations, message", [
    ([[1], [2]], [[3]], "1 continuations for 2 prompts"),
    ([[1], [2]], 3, "3 continuations for 2 prompts"),
    ([[1]], [[]], "a continuation is a string or a list"),
    ([[1]], [[[2], 3.5]], "a continuation is a string or a list"),
    ([[1]], [[VOCAB]], f"token id {VOCAB} is outside the vocabulary"),
    ([[1]], [[2] * MAX_MODEL_LEN + [3]], f"continuation of {MAX_MODEL_LEN + 1} are longer than max_model_len 128"),
    ([[1]], ["text"], "no tokenizer"),
    (["text"], [[1]], "no tokenizer"),
    ([[]], [[1]], "empty"),
])  # fmt: skip
def test_what_cannot_be_scored_is_an_error(prompts: Any, continuations: Any, message: str) -> None:
    llm = engine(backend=BACKENDS[0])
    with pytest.raises(ValueError, match=message):
        llm.score(prompts, continuations, use_tqdm=False)
    assert not llm.scheduler.alive


def test_an_engine_of_logits_does_not_score() -> None:
    llm: LLM = engine(backend=BACKENDS[0], logprobs_mode="raw_logits")
    with pytest.raises(ValueError, match="scores are logprobs"):
        llm.score([1], [2], use_tqdm=False)
