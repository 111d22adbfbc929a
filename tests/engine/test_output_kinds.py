"""What LLM.step tells of a request: all so far, what is new, or the end; and how often."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from backends import QUIET
from tiny import PROMPTS, RANDOM, VOCAB, engine

from octavo.engine import LLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.engine.scheduler import Scheduler

KINDS = list(RequestOutputKind)
CUMULATIVE, DELTA, FINAL_ONLY = KINDS


# kinds are the host's alone, so one backend is enough here; test_async_llm has both
@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine whose tokens are single letters and halves of characters, so that text comes late now and then."""
    path = tmp_path_factory.mktemp("words")
    pieces = [*(chr(ord("a") + i) for i in range(26)), *(f"<0x{0x80 + i:02X}>" for i in range(64)), "<0xC3>"]
    words = {piece: i for i, piece in enumerate(pieces)} | {f"w{i}": i for i in range(len(pieces), VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    backend.save(str(path / "tokenizer.json"))
    return engine(tokenizer=str(path), max_num_seqs=6, **QUIET)


def told(llm: LLM, params: SamplingParams, prompts: Any = PROMPTS[:4]) -> list[list[RequestOutput]]:
    """All outputs of each prompt, in order."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        llm.add_request(name, prompt, params)
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id].append(output)
    assert not llm.processor.families
    return list(outputs.values())


PARAMS = {
    "plain": RANDOM,
    "n and logprobs": replace(RANDOM, n=3, logprobs=2, temperature=1.5, top_k=0),
    "stop strings": replace(RANDOM, n=2, stop=("a", "b", "q", "zz"), temperature=1.5, top_k=0),
    "stop shown": replace(RANDOM, n=2, stop=("c", "d", "zz"), include_stop_str_in_output=True),
    "no text": replace(RANDOM, detokenize=False),
}


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("name", PARAMS)
def test_deltas_add_up_to_what_generate_returns(llm: LLM, name: str, interval: int) -> None:
    params = PARAMS[name]
    want = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    for outputs, whole in zip(told(llm, replace(params, output_kind=DELTA, stream_interval=interval)), want):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        for i, made in enumerate(whole.outputs):
            parts = [c for o in outputs for c in o.outputs if c.index == i]
            assert "".join(c.text for c in parts) == made.text
            assert [t for c in parts for t in c.token_ids] == list(made.token_ids)
            assert (parts[-1].finish_reason, parts[-1].stop_reason) == (made.finish_reason, made.stop_reason)
            assert all(c.finish_reason is None for c in parts[:-1])
            if made.logprobs is None:
                assert all(c.logprobs is None for c in parts)
                continue
            assert [x for c in parts for x in c.logprobs] == made.logprobs
            assert parts[-1].cumulative_logprob == made.cumulative_logprob


@pytest.mark.parametrize("interval", [1, 4])
def test_cumulative_outputs_grow_to_what_generate_returns(llm: LLM, interval: int) -> None:
    params = PARAMS["n and logprobs"]
    want = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    for outputs, whole in zip(told(llm, replace(params, stream_interval=interval)), want):
        assert outputs[-1].outputs == whole.outputs and outputs[-1].finished
        for before, after in itertools.pairwise(outputs):
            for a, b in zip(before.outputs, after.outputs, strict=True):
                assert b.text.startswith(a.text)
                assert list(b.token_ids[: len(a.token_ids)]) == list(a.token_ids)


def test_final_only_is_one_output(llm: LLM) -> None:
    params = PARAMS["n and logprobs"]
    want = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    got = told(llm, replace(params, output_kind=FINAL_ONLY))
    assert [len(outputs) for outputs in got] == [1] * 4
    assert [outputs[0].outputs for outputs in got] == [o.outputs for o in want]


def test_generate_returns_all_whatever_the_kind(llm: LLM) -> None:
    whole, *others = (llm.generate(PROMPTS[:2], replace(RANDOM, output_kind=k), use_tqdm=False) for k in KINDS)
    assert all([o.outputs for o in other] == [o.outputs for o in whole] for other in others)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=lambda k: k.name)
def test_the_first_token_comes_at_once_then_one_output_an_interval(llm: LLM, kind: RequestOutputKind) -> None:
    params = replace(RANDOM, output_kind=kind, max_tokens=12, ignore_eos=True, stream_interval=5)
    (outputs,) = told(llm, params, PROMPTS[:1])
    sizes = [len(o.outputs[0].token_ids) for o in outputs]
    assert sizes == ([1, 5, 5, 1] if kind is DELTA else [1, 6, 11, 12])


def test_the_engine_has_an_interval_for_those_who_name_none() -> None:
    llm = engine(stream_interval=4, **QUIET)
    for own, sizes in ((None, [1, 5, 9, 10]), (2, [1, 3, 5, 7, 9, 10])):
        (outputs,) = told(llm, replace(RANDOM, max_tokens=10, ignore_eos=True, stream_interval=own), PROMPTS[:1])
        assert [len(o.outputs[0].token_ids) for o in outputs] == sizes


def test_a_request_of_any_kind_survives_a_dump(llm: LLM) -> None:
    llm.add_request("x", PROMPTS[0], replace(RANDOM, output_kind=DELTA, stream_interval=2))
    value = json.loads(json.dumps(llm.scheduler.dump()))
    params = Scheduler.load(value).alive["x"].params
    assert (params.output_kind, params.stream_interval) == (DELTA, 2)
    llm.abort("x")


@pytest.mark.parametrize("wrong", [{"output_kind": "all"}, {"output_kind": True}, {"stream_interval": 0}])
def test_a_wrong_kind_or_interval_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} {value!r}"):
        SamplingParams(**wrong)
    assert SamplingParams(output_kind=2).output_kind is FINAL_ONLY
