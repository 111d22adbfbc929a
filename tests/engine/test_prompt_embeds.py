"""Prompts as embeddings: the rows of the table are the prompt of their ids, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from oracle import logits
from tiny import GREEDY, PROMPTS, RANDOM, SHARED, TINY, VOCAB, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def rows(ids: list[int]) -> dict[str, np.ndarray]:
    """The prompt whose embeddings are the table's rows."""
    return {"prompt_embeds": numpy_weights(TINY)["embed"][ids]}


def able(**arguments: Any) -> LLM:
    return engine(enable_prompt_embeds=True, **arguments)


OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 3, "block_size": 4, "async_scheduling": False},
    "tight": {"num_gpu_blocks_override": 15, "max_model_len": 104, "max_num_batched_tokens": 24},
}


# compiling is slow: one with everything that matters
@pytest.mark.parametrize("backend, name", [(b, n) for b in BACKENDS for n in OPTIONS if b == "torch" or n == "tight"])
def test_rows_of_the_table_are_the_prompt_of_their_ids(backend: str, name: str) -> None:
    """In company of prompts of ids, chunked, preempted, and again from the cache."""
    llm, plain = able(backend=backend, **OPTIONS[name]), engine(backend=backend, **OPTIONS[name])
    prompts = [rows(p) if i % 2 else p for i, p in enumerate(PROMPTS)]
    for params in (GREEDY, RANDOM) if backend == "torch" else (RANDOM,):
        want = tokens(plain, PROMPTS, params)
        assert tokens(llm, prompts, params) == want
        assert tokens(llm, [rows(p) for p in PROMPTS[:4]], params) == want[:4]
    if name == "tight":
        assert llm.scheduler.num_preemptions > 0
    assert llm.scheduler.blocks.usage() == 0


def test_other_rows_are_other_prompts_to_the_model_and_to_the_cache(backend: str) -> None:
    """Rows that no id has, against float64; the same ids (none) share nothing unless the rows are equal."""
    table, rng = numpy_weights(TINY)["embed"], np.random.default_rng(3)
    made = [rng.normal(0, 0.2, (21, TINY.embed_dim)).astype(np.float32) for _ in range(2)]
    made.append(np.concatenate([made[0][:16], made[1][16:]]))
    llm = able(backend=backend)
    hits = []
    for x in [*made, made[0], made[2]]:
        (output,) = llm.generate([{"prompt_embeds": x}], replace(GREEDY, max_tokens=5), use_tqdm=False)
        hits.append(output.num_cached_tokens)
        # a table that has these rows behind its own
        weights = numpy_weights(TINY) | {"embed": np.concatenate([table, x]), "unembed": unembedding()}
        ids, want = list(range(VOCAB, VOCAB + len(x))), []
        for _ in range(5):
            want.append(int(logits(spec_of(TINY), weights, ids + want)[-1].argmax()))
        assert list(output.outputs[0].token_ids) == want
        assert list(output.prompt_token_ids) == [-1] * len(x)
    assert hits == [0, 0, 16, 16, 16]


def unembedding() -> np.ndarray:
    w = numpy_weights(TINY)
    return w.get("unembed", w["embed"])


def test_blocks_of_ids_and_of_rows_are_not_shared_and_salts_part_rows_too() -> None:
    llm = able()
    prompts = [SHARED, rows(SHARED), rows(SHARED), rows(SHARED) | {"cache_salt": "x"}, SHARED]
    outputs = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in prompts]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 40, 0, 40]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1


def test_samples_share_the_prompt(backend: str) -> None:
    llm = able(backend=backend)
    params = replace(RANDOM, n=3, max_tokens=5)
    ours = llm.generate([rows(SHARED[:20])], params, use_tqdm=False)[0].outputs
    theirs = engine(backend=backend).generate([SHARED[:20]], params, use_tqdm=False)[0].outputs
    assert [list(o.token_ids) for o in ours] == [list(o.token_ids) for o in theirs]
    assert llm.scheduler.num_prompt_tokens == 20 + 2


def test_penalties_do_not_count_rows(backend: str) -> None:
    """Nobody knows which id a row is: to a penalty the prompt is empty, and no logit of the first token moves."""
    llm = able(backend=backend, logprobs_mode="processed_logits", max_logprobs=-1)
    found = []
    for penalty in (1.0, 1.5):
        params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=penalty, logprobs=-1)
        (entry,) = llm.generate([rows(PROMPTS[3])], params, use_tqdm=False)[0].outputs[0].logprobs
        found.append([entry[i].logprob for i in range(VOCAB)])
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="torch compiles nothing")
def test_warm_up_compiles_what_rows_need() -> None:
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "max_model_len": 32, "num_gpu_blocks_override": 9}
    llm = able(backend="jax", warmup="all", **small)
    before = llm.backend.num_compiles()
    assert tokens(llm, [rows(PROMPTS[0]), rows([4])]) == tokens(llm, [PROMPTS[0], [4]])
    assert llm.backend.num_compiles() == before


BAD = {
    "width": (np.zeros((3, 5)), r"shape \(3, 5\): it must be \[tokens, 32\]"),
    "axes": (np.zeros(32), r"shape \(32,\)"),
    "empty": (np.zeros((0, 32)), r"shape \(0, 32\)"),
    "nan": (np.full((2, 32), np.nan), "NaN"),
    "text": ("hello", "of type str"),
    "complex": (np.full((3, 32), 1j), "complex numbers"),
    "ragged": ([[1.0], [1.0, 2.0]], "of type list"),
    "too long": (np.zeros((128, 32)), "prompt of 128 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_rows_are_that_requests_error(name: str) -> None:
    value, words = BAD[name]
    llm = able()
    with pytest.raises(ValueError, match=words):
        llm.generate([{"prompt_embeds": value}], GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests() and not llm.runner.embeds


def test_what_goes_with_ids_only_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="enable_prompt_embeds=True"):
        engine().generate([rows([1])], GREEDY, use_tqdm=False)
    llm = able()
    for name, value in (("prompt_logprobs", 1), ("prompt_logprob_token_ids", [[3]]), ("truncate_prompt_tokens", 3)):
        with pytest.raises(ValueError, match=f"{name} .*which is prompt_embeds"):
            llm.generate([rows([1, 2])], replace(GREEDY, **{name: value}), use_tqdm=False)
    with pytest.raises(ValueError, match="and not prompt_token_ids"):
        llm.generate([rows([1]) | {"prompt_token_ids": [1]}], GREEDY, use_tqdm=False)
    for call in (llm.embed, llm.hidden_states):
        with pytest.raises(ValueError, match="prompt_embeds go with generate"):
            call([rows([1])], use_tqdm=False)
    with pytest.raises(ValueError, match="step_log"):
        able(step_log=str(tmp_path / "log"))
