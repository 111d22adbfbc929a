"""Edits, penalties and processors against the oracle, on every installed backend: random rows, odd sizes, poison."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import sampling_oracle as oracle
from backends import BACKENDS
from sampling_oracle import Asked

from octavo.engine.backend import get_backend
from octavo.engine.batch import Shapes, edit_values, pack_bits, row_values
from octavo.engine.logits_processors import columns_of
from octavo.engine.plan import Admission, Edits
from octavo.engine.sampling_params import request_key
from octavo.models import sampling as sampler
from octavo.models.interface import ArraySpec, Sampling
from octavo.models.logit_edits import MAX_BIAS, LogitsProcessor, process

LENGTH, SCRATCH, DRAWS = 50, 40, 300
SHAPES = replace(Shapes.chain(SCRATCH, 64, LENGTH, 8, 101), admitted=(SCRATCH,), known=(LENGTH,))


def _no_repeat(logits, history, params, ops):
    """Takes `less` from the id that came last."""
    last_R = history.tokens_RL[ops.arange(logits.shape[0], like=history.num_known_R), history.num_known_R - 1]
    same_RV = ops.arange(logits.shape[1], like=last_R)[None] == last_R[:, None]
    return ops.xp.where(same_RV, logits - params["less"], logits)


def _soften(logits, history, params, ops):
    """logits * factor + shift * how many ids are prompt"""
    return logits * params["factor"] + params["shift"] * history.prompt_len_R[:, None]


PROCESSORS = (
    LogitsProcessor("no_repeat", _no_repeat, {"less": 5.0}),
    LogitsProcessor("soften", _soften, {"factor": 0.5, "shift": 0.0}),
)


def _oracle_processors(extra):
    def no_repeat(x, prompt, output):
        x[[*prompt, *output][-1]] -= extra["no_repeat"].get("less", 5.0)
        return x

    def soften(x, prompt, output):
        return x * extra["soften"].get("factor", 0.5) + extra["soften"].get("shift", 0.0) * len(prompt)

    return tuple(f for name, f in (("no_repeat", no_repeat), ("soften", soften)) if name in extra)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


@functools.cache
def _programs(name):
    """shape and sample as programs of that backend: (logits, rows, sampling) -> result, rows."""

    def shape(x, rows, sampling, *, ops):
        param = {name: rows["params"][sampling.rows_R, i][:, None] for i, name in enumerate(sampler.PARAMS)}
        return sampler.shape(x, rows, param, sampling, ops, PROCESSORS), rows

    def sample(x, rows, sampling, *, ops):
        return sampler.sample(x, rows, sampling, ops, PROCESSORS).token_ids_R, rows

    compile = get_backend(name).compile
    return [compile(f, ("x", "rows", "sampling"), ("made", "rows"), "rows") for f in (shape, sample)]


def _admission(row, asked, prompt, output, seed=0, extra=None):
    edits = Edits(asked.allowed, tuple(asked.bias.items()), asked.bad_words, columns_of(extra or {}, PROCESSORS))
    params = tuple(float(getattr(asked, name)) for name in sampler.PARAMS)
    known = (*prompt, *output)
    return Admission(row, known, len(known), len(prompt), request_key(seed), params, asked.min_tokens, asked.stop_ids,
                     None if edits == Edits() else edits)  # fmt: skip


def _rows(admitted, size, rng):
    """CacheState.rows of these; whatever means nothing is poison."""
    _, values = row_values(admitted, SHAPES, SCRATCH)
    _, edits = edit_values(admitted, SHAPES, SCRATCH, size)
    rows = values | edits
    for r in range(SCRATCH):
        known = rows["num_computed"][r] if r < len(admitted) else 0
        # ids that would count, and ids that would not
        rows["tokens"][r, known:] = rng.choice([*range(size), -1, 2**31 - 1], LENGTH - known)
        rows["bias"][r, rows["bias_ids"][r] < 0] = np.nan
        if r >= len(admitted) or not admitted[r].edits:
            for name in edits:
                x = rows[name][r]
                # as left behind by another request: ids stay ids
                x[:] = rng.integers(0, 300, x.shape) if x.dtype == np.int32 else np.nan
        if r >= len(admitted):
            rows["params"][r] = np.nan
    return rows


def _run(backend, which, logits, admitted, variant, *, mask=None, seed=0, size=None):
    """What a program makes of these rows, in a shuffled order and beside padding."""
    rng = np.random.default_rng(seed)
    rows, count = _rows(admitted, logits.shape[1], rng), len(admitted)
    order = rng.permutation(count)
    at = np.concatenate([order, np.full(3, SCRATCH - 1)]).astype(np.int32)
    x = np.concatenate([logits[order], np.full((3, logits.shape[1]), np.nan)]).astype(np.float32)
    words = None if mask is None else np.concatenate([pack_bits(mask[order]), np.full((3, 1), -1).repeat(
        -(-logits.shape[1] // 32), 1).astype(np.int32)])  # fmt: skip
    placed = {n: backend.place(v, ArraySpec(v.shape, (None,) * v.ndim, v.dtype.name)) for n, v in rows.items()}
    made, _ = _programs(backend.name)[which](x, placed, Sampling(at, at, variant, mask_RW=words))
    out = np.empty((count, *made.shape[1:]))
    out[order] = backend.read(made)[:count]
    return out


def _world(size, seed, count=24):
    """Random requests: logits, what each asks, its prompt and output, and its processors."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, size)).astype(np.float32)
    requests = [_request(size, rng) for _ in range(count)]
    return logits, requests


