"""Every cell of docs/conformance.md: a field changes the output as the oracle says, or is refused by name."""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import pytest
import tokenizers
from backends import BACKENDS
from conformance import ADDED, CASES, CONDITIONS, EOS, PROCESSOR, SPECIAL, Case, params_of, prompt_of, wanted
from oracle import logits
from tiny import GREEDY, PROMPTS, TINY, VOCAB, engine, numpy_weights, spec_of

from octavo.engine import LLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.engine.logprobs import FlatLogprobs

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
HONOURED = [c for c in CASES if not c.refused]
if importlib.util.find_spec("llguidance") is None:
    # an engine without it refuses, by the field's name: tests/engine/test_structured_output.py
    HONOURED = [c for c in HONOURED if c.name != "structured_outputs"]
AT_ONCE = 8


@functools.cache
def llm_of(backend: str) -> LLM:
    """One engine for all conditions, with words w0, w1, ... and more room than they need."""
    with tempfile.TemporaryDirectory() as folder:
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        # single_word: w3 is no part of w33
        whole = functools.partial(tokenizers.AddedToken, single_word=True, normalized=False)
        made.add_special_tokens([whole(f"w{SPECIAL}", special=True), whole(f"w{EOS}", special=True)])
        made.add_tokens([whole(f"w{ADDED}")])
        made.save(str(Path(folder, "tokenizer.json")))
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{EOS}"}))
        return engine(backend=backend, tokenizer=folder, logits_processors=[PROCESSOR], max_num_seqs=AT_ONCE,
                      max_num_batched_tokens=256, max_model_len=64, async_scheduling=False)  # fmt: skip


Outputs = dict[str, list[RequestOutput]]


def drained(llm: LLM, outputs: Outputs) -> Outputs:
    while llm.has_unfinished_requests():
        step(llm, outputs)
    return outputs


def step(llm: LLM, outputs: Outputs) -> None:
    for o in llm.step():
        outputs.setdefault(o.request_id, []).append(o)


def add(llm: LLM, cases: Iterable[Case], n: int | None = None) -> None:
    for case in cases:
        params = params_of(case)
        llm.add_request(case.name, {"prompt_token_ids": prompt_of(case.name)}, replace(params, n=n or params.n))


def alone(llm: LLM) -> Outputs:
    outputs: Outputs = {}
    for case in HONOURED:
        add(llm, [case])
        drained(llm, outputs)
    return outputs


def mixed(llm: LLM, n: int | None = None) -> Outputs:
    add(llm, HONOURED, n)
    return drained(llm, {})


def overlapped(llm: LLM) -> Outputs:
    config = llm.config
    # the same programs serve both modes: no second engine, nothing compiled again
    llm.config = replace(config, async_scheduling=True)
    try:
        return mixed(llm)
    finally:
        llm.config = config


def preempted(llm: LLM) -> Outputs:
    """All but a first request lose their row after their first tokens."""
    outputs: Outputs = {}
    for i in range(0, len(HONOURED), AT_ONCE - 3):
        # n of one request are several
        some = HONOURED[i : i + AT_ONCE - 3]
        llm.add_request("first", PROMPTS[0], replace(GREEDY, max_tokens=40, ignore_eos=True))
        add(llm, some)
        while any(case.name not in outputs for case in some):
            step(llm, outputs)
        llm.set_limits(max_num_seqs=1)
        step(llm, outputs)
        llm.set_limits(max_num_seqs=AT_ONCE)
        drained(llm, outputs)
    del outputs["first"]
    assert {name for name, os in outputs.items() if not os[-1].metrics.num_preemptions} == set()
    return outputs


def after_a_hit(llm: LLM) -> Outputs:
    for case in HONOURED:
        prompt = conformance.kept_of(prompt_of(case.name), params_of(case))
        llm.add_request(case.name, {"prompt_token_ids": prompt}, replace(GREEDY, max_tokens=1))
        drained(llm, {})
    outputs = mixed(llm)
    hits = {name: os[-1].num_cached_tokens for name, os in outputs.items()}
    assert hits.pop("skip_reading_prefix_cache") == 0
    # what is wanted of a prompt is computed, and a shorter one has fewer blocks
    short = {"truncate_prompt_tokens": 8, "truncation_side": 8, "prompt_logprob_start": 8}
    short |= {"prompt_logprobs": 0, "prompt_logprob_token_ids": 0}
    assert hits == dict.fromkeys(hits, 16) | short
    return outputs


