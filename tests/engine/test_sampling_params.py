"""SamplingParams: defaults, ranges, normal form, and what an engine makes of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle

import numpy as np
import pytest

from octavo.engine import sampling_params
from octavo.engine.checks import UnknownArgumentError
from octavo.engine.sampling_params import NotYet, SamplingParams, request_key
from octavo.models.logit_edits import MAX_STOP_IDS
from octavo.models.sampling import PARAMS


def test_defaults_are_those_of_vllm():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (1, 1.0, 1.0, 0, 0.0, None)
    assert (p.max_tokens, p.min_tokens, p.stop, p.stop_token_ids, p.ignore_eos) == (16, 0, (), (), False)
    assert (p.logprobs, p.detokenize, p.skip_special_tokens, p.include_stop_str_in_output) == (None, True, True, False)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)


WRONG = [
    ("n", [0, -1, 16385, 1.5, True, "2", None]),
    ("temperature", [-0.1, 2.1, math.nan, math.inf, "1", None, True]),
    ("top_p", [0, -0.5, 1.01, math.nan, None]),
    ("top_k", [-2, 0.5, "5", True, None]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "1", True]),
    ("max_tokens", [0, -1, 1.5, "16"]),
    ("min_tokens", [-1, 17, 2.0]),
    ("stop", ["", [""], ["a", 1], 3, b"x"]),
    ("stop_token_ids", [[-1], [1.5], ["a"], 7, "7"]),
    ("logprobs", [-2, 1.5, "all"]),
    ("ignore_eos", [1, None]),
    ("detokenize", [0, "no"]),
    ("skip_special_tokens", [None]),
    ("include_stop_str_in_output", ["yes"]),
    ("skip_reading_prefix_cache", [1]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, math.inf, math.nan, 1e-9]),
    ("logit_bias", [3, [1], {-1: 1.0}, {1.5: 1.0}, {"x": 1.0}, {1: math.inf}, {1: math.nan}, {1: "1"}, {1: 1, "1": 2}]),
    ("allowed_token_ids", [[], [-1], ["a"], 7, "7"]),
    ("bad_words", ["word", [""], [3], 7]),
    ("extra_args", [3, [1], {"a": 1}, {"a": {"b": "c"}}, {"a": {"b": math.nan}}, {"a": {"b": True}}]),
]


@pytest.mark.parametrize("name, value", [(n, v) for n, values in WRONG for v in values])
def test_a_wrong_value_is_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**{name: value})
    shown = value[-1] if value and isinstance(value, list) else value
    parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else []
    parts += [part for inner in parts if isinstance(inner, dict) for part in inner.values()]
    assert any(repr(part) in str(error.value) for part in (shown, value, *parts))


RIGHT = [
    ("temperature", [0, 2, 0.01, np.float32(0.5)]),
    ("top_p", [1, 1e-9]),
    ("top_k", [0, 1, 10**6, np.int64(3)]),
    ("min_p", [0, 1]),
    ("seed", [0, 2**63 - 1, -(2**63)]),
    ("max_tokens", [1, None, 10**6]),
    ("min_tokens", [0, 16]),
    ("n", [1, 16384]),
]


@pytest.mark.parametrize("name, value", [(n, v) for n, values in RIGHT for v in values])
def test_the_ends_of_a_range_belong_to_it(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_values_are_normalised():
    p = SamplingParams(stop="END", stop_token_ids=[7, 3, 7], seed=-1, top_k=-1, logprobs=True, temperature=1)
    assert (p.stop, p.stop_token_ids, p.seed, p.top_k, p.logprobs) == (("END",), (7, 3), None, 0, 1)
    assert isinstance(p.temperature, float)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop=None, stop_token_ids=None, logprobs=False) == SamplingParams()
    assert SamplingParams(top_k=np.int64(5), seed=np.int32(3)) == SamplingParams(top_k=5, seed=3)


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_greedy_drops_truncation(temperature):
    p = SamplingParams(temperature=temperature, top_p=0.5, top_k=4, min_p=0.1)
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.0, 1.0, 0, 0.0)
    assert p.variant == "greedy"


def test_greedy_gives_one_sample():
    with pytest.raises(ValueError, match="n 2 at temperature 0"):
        SamplingParams(temperature=0, n=2)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.005).temperature == 0.01
    assert "0.005" in caplog.text
    caplog.clear()
    SamplingParams(temperature=0.01)
    assert not caplog.text


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)


@pytest.mark.parametrize(
    "name, advice",
    [("top_kk", "top_k"), ("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("best_of", "use n")],
)
def test_an_unknown_name_is_refused_with_advice(name, advice):
    with pytest.raises(UnknownArgumentError, match=f"{name}.*{advice}"):
        SamplingParams(**{name: 1})


def test_an_unknown_name_is_a_type_error_and_a_value_error():
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="unknown sampling parameter 'foo'"):
            SamplingParams(foo=1)
        with pytest.raises(kind, match="foo"):
            SamplingParams().clone(foo=1)


LATER = {
    "thinking_token_budget": 5,
    "watermarking": {},
    "trace_decode_token_ids": [1],
    "routed_experts_prompt_start": 0,
}


def test_every_parameter_that_is_not_honoured_is_listed_here():
    assert LATER.keys() == {f.name for f in dataclasses.fields(NotYet)}


@pytest.mark.parametrize("name", LATER)
def test_what_is_not_honoured_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        SamplingParams(**{name: LATER[name]})


def test_what_asks_for_nothing_is_accepted():
    nothing = {"bad_words": [], "logit_bias": {}, "extra_args": {}, "presence_penalty": 0}
    assert SamplingParams(**nothing).variant == "sample"
    assert SamplingParams(skip_reading_prefix_cache=None).skip_reading_prefix_cache is False


def test_the_variant_is_the_smallest_head_that_serves():
    assert SamplingParams(temperature=0).variant == "greedy"
    assert SamplingParams().variant == "sample"
    for cut in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(**cut).variant == "truncate"
    for edit in ({"min_tokens": 1}, {"allowed_token_ids": [1]}, {"logit_bias": {1: 1}}, {"bad_words": ["a"]}):
        assert SamplingParams(temperature=0, **edit).variant == "edits"
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert SamplingParams(min_tokens=1, **{name: 0.5}).variant == "penalties"
    assert SamplingParams(extra_args={"mine": {}}, presence_penalty=1).variant == "processors"


def test_the_row_follows_the_sampler():
    asked = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    asked |= {"frequency_penalty": -1, "presence_penalty": 2}
    p = SamplingParams(**asked)
    assert dict(zip(PARAMS, p.row(), strict=True)) == asked
    assert all(isinstance(x, float) for x in p.row())


def test_num_logprobs():
    assert [SamplingParams(logprobs=n).num_logprobs for n in (None, 0, 5)] == [-1, 0, 5]
    with pytest.raises(ValueError, match="resolve"):
        _ = SamplingParams(logprobs=-1).num_logprobs


def test_clone_checks_again():
    p = SamplingParams(temperature=0.5)
    assert p.clone(seed=4) == SamplingParams(temperature=0.5, seed=4)
    with pytest.raises(ValueError, match="top_p"):
        p.clone(top_p=2.0)


def test_params_are_values():
    p = SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
    assert hash(p) == hash(p.clone())
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.seed = 4  # type: ignore[misc]


def test_resolve_knows_the_vocabulary():
    p = SamplingParams(logprobs=-1, stop_token_ids=[99])
    assert p.resolve(100, -1).num_logprobs == 100
    with pytest.raises(ValueError, match=r"logprobs -1 asks for 100 .* 20"):
        p.resolve(100, 20)
    with pytest.raises(ValueError, match=r"\[99\] are outside the vocabulary, 0 to 98"):
        p.resolve(99, -1)


def test_resolve_holds_logprobs_to_the_limit():
    assert SamplingParams(logprobs=20).resolve(1000, 20).num_logprobs == 20
    with pytest.raises(ValueError, match="logprobs 21"):
        SamplingParams(logprobs=21).resolve(1000, 20)
    with pytest.raises(ValueError, match="logprobs 21"):
        SamplingParams(logprobs=21).resolve(20, -1)


def test_resolve_without_a_tokenizer():
    assert SamplingParams().resolve(100, 20, has_tokenizer=False).detokenize is False
    with pytest.raises(ValueError, match=r"stop.*tokenizer"):
        SamplingParams(stop=["x"]).resolve(100, 20, has_tokenizer=False)


def test_resolve_counts_the_ids_that_min_tokens_holds_back():
    ids = list(range(MAX_STOP_IDS))
    SamplingParams(min_tokens=1, stop_token_ids=ids).resolve(1000, 20, eos_ids={0})
    SamplingParams(stop_token_ids=ids).resolve(1000, 20, eos_ids={500})
    with pytest.raises(ValueError, match=f"{MAX_STOP_IDS} stop ids.*not {MAX_STOP_IDS + 1}"):
        SamplingParams(min_tokens=1, stop_token_ids=ids).resolve(1000, 20, eos_ids={500})


def test_request_keys_are_int32_and_follow_seed_plus_index():
    keys = [request_key(seed) for seed in (*range(-500, 500), 2**63 - 1, -(2**63))]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= word < 2**31 for key in keys for word in key)
    assert min(w for k in keys for w in k) < 0 < max(w for k in keys for w in k)
    assert request_key(5, 3) == request_key(8) == request_key(8, 0)


def test_request_keys_never_change():
    # sha256("0") starts 5feceb66 ffc86f38; seeds in users' notebooks depend on it
    assert request_key(0) == (0x66EBEC5F, 0x386FC8FF)


def test_every_field_is_looked_at_by_a_check() -> None:
    looked_at = frozenset().union(*(names for _, names in sampling_params.CHECKS))
    others = {name for name in sampling_params.DEFAULTS if "logprob" in name} | {"skip_reading_prefix_cache"}
    known = looked_at | others | sampling_params.NOT_YET.keys() | {"structured_outputs"}
    assert known == sampling_params.DEFAULTS.keys()


def test_resolving_leaves_the_params_as_they_were() -> None:
    params = SamplingParams(top_k=5000, logprobs=-1)
    resolved = params.resolve(1000, -1, has_tokenizer=False)
    assert (resolved.top_k, resolved.logprobs, resolved.detokenize) == (0, 1000, False)
    assert (params.top_k, params.logprobs, params.detokenize) == (5000, -1, True)
    assert resolved.clone() == resolved