def _request(size, rng):
    few = max(1, min(size, 6))
    prompt = rng.integers(0, min(size, 9), rng.integers(1, 25)).tolist()
    output = rng.integers(0, min(size, 5), rng.integers(0, 25)).tolist()
    if len(prompt) > 1 and rng.random() < 0.2:
        prompt[0] = -1  # an embedding
    on = lambda: rng.random() < 0.5  # noqa: E731
    words = [tuple(rng.integers(0, few, n).tolist()) for n in rng.integers(1, 4, rng.integers(0, 6))]
    if output and on():
        words.append((*output[-rng.integers(1, 4) :], int(rng.integers(size))))
    ids = lambda n: tuple(rng.choice(size, min(n, size), replace=False).tolist())  # noqa: E731
    extra = {}
    if on():
        extra["no_repeat"] = {"less": float(rng.normal())} if on() else {}
    if on():
        extra["soften"] = {"factor": 0.7, "shift": 1.5} if on() else {}
    asked = Asked(
        temperature=float(rng.choice([0.0, 0.6, 1.3])),
        top_k=int(rng.integers(0, 20)) if on() else 0,
        top_p=float(rng.uniform(0.1, 1)) if on() else 1.0,
        min_p=float(rng.uniform(0, 0.2)) if on() else 0.0,
        repetition_penalty=float(rng.uniform(0.5, 2)) if on() else 1.0,
        frequency_penalty=float(rng.uniform(-2, 2)) if on() else 0.0,
        presence_penalty=float(rng.uniform(-2, 2)) if on() else 0.0,
        allowed=ids(rng.integers(1, 30)) if on() else (),
        bad_words=tuple(words) if on() else (),
        bias={i: float(rng.normal(0, 5)) for i in ids(rng.integers(1, 20))} if on() else {},
        min_tokens=int(rng.integers(0, 30)) if on() else 0,
        stop_ids=ids(3),
        grammar=frozenset(ids(rng.integers(1, size + 1))),
        processors=_oracle_processors(extra) if extra else (),
    )
    return asked, prompt, output, extra


def _admitted(requests):
    return [_admission(i, *request[:3], seed=i, extra=request[3]) for i, request in enumerate(requests)]