RUN = dict(zip(CONDITIONS, (alone, mixed, overlapped, lambda llm: mixed(llm, 3), preempted, after_a_hit), strict=True))


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_field_does_what_its_formula_says(backend: str, condition: str) -> None:
    llm = llm_of(backend)
    assert llm.reset_prefix_cache()
    outputs = RUN[condition](llm)
    wrong = {}
    for case in HONOURED:
        try:
            check(case, outputs[case.name], 3 if condition == "n = 3" else params_of(case).n)
        except AssertionError as error:
            wrong[case.name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def check(case: Case, outputs: list[RequestOutput], n: int) -> None:
    params, last = params_of(case), outputs[-1]
    assert last.finished and list(last.prompt_token_ids) == conformance.kept_of(prompt_of(case.name), params)
    if case.changes != "check":
        base, made = conformance.base_of(case.name), wanted(case.name)
        assert getattr(base, FIELD[case.changes]) != getattr(made, FIELD[case.changes]), "the field changes nothing"
    for i in range(n):
        made = wanted(case.name, i)
        parts = [c for o in outputs for c in o.outputs if c.index == i]
        whole = parts if params.output_kind is RequestOutputKind.DELTA else parts[-1:]
        assert [t for c in whole for t in c.token_ids] == made.token_ids
        assert "".join(c.text for c in whole) == made.text
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (made.finish_reason, made.stop_reason)
        if params.logprobs is not None:
            assert isinstance(parts[-1].logprobs, FlatLogprobs if params.flat_logprobs else list)
            check_logprobs(
                parts[-1].logprobs, made.token_ids, made.logits, params.logprobs, params.logprob_token_ids or ()
            )
        count, interval = len(made.token_ids), params.stream_interval or 1
        if params.output_kind is RequestOutputKind.DELTA or (n == 1 and interval > 1):
            assert len(parts) == 1 + -(-(count - 1) // interval)
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        check_prompt_logprobs(last.prompt_logprobs, list(last.prompt_token_ids), params)
    else:
        assert last.prompt_logprobs is None
    if params.n > 1:
        assert len(last.outputs) == n and len({tuple(wanted(case.name, i).token_ids) for i in range(n)}) == n


FIELD = {"tokens": "token_ids", "text": "text"}


def check_prompt_logprobs(got: Any, prompt: list[int], params: SamplingParams) -> None:
    start, given = 1 + (params.prompt_logprob_start or 0), params.prompt_logprob_token_ids
    rows = logits(spec_of(TINY), numpy_weights(TINY), prompt)
    assert len(got) == len(prompt) and not any(got[:start])
    for i in range(start, len(prompt)):
        ids = given[i - start] if given else ()
        check_logprobs(got[i : i + 1], prompt[i : i + 1], rows[i - 1 : i], params.prompt_logprobs or 0, ids)


def check_logprobs(got: Any, ids: Sequence[int], rows: Sequence[Any], count: int, also: Sequence[int]) -> None:
    assert len(got) == len(ids)
    for entry, token, x in zip(got, ids, rows, strict=True):
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        top = np.argsort(-x)[:count].tolist()
        assert next(iter(entry)) == token and set(entry) == {token, *top, *also}
        for i, value in entry.items():
            assert abs(value.logprob - logprobs[i]) < 1e-4 and value.rank == (x >= x[i]).sum()


@pytest.mark.parametrize("case", [c for c in CASES if c.refused], ids=lambda c: c.name)
def test_what_is_refused_is_named(case: Case) -> None:
    with pytest.raises(NotImplementedError, match=case.name):
        SamplingParams(**case.asks([]))


def test_every_field_has_a_row() -> None:
    assert conformance.missing() == set()


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == conformance.markdown(), "run make conformance"
