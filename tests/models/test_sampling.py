"""The sampler against numpy in float64, on every installed backend."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from backends import BACKENDS

from octavo.engine.backend import get_backend
from octavo.engine.batch import edit_columns, pack_bits
from octavo.engine.sampling_params import request_key
from octavo.models import sampling as sampler
from octavo.models.interface import ArraySpec, Output, Sampling, map_tree
from octavo.models.logit_edits import MAX_STOP_IDS

V = 101
NEVER = float("-inf")
NO_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return _backend(request.param)


@functools.cache
def _backend(name):
    return get_backend(name)


@functools.cache
def _program(name, body):
    """body(x, rows, how, ops=...), which returns what it made and x, as a program of that backend."""

    def run(x, rows, how, *, ops):
        return (body(x, rows, how, ops), x), rows

    return _backend(name).compile(run, ("x", "rows", "how"), ("made", "rows"), "rows")


def _run(backend, body, x, rows, how=None):
    """What body makes of x and rows, as numpy. It must leave x as it was."""
    rows = {name: _place(backend, value) for name, value in rows.items()}
    (made, after), _ = _program(backend.name, body)(np.asarray(x, np.float32), rows, how)
    np.testing.assert_array_equal(backend.read(after), np.asarray(x, np.float32))
    made = vars(made) if isinstance(made, Output) else made
    return map_tree(lambda a: None if a is None else backend.read(a), made)


def _place(backend, x):
    x = np.asarray(x)
    kind = {"f": "float32", "i": "int32", "u": "int32", "b": "bool"}[x.dtype.kind]
    return backend.place(x.astype(kind), ArraySpec(x.shape, (None,) * x.ndim, kind))


def _rows(num_rows, *, size=V, index=0, seed=0, min_tokens=0, stop_ids=(0,), **params):
    """Rows of one request each: prompts of 3 tokens, `index` tokens already out. A param is a number or one a row."""
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | NO_PENALTIES | params
    stops = (*stop_ids, *stop_ids[:1] * (MAX_STOP_IDS - len(stop_ids)))
    return {
        "num_computed": np.full(num_rows, 3) + index,
        "prompt_len": np.full(num_rows, 3),
        "keys": np.array([request_key(seed, i) for i in range(num_rows)]),
        "params": np.stack([np.broadcast_to(params[name], num_rows) for name in sampler.PARAMS], -1).astype(float),
        "min_tokens": np.broadcast_to(min_tokens, num_rows),
        "stop_ids": np.tile(stops, (num_rows, 1)),
        "tokens": np.full((num_rows, 9), 1),
        "edited": np.zeros(num_rows),
        # wide: only where a test may need them
        **(edit_columns([], num_rows, size) if num_rows < 1000 else {}),
    }


def _sample(backend, logits, rows, variant, mask=None, **static):
    """sampler.sample on all rows: the fields of its Output."""
    at = np.arange(len(logits), dtype=np.int32)
    return _run(
        backend,
        sampler.sample,
        logits,
        rows,
        Sampling(at, at, variant, mask_RW=None if mask is None else pack_bits(mask), **static),
    )


def _unpacked(x, rows, words, ops):
    return sampler.unpack(words, x.shape[1], ops)


def _truncated(logits, rows, how, ops):
    return sampler.truncate(logits, {n: rows["params"][:, i : i + 1] for i, n in enumerate(sampler.PARAMS)}, ops)


def _truncate(backend, logits, **params):
    return _run(backend, _truncated, logits, _rows(len(logits), **params))


def _noise(x, rows, how, ops):
    return ops.gumbel(rows["keys"], rows["num_computed"] - rows["prompt_len"], x.shape[1])


def _gumbel(backend, rows, size):
    return _run(backend, _noise, np.zeros((len(rows["keys"]), size)), rows)


def _logits(num_rows, size=V, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, (num_rows, size)).astype(np.float32)


def _kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that truncation leaves of one row, by sorting, in float64: min_p, then top_k, then top_p."""
    logits = logits.astype(np.float64)
    p = np.exp(logits - logits.max())
    p[p < min_p] = 0
    if top_k:
        p[logits < np.sort(logits)[::-1][min(top_k, len(p)) - 1]] = 0
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(len(p), bool)
    kept[order[before < top_p * p.sum()]] = True
    return kept & (p > 0)


