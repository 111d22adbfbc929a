"""A whole batch in one program: the tokens of LLM.generate, and usable inside a user's own jit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from oracle import logits
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams
from octavo.engine.functional import Generated, generate, init_cache, pad_prompts, sampling_columns

EXAMPLE = Path(__file__).parents[2] / "examples" / "best_of_n.py"
MANY = 12  # tokens


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return engine(backend=request.param)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, eos: int = -1) -> Generated:
    """generate, jitted in JAX."""
    ids, lengths = pad_prompts(prompts)
    cache = init_cache(llm.model, llm.backend, llm.layout, *ids.shape, MANY)
    columns, variant = sampling_columns(params, len(prompts)), params.variant
    options: dict[str, Any] = {"model": llm.model, "backend": llm.backend, "layout": llm.layout}

    def call(weights: Any, cache: Any, ids: Any, lengths: Any, columns: Any) -> Generated:
        return generate(weights, cache, ids, lengths, MANY, columns=columns, variant=variant, eos=eos, **options)

    if llm.backend.name == "jax":
        import jax

        call = jax.jit(call, donate_argnums=1)
    return call(llm.runner.weights, cache, ids, lengths, columns)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_tokens_are_those_of_the_engine(llm: LLM, params: SamplingParams) -> None:
    params = replace(params, max_tokens=MANY)
    made = run(llm, PROMPTS, params)
    assert np.asarray(made.token_ids_SM).tolist() == tokens(llm, PROMPTS, params)
    assert np.asarray(made.num_tokens_S).tolist() == [MANY] * len(PROMPTS)


def test_columns_are_never_ignored(llm: LLM) -> None:
    """Without a variant, sampling params mean what they say."""
    ids, lengths = pad_prompts(PROMPTS[:4])
    cache = init_cache(llm.model, llm.backend, llm.layout, *ids.shape, MANY)
    params = replace(RANDOM, max_tokens=MANY)
    made = generate(llm.runner.weights, cache, ids, lengths, MANY, model=llm.model, backend=llm.backend,
                    layout=llm.layout, columns=sampling_columns(params, 4))  # fmt: skip
    assert np.asarray(made.token_ids_SM).tolist() == tokens(llm, PROMPTS[:4], params)


EDITED = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    "edits": {"logit_bias": {4: 6.0, 9: 5.0}, "allowed_token_ids": range(3, 60)},
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "whole"])
def test_edits_and_penalties_are_those_of_the_engine(llm: LLM, named: bool) -> None:
    """Some sequences ask for them and some do not; what was sampled is history."""
    each = [
        replace(RANDOM, max_tokens=MANY, **asked)
        for asked in ({}, *EDITED.values(), EDITED["penalties"] | EDITED["edits"])
    ]
    ids, lengths = pad_prompts(PROMPTS[:4])
    cache = init_cache(llm.model, llm.backend, llm.layout, *ids.shape, MANY)
    made = generate(
        llm.runner.weights, cache, ids, lengths, MANY, model=llm.model, backend=llm.backend, layout=llm.layout,
        columns=sampling_columns(each, 4, vocab_size=VOCAB), variant="penalties" if named else None,
    )  # fmt: skip
    want = tokens(llm, PROMPTS[:4], each)
    assert np.asarray(made.token_ids_SM).tolist() == want
    plain = tokens(llm, PROMPTS[:4], replace(RANDOM, max_tokens=MANY))
    assert [a == b for a, b in zip(want, plain, strict=True)] == [True, False, False, False]


def test_logprobs_are_those_of_the_dense_oracle(llm: LLM) -> None:
    made = run(llm, PROMPTS[:3], replace(RANDOM, max_tokens=MANY))
    for prompt, ids, got in zip(PROMPTS, np.asarray(made.token_ids_SM), np.asarray(made.logprobs_SM), strict=False):
        x = logits(spec_of(TINY), numpy_weights(TINY), prompt + ids.tolist())[len(prompt) - 1 : -1]
        want = x[np.arange(MANY), ids] - np.log(np.exp(x).sum(-1))
        assert np.abs(got - want).max() < 2e-5


def test_a_sequence_ends_with_its_end_of_text(llm: LLM) -> None:
    whole = tokens(llm, PROMPTS[:4], replace(GREEDY, max_tokens=MANY))
    eos = whole[1][3]
    made = run(llm, PROMPTS[:4], replace(GREEDY, max_tokens=MANY), eos=eos)
    for ids, count, want in zip(np.asarray(made.token_ids_SM), np.asarray(made.num_tokens_S), whole, strict=True):
        end = want.index(eos) + 1 if eos in want else MANY
        assert count == end and ids[:end].tolist() == want[:end]


def test_own_weights_give_own_tokens(llm: LLM) -> None:
    from octavo.models.interface import map_tree

    other = map_tree(lambda spec, x: llm.backend.place_weight(x, spec), llm.model.weights, numpy_weights(TINY, seed=1))
    ids, lengths = pad_prompts(PROMPTS[:2])
    cache = init_cache(llm.model, llm.backend, llm.layout, *ids.shape, MANY)
    made = generate(other, cache, ids, lengths, MANY,
                    model=llm.model, backend=llm.backend, layout=llm.layout)  # fmt: skip
    want = LLM(spec_of(TINY), weights=numpy_weights(TINY, seed=1), backend=llm.backend.name, max_num_seqs=4)
    assert np.asarray(made.token_ids_SM).tolist() == tokens(want, PROMPTS[:2], replace(GREEDY, max_tokens=MANY))


@pytest.mark.skipif("jax" not in BACKENDS, reason="jit is JAX's")
def test_inside_a_users_jit_it_compiles_once() -> None:
    import jax

    llm = engine(backend="jax")
    before = llm.backend.num_compiles()

    @jax.jit
    def count_token(weights: Any, cache: Any, ids: Any, lengths: Any, token: Any) -> Any:
        made = generate(weights, cache, ids, lengths, MANY, model=llm.model, backend=llm.backend, layout=llm.layout)
        return (made.token_ids_SM == token).sum(-1)

    ids, lengths = pad_prompts(PROMPTS[:3])
    cache = init_cache(llm.model, llm.backend, llm.layout, *ids.shape, MANY)
    want = tokens(llm, PROMPTS[:3], replace(GREEDY, max_tokens=MANY))
    before = llm.backend.num_compiles()
    for token in range(VOCAB):
        got = np.asarray(count_token(llm.runner.weights, cache, ids, lengths, np.int32(token)))
        assert got.tolist() == [t.count(token) for t in want]
    assert llm.backend.num_compiles() - before == 1


def test_a_cache_of_the_wrong_size_is_refused(llm: LLM) -> None:
    ids, lengths = pad_prompts(PROMPTS[:3])
    cache = init_cache(llm.model, llm.backend, llm.layout, 2, 8, 4)
    with pytest.raises(ValueError, match=r"for 2 sequences of 12 tokens, not for 3 of 43 \+ 12"):
        generate(llm.runner.weights, cache, ids, lengths, MANY, model=llm.model, backend=llm.backend, layout=llm.layout)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="stop_token_ids"):
        sampling_columns(replace(GREEDY, stop_token_ids=(3,)), 2)
    for form in (
        {"structured_outputs": {"regex": "a+"}},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(form))):
            sampling_columns(replace(RANDOM, **form), 1)
    with pytest.raises(NotImplementedError, match="extra_args"):
        sampling_columns(replace(GREEDY, extra_args={"mine": {}}), 2)
    for unheard in (
        {"prompt_logprobs": 0}, {"logprobs": 2}, {"logprob_token_ids": [3]}, {"truncate_prompt_tokens": 3},
        {"output_kind": 1}, {"stream_interval": 2}, {"n": 2, "temperature": 1.0}, {"min_tokens": 1}, {"stop": "a"},
        {"include_stop_str_in_output": True},
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"honour {next(iter(unheard))}"):
            sampling_columns(replace(GREEDY, **unheard), 2)
    for edit in ({"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}, {"bad_words": ["a"]}):
        with pytest.raises(ValueError, match=f"{next(iter(edit))}.* vocab_size"):
            sampling_columns(replace(GREEDY, **edit), 2)
    with pytest.raises(ValueError, match="need a tokenizer"):
        sampling_columns(replace(GREEDY, bad_words=["a"]), 2, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="at least one token"):
        pad_prompts([[1], []])


def test_best_of_n_keeps_the_likeliest(llm: LLM) -> None:
    spec = importlib.util.spec_from_file_location("best_of_n", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    best = module.best_of_n(llm, PROMPTS[:3], n=3, max_tokens=8, temperature=1.0)
    for prompt, b in zip(PROMPTS, best, strict=False):
        x = logits(spec_of(TINY), numpy_weights(TINY), prompt + b["ids"])[len(prompt) - 1 : -1]
        mean = (x[np.arange(len(b["ids"])), b["ids"]] - np.log(np.exp(x).sum(-1))).mean()
        assert abs(max(b["scores"]) - mean) < 2e-5 and len(set(b["scores"])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_runs_on_the_real_model(backend: str) -> None:
    embedded_model()
    lines = subprocess.check_output(
        [sys.executable, str(EXAMPLE), "--backend", backend, "--n", "3", "--json"], text=True, timeout=600
    ).splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == 3 and "Rome" in answers[0] and "7" in answers[2] + answers[2].replace("seven", "7")