@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("size", [1, 2, 33, 101, 515])
def test_logits_are_shaped_as_the_oracle_says(backend, size, masked):
    logits, requests = _world(size, seed=size)
    mask = np.array([[i in r[0].grammar for i in range(size)] for r in requests]) if masked else None
    got = _run(backend, 0, logits, _admitted(requests), "processors", mask=mask)
    for x, (asked, prompt, output, _), y in zip(logits, requests, got, strict=True):
        want = oracle.shaped(x, asked if masked else replace(asked, grammar=None), prompt, output)
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_oracle(backend, seed):
    logits, requests = _world(101, seed)
    got = _run(backend, 1, logits, _admitted(requests), "processors", seed=seed)
    close = 0
    for i, (x, (asked, prompt, output, _)) in enumerate(zip(logits, requests, strict=True)):
        want, ahead = oracle.token(x, replace(asked, grammar=None), prompt, output, seed=i)
        assert got[i] == want or ahead < 1e-4, i
        close += ahead < 1e-4
    assert close <= 1


@pytest.mark.parametrize("variant", ["edits", "penalties"])
def test_a_smaller_variant_does_all_that_its_rows_ask(backend, variant):
    logits, requests = _world(101, seed=9)
    plain = {"grammar": None, "processors": ()}
    if variant == "edits":
        plain |= {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    requests = [(replace(asked, **plain), prompt, output, {}) for asked, prompt, output, _ in requests]
    small, large = (_run(backend, 0, logits, _admitted(requests), v) for v in (variant, "processors"))
    # bit by bit: who asks for nothing of the larger must not notice it
    np.testing.assert_array_equal(small, large)
    for x, (asked, prompt, output, _), y in zip(logits, requests, small, strict=True):
        np.testing.assert_allclose(y, oracle.shaped(x, asked, prompt, output), rtol=2e-6, atol=2e-5)


def test_rows_that_ask_for_nothing_keep_their_bits(backend):
    logits = np.random.default_rng(0).normal(0, 9, (8, 77)).astype(np.float32)
    logits[2, 5] = 0.0
    admitted = [_admission(i, Asked(), [1, 2, 3], [1, 1]) for i in range(8)]
    np.testing.assert_array_equal(_run(backend, 0, logits, admitted, "processors"), logits)


def _ids_left(backend, asked, output=(), size=12, variant="edits"):
    logits = np.random.default_rng(1).normal(0, 1, (1, size)).astype(np.float32)
    got = _run(backend, 0, logits, [_admission(0, asked, [3], output)], variant)
    return np.flatnonzero(np.isfinite(got[0])).tolist()


def test_bad_words_wait_for_their_beginning(backend):
    words = ((4, 5, 6), (7,), (5, 5))
    everything = set(range(12))
    for output, banned in (([], {7}), ([4], {7}), ([4, 5], {5, 6, 7}), ([5], {5, 7}), ([4, 5, 6], {7})):
        assert set(_ids_left(backend, Asked(bad_words=words), output)) == everything - banned


def test_the_prompt_is_no_beginning_of_a_bad_word(backend):
    # the prompt is [3]
    assert 5 in _ids_left(backend, Asked(bad_words=((3, 5),)))
    assert 5 not in _ids_left(backend, Asked(bad_words=((3, 5),)), [3])


def test_what_would_leave_nothing_gives_way(backend):
    only = Asked(allowed=(4, 9), stop_ids=(4, 9), min_tokens=3)
    assert _ids_left(backend, only) == [4, 9]
    assert _ids_left(backend, replace(only, stop_ids=(4,))) == [9]
    assert _ids_left(backend, replace(only, bad_words=((4,), (9,)))) == [4, 9]
    assert _ids_left(backend, replace(only, bad_words=((4,),), stop_ids=(9,))) == [9]


def test_a_bias_cannot_bring_back_what_is_forbidden(backend):
    asked = Asked(temperature=0, bias={4: 1e9, 5: 1e9, 6: 1e9}, allowed=(5, 6, 7), bad_words=((5,),), stop_ids=(6,),
                  min_tokens=1)  # fmt: skip
    assert _ids_left(backend, asked) == [7]
    assert 6 in _ids_left(backend, asked, [7])


def test_as_many_entries_as_a_row_holds(backend):
    size = MAX_BIAS + 5
    bias = {i: float(i) for i in range(MAX_BIAS)}
    words = tuple((i, i + 1, i + 2, i) for i in range(250))
    asked = Asked(bias=bias, bad_words=words)
    logits = np.zeros((1, size), np.float32)
    got = _run(backend, 0, logits, [_admission(0, asked, [3], [249, 250, 251])], "edits")
    np.testing.assert_array_equal(got[0], oracle.shaped(logits[0], asked, [3], [249, 250, 251]))
    assert np.flatnonzero(np.isinf(got)).tolist() == [249]


# chi-square quantiles at 0.999, by degrees of freedom
CHI2 = dict(enumerate((10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3), 1))
MIXTURES = {
    "temperature": Asked(temperature=0.7),
    "hot": Asked(temperature=2.0),
    "top_k": Asked(top_k=4),
    "top_p": Asked(top_p=0.7),
    "min_p": Asked(min_p=0.15),
    "repetition": Asked(repetition_penalty=1.6),
    "frequency": Asked(frequency_penalty=0.5),
    "presence": Asked(presence_penalty=-0.8),
    "bias": Asked(bias={3: 1.0, 5: -2.0}),
    "cuts": Asked(temperature=1.3, top_k=8, top_p=0.9, min_p=0.03),
    "penalties": Asked(temperature=0.9, repetition_penalty=0.7, frequency_penalty=-0.2, presence_penalty=0.4, top_k=9),
    "all": Asked(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
                 presence_penalty=-0.3, allowed=tuple(range(1, 12)), bad_words=((2, 4),), bias={4: 3.0, 6: 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_drawn_from_the_oracles_distribution(backend, name):
    asked, prompt, output = MIXTURES[name], [1, 2, 2, 7], [3, 3, 5, 2]
    logits = np.random.default_rng(5).normal(0, 1, 12).astype(np.float32)
    want = oracle.probabilities(logits, asked, prompt, output)
    values = row_values([_admission(0, asked, prompt, output)], SHAPES, SCRATCH)[1]
    values |= edit_values([_admission(0, asked, prompt, output)], SHAPES, SCRATCH, 12)[1]
    rows, count = {n: v[:1].repeat(DRAWS, 0) for n, v in values.items()}, np.zeros(12)
    at, x = np.arange(DRAWS, dtype=np.int32), np.tile(logits, (DRAWS, 1))
    for i in range(8):
        rows["keys"] = np.array([request_key(i * DRAWS + r) for r in range(DRAWS)], np.int32)
        placed = {n: backend.place(v, ArraySpec(v.shape, (None,) * v.ndim, v.dtype.name)) for n, v in rows.items()}
        made, _ = _programs(backend.name)[1](x, placed, Sampling(at, at, "penalties"))
        count += np.bincount(backend.read(made), minlength=12)
    assert not count[want == 0].any()
    expected = want[want > 0] * count.sum()
    statistic = ((count[want > 0] - expected) ** 2 / expected).sum()
    assert statistic < CHI2[len(expected) - 1], (name, count, want * count.sum())


NOT_LOGITS = {
    "a column": lambda x, history, params, ops: x[:, :1],
    "a row": lambda x, history, params, ops: x[0],
    "some ids": lambda x, history, params, ops: x[:, :5],
    "whole numbers": lambda x, history, params, ops: ops.xp.astype(x, ops.xp.int32),
    "truths": lambda x, history, params, ops: x > 0,
    "a number": lambda x, history, params, ops: 1.0,
    "nothing": lambda x, history, params, ops: None,
}


@pytest.mark.parametrize("name", NOT_LOGITS)
def test_what_a_processor_returns_is_never_broadcast_or_cast(backend, name):
    at = backend.own(np.zeros(2, np.int32))
    rows = backend.own({"processors": np.ones((1, 8), np.float32), "edited": np.ones(1, np.int32)})
    x = backend.own(np.zeros((2, 9), np.float32))
    with pytest.raises(ValueError, match=f"logits processor '{name}' returned .*9"):
        process(x, rows, at, None, [LogitsProcessor(name, NOT_LOGITS[name])], backend.ops)
