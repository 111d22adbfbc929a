"""Logprobs of sampled and of prompt tokens, against a dense float64 model, whatever the engine does in between."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from backends import BACKENDS
from tiny import GREEDY as LONG_GREEDY
from tiny import PROMPTS, SHARED, TINY, VOCAB, engine, numpy_weights, spec_of, tokens
from tiny import RANDOM as LONG_RANDOM

from octavo.engine import LLM, SamplingParams
from octavo.engine.logprobs import FlatLogprobs
from octavo.engine.outputs import Logprob, RequestOutput
from octavo.models.logprobs import MODES

ATOL = 2e-4
GREEDY, RANDOM = (replace(p, max_tokens=10) for p in (LONG_GREEDY, LONG_RANDOM))
TIGHT = {"num_gpu_blocks_override": 14, "max_model_len": 104}
OPTIONS = [
    {}, {"max_num_batched_tokens": 3, "max_num_seqs": 2}, {"async_scheduling": False, "block_size": 16}, TIGHT,
    {"enable_prefix_caching": False}, {"scheduler_order": "prefill_first", "max_num_batched_tokens": 24},
]  # fmt: skip
# compiling is slow: one with everything that matters
CASES = [("torch", o) for o in OPTIONS] + [("jax", TIGHT | {"max_num_batched_tokens": 24})]
CASES = [case for case in CASES if case[0] in BACKENDS]


@functools.cache
def logits(ids: tuple[int, ...]) -> np.ndarray:
    """[T, V] in float64: what is behind each token."""
    return oracle.logits(spec_of(TINY), numpy_weights(TINY), list(ids))


def log_softmax(x: np.ndarray) -> np.ndarray:
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def assert_entry(entry: Any, right: np.ndarray, token: int, num: int, more: Any = ()) -> None:
    """An entry against all values of its position: the token, the `num` largest, more ids. Ranks may swap in ties."""
    order = np.argsort(-right, kind="stable")
    assert next(iter(entry)) == token
    assert set(entry) >= {token, *more} and len(set(entry) - {*more}) in (num, num + 1)
    for i, found in entry.items():
        assert abs(found.logprob - right[i]) < ATOL
        least, most = (int((right >= right[i] + e).sum()) for e in (ATOL, -ATOL))
        assert max(least, 1) <= found.rank <= most
    top = [i for i in entry if i != token and i not in more]
    assert all(abs(right[i] - right[j]) < ATOL for i, j in zip(top, (j for j in order[: num + 1] if j != token)))


def assert_sampled(output: RequestOutput, num: int, more: Any = ()) -> None:
    for c in output.outputs:
        ids = (*output.prompt_token_ids, *c.token_ids)
        right = log_softmax(logits(ids))[len(output.prompt_token_ids) - 1 : -1]
        assert len(c.logprobs) == len(c.token_ids)
        for entry, values, token in zip(c.logprobs, right, c.token_ids):
            assert_entry(entry, values, token, num, more)
        total = sum(values[token] for values, token in zip(right, c.token_ids))
        assert c.cumulative_logprob == pytest.approx(total, abs=len(c.token_ids) * ATOL)


def assert_prompt(output: RequestOutput, num: int, start: int = 0, more: Any = None) -> None:
    prompt = output.prompt_token_ids
    right = log_softmax(logits(tuple(prompt)))
    found = output.prompt_logprobs
    assert len(found) == len(prompt) and all(entry is None for entry in found[: start + 1])
    for i in range(start + 1, len(prompt)):
        assert_entry(found[i], right[i - 1], prompt[i], num, more[i - start - 1] if more else ())


@pytest.mark.parametrize(("backend", "options"), CASES, ids=str)
def test_logprobs_are_those_of_a_dense_model(backend: str, options: dict[str, Any]) -> None:
    """Twice, so that there are hits; in one batch with requests that want other ones, or none."""
    llm = engine(backend=backend, **options)
    want = [
        replace(GREEDY, prompt_logprobs=3),
        replace(RANDOM, logprobs=0, prompt_logprobs=0),
        replace(RANDOM, n=3, max_tokens=6, logprobs=2, prompt_logprobs=2, logprob_token_ids=[5, 96]),
        replace(GREEDY, logprobs=5),
        GREEDY,
        replace(RANDOM, logprobs=1, prompt_logprobs=1, prompt_logprob_start=30),
        replace(GREEDY, logprob_token_ids=[7, 3, 7], max_tokens=3),
    ]
    if "num_gpu_blocks_override" in options:
        # long enough for preemptions
        want = [replace(p, max_tokens=24) if p.max_tokens == 10 else p for p in want]
    for _ in range(2):
        before = llm.scheduler.num_prompt_tokens
        outputs = llm.generate(PROMPTS[:7], want, use_tqdm=False)
        computed = llm.scheduler.num_prompt_tokens - before
        for output, p in zip(outputs, want):
            more = p.logprob_token_ids or ()
            if p.logprobs is not None or more:
                assert_sampled(output, p.logprobs or 0, more)
            else:
                assert all(c.logprobs is None and c.cumulative_logprob is None for c in output.outputs)
            if p.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                assert_prompt(output, p.prompt_logprobs, p.prompt_logprob_start or 0)
    if "num_gpu_blocks_override" in options:
        assert llm.scheduler.num_preemptions > 0
    if not options:
        # hits: of what nothing is read, and of the prompt's beginning before prompt_logprob_start
        assert computed < sum(map(len, PROMPTS[:7]))
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 0, 72, 40, 24, 32]
    plain = [replace(p, prompt_logprobs=None, prompt_logprob_start=None) for p in want]
    for with_them, without in zip(outputs, llm.generate(PROMPTS[:7], plain, use_tqdm=False)):
        assert [c.token_ids for c in with_them.outputs] == [c.token_ids for c in without.outputs]


def test_n_samples_share_the_prompt_whose_logprobs_are_read_once() -> None:
    llm = engine(backend=BACKENDS[0])
    (output,) = llm.generate([PROMPTS[2]], replace(RANDOM, n=3, max_tokens=4, prompt_logprobs=2), use_tqdm=False)
    assert_prompt(output, 2)
    assert llm.scheduler.num_prompt_tokens == len(PROMPTS[2]) + 2
    # it has filled the cache
    (again,) = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 40


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_vocabulary(backend: str) -> None:
    llm = engine(backend=backend, max_logprobs=-1, max_num_batched_tokens=16)
    p = replace(GREEDY, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    for output in llm.generate(PROMPTS[:3], [p, p, replace(p, flat_logprobs=True)], use_tqdm=False):
        assert_sampled(output, VOCAB)
        assert_prompt(output, VOCAB)
        for entry in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
            assert len(entry) == VOCAB
            assert sum(np.exp(e.logprob) for e in entry.values()) == pytest.approx(1, abs=1e-5)


def test_the_whole_vocabulary_of_a_long_prompt_is_on_the_device_two_tiles_at_a_time() -> None:
    llm, held = engine(backend=BACKENDS[0], max_logprobs=-1, max_num_batched_tokens=96), []
    # tiles of 16 rows
    llm.runner.read_head.shapes = replace(llm.runner.read_head.shapes, read=(16,))
    launch = llm.runner.read_head.launch

    def spy(*args: Any) -> Any:
        reads, rows = launch(*args)
        held.append([not isinstance(tile, dict) for tile in reads.tiles])
        return reads, rows

    llm.runner.read_head.launch = spy
    (output,) = llm.generate([PROMPTS[3]], replace(GREEDY, max_tokens=1, prompt_logprobs=-1), use_tqdm=False)
    assert held == [[False] * 4 + [True]]
    assert_prompt(output, VOCAB)


def test_ids_by_name_for_each_token_of_a_prompt() -> None:
    llm = engine(backend=BACKENDS[0], max_num_batched_tokens=16)
    more = [(i, (7 * i) % VOCAB) for i in range(len(SHARED) - 5)]
    p = replace(GREEDY, max_tokens=1, prompt_logprob_start=4, prompt_logprob_token_ids=more)
    (output,) = llm.generate([SHARED], p, use_tqdm=False)
    assert_prompt(output, 0, 4, more)


@pytest.mark.parametrize(
    ("backend", "mode"), [(b, m) for b in BACKENDS for m in MODES if b == BACKENDS[0] or m == "processed_logprobs"]
)
def test_modes(backend: str, mode: str) -> None:
    """Processed: after min_tokens, temperature and truncation; of greedy rows before the argmax, untruncated."""
    llm = engine(backend=backend, logprobs_mode=mode, max_logprobs=-1, max_num_batched_tokens=32)
    eos = tokens(llm, [PROMPTS[0]])[0][0]
    random = replace(RANDOM, max_tokens=4, logprobs=-1, temperature=0.7, top_k=9, top_p=0.9, min_p=0.0)
    greedy = replace(GREEDY, max_tokens=4, min_tokens=4, stop_token_ids=[eos], logprobs=-1, prompt_logprobs=0)
    for output, p in zip(llm.generate([PROMPTS[2], PROMPTS[0]], [random, greedy], use_tqdm=False), (random, greedy)):
        c, prompt = output.outputs[0], output.prompt_token_ids
        rows = logits((*prompt, *c.token_ids))
        assert c.logprobs is not None and (c.cumulative_logprob is None) == mode.endswith("logits")
        for i, (entry, token) in enumerate(zip(c.logprobs, c.token_ids)):
            raw = rows[len(prompt) - 1 + i]
            right = raw if mode.startswith("raw") else processed(raw, p, {eos} if p is greedy else set())
            right = log_softmax(right) if mode.endswith("logprobs") else right
            assert len(entry) == VOCAB and next(iter(entry)) == token
            found = np.array([entry[j].logprob for j in range(VOCAB)])
            np.testing.assert_array_equal(np.isinf(found), np.isinf(right))
            np.testing.assert_allclose(found, right, atol=5e-4)
            assert entry[token].rank == (found >= found[token]).sum()
            if mode.endswith("logprobs"):
                assert np.exp(found).sum() == pytest.approx(1, abs=1e-5)
        if p is greedy:
            right = logits(tuple(prompt)) if mode.endswith("logits") else log_softmax(logits(tuple(prompt)))
            found = [output.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]
            np.testing.assert_allclose(found, [right[i - 1, prompt[i]] for i in range(1, len(prompt))], atol=ATOL)


def processed(raw: np.ndarray, p: SamplingParams, forbidden: set[int]) -> np.ndarray:
    """Semantics 3.2 of one row, for these parameters."""
    x = raw.copy()
    x[list(forbidden)] = -np.inf
    if p.temperature == 0:
        return x
    x = x / p.temperature
    x[x < np.sort(x)[-p.top_k]] = -np.inf
    order = np.argsort(-x)
    mass = np.cumsum(np.exp(log_softmax(x[order])))
    x[order[np.searchsorted(mass, p.top_p) + 1 :]] = -np.inf
    return x


def test_flat_logprobs_read_as_the_lists_do() -> None:
    p = replace(RANDOM, max_tokens=5, logprobs=3, prompt_logprobs=2, logprob_token_ids=[1, 2])
    plain, flat = (
        engine(backend=BACKENDS[0]).generate([SHARED], q, use_tqdm=False)[0]
        for q in (p, replace(p, flat_logprobs=True))
    )
    for a, b in ((plain.prompt_logprobs, flat.prompt_logprobs), (plain.outputs[0].logprobs, flat.outputs[0].logprobs)):
        assert isinstance(a, list) and isinstance(b, FlatLogprobs)
        # a slot of float64 for each float32: nothing is lost
        assert list(b) == a and b == a and b[-1] == a[-1] and list(b[2:4]) == a[2:4] and len(b) == len(a)


def test_a_flat_container_is_small_and_checks_its_places() -> None:
    entry = {3: Logprob(-1.0, 2, "a"), 1: Logprob(-0.5, 1, "b")}
    flat = FlatLogprobs([None, entry])
    assert (list(flat.token_ids), list(flat.start_indices), list(flat.end_indices)) == ([3, 1], [0, 0], [0, 2])
    assert flat[0] is None and flat[1] == entry and list(flat[1]) == [3, 1]
    with pytest.raises(IndexError):
        flat[2]
    assert flat != FlatLogprobs([entry]) and repr(flat) == "FlatLogprobs(2 positions, 2 logprobs)"


def test_a_prompt_of_one_token_has_none() -> None:
    (output,) = engine(backend=BACKENDS[0]).generate([[4]], replace(GREEDY, prompt_logprobs=2), use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_deltas_bring_prompt_logprobs_once() -> None:
    llm = engine(backend=BACKENDS[0], max_num_batched_tokens=16)
    llm.add_request("a", SHARED, replace(GREEDY, max_tokens=4, prompt_logprobs=1, output_kind=1, logprobs=0))
    found = []
    while llm.has_unfinished_requests():
        found += llm.step()
    assert len(found) > 1
    assert_prompt(found[0], 1)
    assert all(o.prompt_logprobs is None for o in found[1:])
    assert [len(o.outputs[0].logprobs) for o in found] == [len(o.outputs[0].token_ids) for o in found]


@pytest.mark.parametrize("wrong, message", [
    ({"prompt_logprobs": -2}, "prompt_logprobs -2 is not a whole number of at least -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs 21 asks for 21 a token: more than 20"),
    ({"prompt_logprobs": -1}, f"prompt_logprobs -1 asks for {VOCAB} a token"),
    ({"prompt_logprobs": 1, "prompt_logprob_start": 3}, "prompt_logprob_start 3 is beyond a prompt of 3 tokens"),
    ({"prompt_logprob_start": 3}, "prompt_logprob_start 3 without prompt_logprobs"),
    ({"prompt_logprob_token_ids": [[1]]}, "1 lists of ids: give one for each of the 2 tokens"),
    ({"prompt_logprob_token_ids": [[1], [VOCAB]]}, rf"prompt_logprob_token_ids \[{VOCAB}\] are outside"),
    ({"logprob_token_ids": [VOCAB]}, rf"logprob_token_ids \[{VOCAB}\] are outside"),
    ({"logprob_token_ids": range(129)}, "logprob_token_ids has 129 ids: at most 128"),
    ({"logprob_token_ids": 3}, "logprob_token_ids"),
    ({"logprobs": 21}, "logprobs 21 asks for 21 a token"),
    ({"flat_logprobs": 1}, "flat_logprobs 1"),
])  # fmt: skip
def test_what_cannot_be_served_is_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().generate([[1, 2, 3]], SamplingParams(temperature=0, **wrong), use_tqdm=False)


@functools.cache
def small() -> LLM:
    return engine(backend=BACKENDS[0])


def test_params_say_when_the_cache_is_not_read() -> None:
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprobs=1, prompt_logprob_start=9).skip_reading_prefix_cache is False
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams(logprobs=False).logprobs is None
    with pytest.raises(ValueError, match="logprobs_mode"):
        engine(backend=BACKENDS[0], logprobs_mode="cooked")