def _log_softmax(logits):
    x = logits.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


CUTS = {
    "off": {},
    "k1": {"top_k": 1},
    "k7": {"top_k": 7},
    "k-all": {"top_k": V},
    "k-more-than-all": {"top_k": V + 50},
    "p0.5": {"top_p": 0.5},
    "p0.95": {"top_p": 0.95},
    "p-tiny": {"top_p": 1e-6},
    "min0.1": {"min_p": 0.1},
    "min1": {"min_p": 1.0},
    "k7-p0.7": {"top_k": 7, "top_p": 0.7},
    "min0.02-k9-p0.9": {"min_p": 0.02, "top_k": 9, "top_p": 0.9},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_truncation_keeps_what_sorting_keeps(backend, cut):
    logits = _logits(16)
    got = _truncate(backend, logits, **cut)
    np.testing.assert_array_equal(np.isfinite(got), [_kept(row, **cut) for row in logits])
    np.testing.assert_array_equal(got[np.isfinite(got)], logits[np.isfinite(got)])


def test_rows_of_one_batch_are_truncated_each_in_its_way(backend):
    logits, cuts = _logits(len(CUTS)), list(CUTS.values())
    columns = {n: [cut.get(n, d) for cut in cuts] for n, d in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items()}
    expected = [_kept(row, **cut) for row, cut in zip(logits, cuts)]
    np.testing.assert_array_equal(np.isfinite(_truncate(backend, logits, **columns)), expected)


def test_ties_at_the_edge_stay(backend):
    logits = np.array([[3.0, 1.0, 2.0, 2.0, -1.0, 2.0]])
    np.testing.assert_array_equal(np.isfinite(_truncate(backend, logits, top_k=2))[0], [1, 0, 1, 1, 0, 1])
    # the first two hold 0.36 + 0.20: the edge of 0.5 falls on a tie
    probs = np.array([[0.36, 0.2, 0.2, 0.2, 0.04]])
    np.testing.assert_array_equal(np.isfinite(_truncate(backend, np.log(probs), top_p=0.5))[0], [1, 1, 1, 1, 0])


def test_top_p_counts_what_top_k_left(backend):
    probs = np.array([[0.4, 0.2, 0.2 - 1e-3, 0.1, 0.1 + 1e-3]])
    # 0.4 is two thirds of what top_k leaves, but 0.6 of the whole is not enough
    np.testing.assert_array_equal(
        np.isfinite(_truncate(backend, np.log(probs), top_k=2, top_p=0.65))[0], [1, 0, 0, 0, 0]
    )
    np.testing.assert_array_equal(np.isfinite(_truncate(backend, np.log(probs), top_p=0.65))[0], [1, 1, 1, 0, 0])


def test_min_p_is_of_the_distribution_after_temperature(backend):
    logits = np.log([[0.5, 0.3, 0.2]]).repeat(200, 0)
    cold = _sample(backend, logits, _rows(200, temperature=0.25, min_p=0.2), "truncate")["token_ids_R"]
    warm = _sample(backend, logits, _rows(200, temperature=1.0, min_p=0.2), "truncate")["token_ids_R"]
    assert set(cold) == {0}  # (0.3 / 0.5) ** 4 is 0.13
    assert set(warm) == {0, 1, 2}


@pytest.mark.parametrize("variant", sampler.VARIANTS)
def test_greedy_rows_take_the_first_of_the_greatest_in_every_variant(backend, variant):
    logits = _logits(6)
    logits[:, [20, 40]] = 50.0
    logits[3, 11] = 60.0
    got = _sample(backend, logits, _rows(6, temperature=0.0), variant)["token_ids_R"]
    np.testing.assert_array_equal(got, [20, 20, 20, 11, 20, 20])


def test_a_row_draws_the_same_token_in_every_variant_and_batch(backend):
    logits, rows = _logits(8), _rows(8, temperature=0.8)
    alone = [
        _sample(backend, logits[i : i + 1], {k: v[i : i + 1] for k, v in rows.items()}, "sample")["token_ids_R"][0]
        for i in range(8)
    ]
    for variant in sampler.VARIANTS[1:]:
        np.testing.assert_array_equal(_sample(backend, logits, rows, variant)["token_ids_R"], alone)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_stop_ids_cannot_be_sampled_before_min_tokens(backend, temperature):
    logits = _logits(4)
    logits[:, [5, 9]] = 90.0
    rows = _rows(4, temperature=temperature, min_tokens=np.array([0, 2, 3, 4]), stop_ids=(5, 9), index=2)
    got = _sample(backend, logits, rows, "edits")["token_ids_R"]
    assert set(got[:2]) <= {5, 9}
    assert not set(got[2:]) & {5, 9}
    if not temperature:
        masked = np.where(np.isin(np.arange(V), (5, 9)), NEVER, logits)
        np.testing.assert_array_equal(got[2:], masked[2:].argmax(-1))


def test_min_tokens_leaves_rows_without_stop_ids_alone(backend):
    logits = _logits(3)
    logits[:, 0] = 90.0  # an empty list of stop ids is padded with 0
    got = _sample(backend, logits, _rows(3, temperature=0.0), "edits")["token_ids_R"]
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("variant", sampler.VARIANTS)
def test_logprobs_are_those_of_the_raw_logits(backend, variant):
    logits = _logits(5)
    logits[:, 7] = 30.0
    mask = np.ones((5, V), bool)
    mask[:, 8] = False
    rows = _rows(5, temperature=0.6, top_k=20, min_tokens=1, stop_ids=(7,))
    got = _sample(backend, logits, rows, variant, mask=mask, num_logprobs=4)
    expected, ids = _log_softmax(logits), got["token_ids_R"]
    np.testing.assert_allclose(got["logprobs_R"], expected[np.arange(5), ids], atol=3e-5)
    np.testing.assert_array_equal(got["ranks_R"], (logits >= logits[np.arange(5), ids][:, None]).sum(-1))
    order = np.argsort(-logits, -1)[:, :4]
    np.testing.assert_array_equal(got["top_ids_RN"], order)
    np.testing.assert_allclose(got["top_logprobs_RN"], np.take_along_axis(expected, order, -1), atol=3e-5)


def test_only_the_logprobs_asked_for_come_back(backend):
    logits, rows = _logits(2), _rows(2)
    none = _sample(backend, logits, rows, "sample")
    assert [k for k, v in none.items() if v is not None] == ["token_ids_R"]
    zero = _sample(backend, logits, rows, "sample", num_logprobs=0)
    assert [k for k, v in zero.items() if v is not None] == ["token_ids_R", "logprobs_R", "ranks_R"]
    whole = _sample(backend, logits, rows, "sample", num_logprobs=V)
    np.testing.assert_allclose(np.exp(whole["top_logprobs_RN"].astype(float)).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("variant", sampler.VARIANTS)
def test_the_digest_is_of_the_raw_logits(backend, variant):
    logits = _logits(3)
    plain = _sample(backend, logits, _rows(3), "greedy", digest=True)["digests_R"]
    rows = _rows(3, min_tokens=1, stop_ids=(2,), top_k=3)
    np.testing.assert_array_equal(_sample(backend, logits, rows, variant, digest=True)["digests_R"], plain)
    assert len(set(plain)) == 3


@pytest.mark.parametrize("size", [1, 31, 32, 33, 97, 128])
def test_a_packed_mask_is_read_bit_by_bit(backend, size):
    allowed = np.random.default_rng(size).random((5, size)) < 0.5
    words = pack_bits(allowed)
    assert words.dtype == np.int32 and words.shape == (5, -(-size // 32))
    for r, i in np.ndindex(allowed.shape):
        assert (int(words[r, i // 32]) >> (i % 32) & 1) == allowed[r, i]
    got = _run(backend, _unpacked, np.zeros((5, size)), {}, words)
    np.testing.assert_array_equal(got, allowed)


@pytest.mark.parametrize("variant", sampler.VARIANTS)
def test_a_grammar_mask_is_obeyed(backend, variant):
    mask = np.zeros((50, V), bool)
    mask[:, [3, 60]] = True
    got = _sample(backend, _logits(50), _rows(50), variant, mask=mask)["token_ids_R"]
    assert set(got) == {3, 60}


# chi-square quantiles at 0.999, by degrees of freedom
CHI2 = {2: 13.8, 7: 24.3}


def _assert_frequencies(ids, probs):
    count = np.bincount(ids, minlength=len(probs))
    assert not count[probs == 0].any()
    expected = (probs * len(ids))[probs > 0]
    statistic = ((count[probs > 0] - expected) ** 2 / expected).sum()
    assert statistic < CHI2[len(expected) - 1], (count, probs)


PROBS = np.array([0.3, 0.05, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_requests_draw_from_the_distribution(backend, temperature):
    logits = np.tile(np.log(PROBS), (20_000, 1))
    got = _sample(backend, logits, _rows(20_000, temperature=temperature), "sample")["token_ids_R"]
    probs = PROBS ** (1 / temperature)
    _assert_frequencies(got, probs / probs.sum())


def test_the_tokens_of_one_request_draw_from_the_distribution(backend):
    rows = _rows(20_000)
    rows["keys"] = np.tile(rows["keys"][:1], (20_000, 1))
    rows["num_computed"] = 3 + np.arange(20_000)
    got = _sample(backend, np.tile(np.log(PROBS), (20_000, 1)), rows, "sample")["token_ids_R"]
    _assert_frequencies(got, PROBS)


def test_truncated_draws_are_from_what_is_left(backend):
    logits = np.tile(np.log(PROBS), (20_000, 1))
    got = _sample(backend, logits, _rows(20_000, top_k=3), "truncate")["token_ids_R"]
    probs = np.where(PROBS >= 0.15, PROBS, 0)
    _assert_frequencies(got, probs / probs.sum())


def _unmurmur(h):
    """The word that murmur3's finaliser takes to h."""
    for factor, shift in ((None, 16), (0xC2B2AE35, 13), (0x85EBCA6B, 16)):
        if factor:
            h = h * pow(factor, -1, 2**32) % 2**32
        x = h
        for _ in range(32 // shift):
            x = h ^ (x >> shift)
        h = x
    return h


def _murmur(h):
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ (h >> shift)) * factor % 2**32
    return h ^ (h >> 16)


def _key_with(token, word):
    """A request key under which the noise of `token`, at output index 0, comes from this hash."""
    k0 = _murmur(1)
    k1 = _unmurmur(word) ^ _murmur((token * 0x9E3779B9 % 2**32) ^ k0)
    return np.array([1, _unmurmur(k1) ^ k0], np.uint32).view(np.int32)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
def test_the_only_token_left_is_drawn_whatever_its_noise(backend, word):
    logits = _logits(1)
    logits[0, 77] = 40.0
    rows = _rows(1, top_k=1) | {"keys": _key_with(77, word)[None]}
    noise = _gumbel(backend, rows, V)
    u = (word + 0.5) / 2**32
    # fp32 knows no number between 1 - 2^-24 and 1
    np.testing.assert_allclose(noise[0, 77], -np.log(-np.log1p(-min(u, 1 - 2**-24))), atol=1e-4)
    assert _sample(backend, logits, rows, "truncate")["token_ids_R"] == [77]


@pytest.mark.skipif(len(BACKENDS) < 2, reason="compares two backends")
def test_both_backends_draw_the_same_tokens():
    logits, outputs = _logits(300, 503), []
    columns = {"temperature": np.linspace(0, 2, 300), "top_k": np.arange(300) % 60, "top_p": np.linspace(0.1, 1, 300)}
    for name in BACKENDS:
        outputs.append(_sample(_backend(name), logits, _rows(300, index=5, **columns), "truncate", num_logprobs=3))
    for name, value in outputs[0].items():
        if value is not None:
            np.testing.assert_allclose(value, outputs[1][name], atol=1e-5)


@pytest.mark.skipif(len(BACKENDS) < 2, reason="compares two backends")
def test_both_backends_make_the_same_noise():
    rows = _rows(20, seed=7) | {"num_computed": 3 + np.arange(20)}
    both = [_gumbel(_backend(name), rows, 1000) for name in BACKENDS]
    # equal hashes; the logarithms of two libraries may differ in the last bit
    np.testing.assert_allclose(both[0], both[1], rtol=3e-6, atol=3e-7)
