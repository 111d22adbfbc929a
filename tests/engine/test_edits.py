"""Edits in the engine: words to ids as vLLM does it, bounds, refusals, processors, what compiles and what does not."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sampling_oracle as oracle
from backends import BACKENDS
from oracle import logits
from tiny import GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import LogitsProcessor, SamplingParams
from octavo.engine.edits import edits_from_json, edits_of, edits_to_json
from octavo.engine.plan import Edits
from octavo.models.logit_edits import MAX_BAD_IDS, MAX_BAD_WORDS, MAX_BIAS, MAX_PROCESSOR_COLUMNS

EXAMPLE = Path(__file__).parents[2] / "examples" / "logits_processor.py"


class Words:
    """A tokenizer of one id a character, a space and what follows it being one: "a" is 97, " a" is 1097."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        ids: list[int] = []
        for word in text.replace(" ", "\n\0").split("\n"):
            ids += [ord(word[1]) + 1000, *map(ord, word[2:])] if word[:1] == "\0" and word[1:] else []
            ids += [ord(c) for c in word] if word[:1] != "\0" else []
        return ids


def words_of(*words: str, vocab_size: int = 2000) -> tuple[tuple[int, ...], ...]:
    edits = edits_of(SamplingParams(bad_words=words), vocab_size, Words(), ())  # type: ignore[arg-type]
    assert edits is not None
    return edits.bad_words


def test_a_bad_word_is_meant_with_and_without_a_leading_space() -> None:
    assert words_of("ab") == ((97, 98), (1097, 98))
    assert words_of(" ab") == words_of("ab")
    assert words_of("ab", "c") == ((97, 98), (1097, 98), (99,), (1099,))
    assert words_of("ab", " ab") == words_of("ab")


def test_edits_survive_json() -> None:
    edits = Edits((1, 2), ((5, -0.1),), ((1,), (2, 3)), ((0, 1.0), (3, 1e-45)))
    for value in (edits, Edits(), Edits(bad_words=((4,),))):
        assert edits_from_json(json.loads(json.dumps(edits_to_json(value)))) == value


def test_who_asks_for_nothing_has_no_edits() -> None:
    assert edits_of(SamplingParams(min_tokens=3, presence_penalty=1), 50, None, ()) is None


TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "allowed": ({"allowed_token_ids": [5, 2000]}, r"allowed_token_ids: \[2000\] are outside the vocabulary, 0 to 1999"),
    "bias": ({"logit_bias": {"2001": 1.0}}, r"logit_bias: \[2001\] are outside the vocabulary"),
    "many biases": ({"logit_bias": dict.fromkeys(range(MAX_BIAS + 1), 1.0)}, f"logit_bias has {MAX_BIAS + 1} .*most"),
    "many words": ({"bad_words": [f"a{i}" for i in range(MAX_BAD_WORDS + 1)]}, f"bad_words .* most {MAX_BAD_WORDS}"),
    "long words": ({"bad_words": ["a" * (MAX_BAD_IDS // 2 + 1)]}, f"bad_words .* in all, and at most {MAX_BAD_IDS}"),
    "no ids": ({"bad_words": [" "]}, "bad_words: the tokenizer makes no ids of ' '"),
    "strange words": ({"bad_words": ["\u2010"]}, "bad_words: ids .* are outside the vocabulary"),
    "all forbidden": ({"bad_words": ["a", "b"], "allowed_token_ids": [97, 98]}, "bad_words .* every one of allowed"),
    "processor": ({"extra_args": {"mine": {}}}, "unknown logits processor in extra_args 'mine'"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_the_engine_cannot_serve_is_refused(name: str) -> None:
    asked, message = TOO_MUCH[name]
    with pytest.raises(ValueError, match=message):
        edits_of(SamplingParams(**asked), 2000, Words(), ())  # type: ignore[arg-type]


def test_as_much_as_a_row_holds_is_served() -> None:
    assert len(words_of(*(f"{chr(200 + i)}" for i in range(MAX_BAD_WORDS)))) == 2 * MAX_BAD_WORDS
    assert sum(map(len, words_of("a" * (MAX_BAD_IDS // 2)))) == MAX_BAD_IDS


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"bad_words .* need a tokenizer"):
        engine().generate([[1]], SamplingParams(bad_words=["a"]), use_tqdm=False)


def _minus(x: Any, history: Any, params: Any, ops: Any) -> Any:
    return x * (1 - 2 * params["how"])


REVERSE = LogitsProcessor("reverse", _minus, {"how": 1.0})
BAD_PROCESSORS: dict[str, tuple[Any, str]] = {
    "one": (REVERSE, "is not a list of LogitsProcessor"),
    "a class": ([int], "is not a LogitsProcessor"),
    "twice": ([REVERSE, REVERSE], "has two of the name 'reverse'"),
    "no function": ([LogitsProcessor("a", 3)], "needs a name and a function"),  # type: ignore[arg-type]
    "default": ([replace(REVERSE, params={"how": "1"})], "the default of reverse how '1' is not a number"),
    "a list": ([replace(REVERSE, params=["how"])], "the params of 'reverse' are no dict"),
    "too many": (
        [replace(REVERSE, name=str(i)) for i in range(MAX_PROCESSOR_COLUMNS // 2 + 1)],
        f"take {MAX_PROCESSOR_COLUMNS + 2} numbers of a request's row, and {MAX_PROCESSOR_COLUMNS} are there",
    ),
}


@pytest.mark.parametrize("name", BAD_PROCESSORS)
def test_what_is_no_processor_is_refused(name: str) -> None:
    value, message = BAD_PROCESSORS[name]
    with pytest.raises(ValueError, match=f"logits_processors.*{message}"):
        engine(logits_processors=value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_processor_serves_those_that_select_it(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = engine(backend=backend, logits_processors=[REVERSE])
    asked = [{}, {"reverse": {}}, {"reverse": {"how": 0.0}}, {"reverse": {"how": 0.5}}]
    params = [replace(GREEDY, max_tokens=1, extra_args=extra) for extra in asked]
    x = logits(spec_of(TINY), numpy_weights(TINY), PROMPTS[0])[-1]
    got = [made for (made,) in tokens(llm, PROMPTS[:1] * 4, params)]
    assert got == [x.argmax(), x.argmin(), x.argmax(), 0]
    for extra, words in (
        ({"revers": {}}, "did you mean reverse"),
        ({"reverse": {"who": 1}}, "unknown parameter .* 'who'"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.generate([[1]], SamplingParams(extra_args=extra), use_tqdm=False)
    caplog.set_level(logging.WARNING, logger="octavo")
    llm.register_logits_processor(LogitsProcessor("third", lambda x, history, params, ops: x * -1))
    assert "logits processor third is registered late" in caplog.text and llm.runner.num_late_processors == 1
    params = [replace(GREEDY, max_tokens=1, extra_args=e) for e in ({"third": {}}, {"third": {}, "reverse": {}}, {})]
    assert [made for (made,) in tokens(llm, PROMPTS[:1] * 3, params)] == [x.argmin(), x.argmax(), x.argmax()]
    with pytest.raises(ValueError, match="two of the name 'third'"):
        llm.register_logits_processor(LogitsProcessor("third", _minus))


@pytest.mark.skipif("jax" not in BACKENDS, reason="torch compiles nothing")
def test_mixing_parameters_compiles_nothing_after_warm_up() -> None:
    llm = engine(backend="jax", warmup="all", logits_processors=[REVERSE], max_model_len=32, max_num_batched_tokens=16,
                 max_logprobs=0, num_gpu_blocks_override=20)  # fmt: skip
    before = llm.backend.num_compiles()
    rng = np.random.default_rng(0)
    asked = [
        {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "logprobs": 0}, {"presence_penalty": -1.0},
        {"logit_bias": {3: 4.0}}, {"allowed_token_ids": [1, 2, 3]}, {"min_tokens": 3, "stop_token_ids": [5]},
        {"extra_args": {"reverse": {"how": 0.2}}}, {}, {"top_k": 4},
    ]  # fmt: skip
    for _ in range(4):
        some = [asked[i] for i in rng.permutation(len(asked))]
        params = [SamplingParams(max_tokens=5, seed=1, **one) for one in some]
        llm.generate([p[:20] for p in PROMPTS[:9]], params, use_tqdm=False)
    assert llm.backend.num_compiles() == before
    llm.register_logits_processor(LogitsProcessor("late", _minus, {"how": 1.0}))
    llm.generate([[1]], SamplingParams(extra_args={"reverse": {}}), use_tqdm=False)
    assert llm.backend.num_compiles() == before + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_had_edits_is_clean_for_the_next(backend: str) -> None:
    llm, want = engine(backend=backend, max_num_seqs=2), tokens(engine(backend=backend), PROMPTS[:5])
    edits = {"allowed_token_ids": [3, 4], "logit_bias": {4: 5.0}, "repetition_penalty": 9.0}
    tokens(llm, PROMPTS[:4], replace(RANDOM, **edits))
    # beside one that has some, so that the head looks
    edited = replace(GREEDY, logit_bias={5: 1.0}, presence_penalty=1.0, max_tokens=60)
    mixed = tokens(llm, [PROMPTS[0], *PROMPTS[:5]], [edited] + [GREEDY] * 5)
    assert mixed[1:] == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_makes_no_pair_twice(backend: str) -> None:
    spec = importlib.util.spec_from_file_location("logits_processor", EXAMPLE)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    llm = engine(backend=backend, logits_processors=[module.NO_REPEATED_PAIR])
    # without it these turn round in a circle
    plain = replace(GREEDY, max_tokens=40, allowed_token_ids=[5, 6, 7, 8, 9, 10, 11, 12])
    for extra in (None, {"no_repeated_pair": {}}, {"no_repeated_pair": {"strength": 0.0}}):
        made = tokens(llm, PROMPTS[:3], replace(plain, extra_args=extra))
        for prompt, ids in zip(PROMPTS, made, strict=False):
            whole = [*prompt[-1:], *ids]
            pairs = list(itertools.pairwise(whole))
            repeats = len(pairs) - len(set(pairs))
            assert (repeats == 0) == (extra == {"no_repeated_pair": {}}), (extra, ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_config_s_repetition_penalty_applies(backend: str) -> None:
    llm = engine(backend=backend, override_generation_config={"repetition_penalty": 1.7, "temperature": 0.0})
    assert llm.get_default_sampling_params().repetition_penalty == 1.7
    (made,) = tokens(llm, PROMPTS[:1], None)
    asked, out = oracle.Asked(temperature=0, repetition_penalty=1.7), list(PROMPTS[0])
    for token in made:
        x = logits(spec_of(TINY), numpy_weights(TINY), out)[-1]
        want, ahead = oracle.token(x, asked, PROMPTS[0], out[len(PROMPTS[0]) :])
        assert token == want or ahead < 1e-3
        out.append(token)
    assert made != tokens(llm, PROMPTS[:1], replace(GREEDY, max_tokens=16))[0]
