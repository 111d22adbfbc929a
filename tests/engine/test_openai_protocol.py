"""OpenAI's bodies and answers: every field honoured or refused by name, every answer one that OpenAI's client reads."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai.types
import openai.types.chat
import pytest
from batches import ENGINE, model_folder

from octavo.engine import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from octavo.engine.openai_embeddings import embedding_ask, embedding_response
from octavo.engine.openai_protocol import (
    CHAT,
    COMMON,
    COMPLETION,
    LABELS,
    REFUSED,
    SAMPLING,
    Ask,
    RequestError,
    chat_ask,
    check_model,
    completion_ask,
    constraint_of,
    error_object,
    error_status,
    served_names,
)
from octavo.engine.openai_response import response, usage
from octavo.engine.pooling import PoolingParams
from octavo.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(model_folder(tmp_path_factory.mktemp("models") / "words")), max_logprobs=20, **ENGINE)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.get_tokenizer()


def completion(**body: Any) -> Ask:
    return completion_ask({"prompt": [1], **body}, None, {})


# fields that SamplingParams has too, with values other than the default
HONOURED = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "n": 3,
    "seed": 5,
    "stop": ("a", "b"),
    "stop_token_ids": (3, 4),
    "min_tokens": 2,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3},
    "skip_reading_prefix_cache": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "bad_words": ("a", "b"),
    "allowed_token_ids": (4, 5),
    "logprob_token_ids": (4, 5),
    "prompt_logprobs": 3,
    "prompt_logprob_token_ids": ((1, 2), (3,)),
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
}


@pytest.mark.parametrize("name", HONOURED)
def test_sampling_fields_reach_the_engine(tokenizer: Tokenizer, name: str) -> None:
    value = HONOURED[name]
    body = json.loads(json.dumps({name: value}))
    assert completion(**body).params == SamplingParams(**{name: value})
    chat = chat_ask({"messages": MESSAGES, **body}, tokenizer, {})
    assert chat.params == SamplingParams(max_tokens=None, **{name: value})


def test_the_constant_is_complete() -> None:
    """But for what another field must go with, and what the engine does not take yet."""
    later = {"thinking_token_budget"}
    assert SAMPLING - HONOURED.keys() == later | {"prompt_logprob_start"}
    both = {"prompt_logprobs": 1, "prompt_logprob_start": 3}
    assert completion(**both).params == SamplingParams(**both)


def test_a_bias_names_tokens_as_strings_and_is_clamped() -> None:
    ask = completion(logit_bias={"3": 500, "4": -0.5, "5": -1e9})
    assert ask.params.logit_bias == {3: 100.0, 4: -0.5, 5: -100.0}
    assert completion(vllm_xargs={"mine": {"strength": 2}}).params.extra_args == {"mine": {"strength": 2.0}}


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            {"json": {"type": "null"}},
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [1], "triggers": ["a"]}},
            {"structural_tag": {"structures": [1], "triggers": ["a"]}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_what_a_format_asks_for(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert constraint_of(given) == ({"structured_outputs": wanted} if wanted else {})


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_a_sampling_field_is_checked_by_the_engine(name: str) -> None:
    """None of them is passed over: a value of no meaning is always refused."""
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=name):
        completion(**{name: {"no": "meaning"}})


def test_null_is_not_given_and_labels_ask_for_nothing(tokenizer: Tokenizer) -> None:
    for name in sorted(SAMPLING | COMMON | COMPLETION - {"prompt"} | REFUSED.keys()):
        if name != "prompt":
            assert completion(**{name: None}).params == SamplingParams()
    labels = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"}
    assert labels.keys() == LABELS
    assert completion(**labels) == completion()
    assert chat_ask({"messages": MESSAGES, **labels}, tokenizer, {}).params == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_served_is_refused_by_name(tokenizer: Tokenizer, name: str) -> None:
    for ask in (completion, lambda **body: chat_ask({"messages": MESSAGES, **body}, tokenizer, {})):
        with pytest.raises(RequestError, match=f"^{name}: ") as caught:
            ask(**{name: ["something"]})
        assert (caught.value.param, caught.value.status) == (name, 400)
        for harmless in REFUSED[name][1]:
            assert ask(**{name: harmless}) == ask()


def test_the_numbers_of_tokens(tokenizer: Tokenizer) -> None:
    def chat(**body: Any) -> int | None:
        return chat_ask({"messages": MESSAGES, **body}, tokenizer, {"max_tokens": 99}).params.max_tokens

    assert chat_ask({"messages": MESSAGES}, tokenizer, {}).params.max_tokens is None
    assert (chat(), chat(max_tokens=5), chat(max_tokens=5, max_completion_tokens=3)) == (99, 5, 3)
    assert (completion().params.max_tokens, completion(max_tokens=4).params.max_tokens) == (16, 4)


def test_the_checkpoints_defaults_give_way_to_the_request() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert completion_ask({"prompt": "x", "top_k": 3}, None, defaults).params == SamplingParams(
        temperature=0.6, top_k=3
    )


@pytest.mark.parametrize(
    "prompt, wanted",
    [
        ("w1 w2", [{"prompt": "w1 w2"}]),
        (["w1", "w2"], [{"prompt": "w1"}, {"prompt": "w2"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, wanted: list[dict[str, Any]]) -> None:
    assert list(completion(prompt=prompt).prompts) == wanted
    salted = completion(prompt=prompt, cache_salt="s").prompts
    assert list(salted) == [{**p, "cache_salt": "s"} for p in wanted]


def test_a_chat_is_what_the_template_makes_of_it(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "w3"}, {"type": "text", "text": "w4"}]
    body = {"messages": [*MESSAGES, {"role": "user", "content": parts}], "chat_template_kwargs": {"mood": "w9"}}
    (prompt,) = chat_ask(body, tokenizer, {}).prompts
    text = "user w1 w2 user w3\nw4 w9"
    assert prompt == {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }} w5"}
    assert chat_ask(body, tokenizer, {}).prompts[0] == {"prompt_token_ids": [1, 2, 5]}


@pytest.mark.parametrize(
    "body, message",
    [
        ({"messages": []}, "messages is a list, not a list of at least one"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] is not an object with a role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\] has no text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role 'tool'"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "tool_calls is not supported"),
        ({"top_logprobs": 2}, "top_logprobs 2 needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs 21 is not"),
        ({"logprobs": 3}, "logprobs 3 is not True or False"),
        ({"prompt": "x"}, "unknown field 'prompt'"),
        ({"chat_template_kwargs": {"tokenize": False}}, "unknown template argument 'tokenize'"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat template: no"),
        ({"add_special_tokens": True}, "add_special_tokens=True"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ({"response_format": {"type": "xml"}}, "response_format.type 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema has no schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format has schema: known are type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}},
            "response_format.json_schema has stric: known are name, description, schema, strict",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "give one of them"),
        ({"logit_bias": {"x": 1}}, "'x' is not a token id"),
        ({"logit_bias": {"1": "2"}}, "'2' of token 1 is not a number"),
        ({"logit_bias": [1]}, "logit_bias is a list"),
        ({"request_id": ""}, "request_id '' is not a string"),
        ({"priority": "high"}, "priority 'high' is not a whole number"),
    ],
)
def test_what_is_wrong_in_a_chat_is_said(tokenizer: Tokenizer, body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_ask({"messages": MESSAGES, **body}, tokenizer, {})


def test_errors_are_openais() -> None:
    with pytest.raises(RequestError) as caught:
        check_model({"model": "gpt"}, ("a", "b"))
    assert error_status(caught.value) == 404
    assert error_object(caught.value) == {
        "message": "the model 'gpt' does not exist: this is 'a' or 'b'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert error_object(NotImplementedError("x"))["code"] == "unsupported_value"
    assert error_object(RequestError("x", status=500))["type"] == "server_error"
    assert error_status(ValueError("x")) == 400


def test_names_of_a_model() -> None:
    assert served_names("meta-llama/Llama-2-7b-chat-hf") == ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-chat-hf")
    assert served_names(Path("/models/x.gguf")) == ("/models/x.gguf", "x.gguf", "x")
    assert check_model({}, ("a", "b")) == "a"
    assert check_model({"model": "b"}, ("a", "b")) == "b"


def answer(llm: LLM, ask: Ask) -> dict[str, Any]:
    outputs = llm.generate(list(ask.prompts), ask.params, use_tqdm=False)
    made = response(ask, outputs, llm.tokenizer, request_id="x", created=12, model="m")
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_chats_answer_is_one_to_openais_client(llm: LLM, tokenizer: Tokenizer) -> None:
    body = {"messages": MESSAGES, "n": 2, "seed": 1, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    ask = chat_ask(body, tokenizer, {})
    made = openai.types.chat.ChatCompletion.model_validate(answer(llm, ask), strict=True)
    (output,) = llm.generate(list(ask.prompts), ask.params, use_tqdm=False)
    assert (made.id, made.created, made.model) == ("chatcmpl-x", 12, "m")
    assert made.usage.model_dump(exclude_none=True) == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    for choice, sample in zip(made.choices, output.outputs, strict=True):
        assert (choice.index, choice.finish_reason) == (sample.index, "length")
        assert choice.message.content == sample.text
        content = choice.logprobs.content
        assert b"".join(bytes(c.bytes) for c in content).decode().strip() == sample.text.strip()
        for entry, token, at in zip(content, sample.token_ids, sample.logprobs, strict=True):
            assert (entry.token, entry.logprob) == (at[token].decoded_token, at[token].logprob)
            best = sorted((p for p in at.values()), key=lambda p: -p.logprob)[:3]
            assert [t.logprob for t in entry.top_logprobs] == [p.logprob for p in best]


def test_a_completions_answer_is_one_to_openais_client(llm: LLM, tokenizer: Tokenizer) -> None:
    ask = completion_ask({"prompt": ["w1 w2", "w3"], "max_tokens": 4, "temperature": 0, "logprobs": 2}, tokenizer, {})
    made = openai.types.Completion.model_validate(answer(llm, ask), strict=True)
    outputs = llm.generate(list(ask.prompts), ask.params, use_tqdm=False)
    assert made.usage.model_dump(exclude_none=True) == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    for choice, output in zip(made.choices, outputs, strict=True):
        sample, logprobs = output.outputs[0], choice.logprobs
        assert choice.text == sample.text
        assert logprobs.token_logprobs == [at[i].logprob for i, at in zip(sample.token_ids, sample.logprobs)]
        assert all(len(top) == 2 for top in logprobs.top_logprobs)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text.startswith(token.strip(), offset + len(token) - len(token.strip()))


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_has_the_logprobs_of_the_prompt(llm: LLM, tokenizer: Tokenizer, max_tokens: int) -> None:
    body = {"prompt": "w1 w2 w3", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    ask = completion_ask(body, tokenizer, {})
    made = answer(llm, ask)
    params = SamplingParams(temperature=0, max_tokens=max(max_tokens, 1), logprobs=2, prompt_logprobs=2)
    (output,), (choice,) = llm.generate("w1 w2 w3", params, use_tqdm=False), made["choices"]
    sample, logprobs = output.outputs[0], choice["logprobs"]
    assert choice["text"] == "w1 w2 w3" + (sample.text if max_tokens else "")
    assert made["usage"]["completion_tokens"] == max_tokens
    wanted = [at[i].logprob for i, at in zip([2, 3], output.prompt_logprobs[1:])]
    wanted += [at[i].logprob for i, at in zip(sample.token_ids, sample.logprobs)] if max_tokens else []
    assert logprobs["token_logprobs"] == [None, *wanted]
    assert logprobs["top_logprobs"][0] is None and all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert [t.strip() for t in logprobs["tokens"][:3]] == ["w1", "w2", "w3"]
    # only where it is asked for by its own name
    assert "prompt_logprobs" not in choice
    asked = answer(llm, completion_ask({"prompt": [1, 2], "prompt_logprobs": 1, "max_tokens": 1}, tokenizer, {}))
    first, second = asked["choices"][0]["prompt_logprobs"]
    assert first is None and second["2"].keys() == {"logprob", "rank", "decoded_token"}


def test_embeddings_are_the_engines(llm: LLM) -> None:
    body = {"input": ["w1 w2", "w3"], "dimensions": 8, "pooling": "mean", "normalize": False}
    wanted = llm.embed(["w1 w2", "w3"], PoolingParams(pooling="mean", normalize=False, dimensions=8), use_tqdm=False)
    vectors = [o.outputs.embedding for o in wanted]
    for more in ({}, {"encoding_format": "base64"}):
        ask = embedding_ask({**body, **more, "user": "me"})
        made = embedding_response(ask, llm.embed(list(ask.prompts), ask.params, use_tqdm=False), model="m")
        if more:
            for entry in made["data"]:
                entry["embedding"] = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist()
        read = openai.types.CreateEmbeddingResponse.model_validate(made, strict=True)
        assert [d.embedding for d in read.data] == [pytest.approx(v) for v in vectors]
        assert [d.index for d in read.data] == [0, 1]
        assert (read.model, read.usage.prompt_tokens, read.usage.total_tokens) == ("m", 3, 3)


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "input is missing"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format 'hex'"),
        ({"input": "x", "dimensions": 0}, "dimensions 0"),
        ({"input": "x", "pooling": "max"}, "pooling 'max'"),
        ({"input": "x", "temperature": 1}, "unknown field 'temperature'"),
    ],
)
def test_what_is_wrong_in_an_embedding_is_said(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding_ask(body)


def hand_made(**more: Any) -> RequestOutput:
    """An output of two tokens, the second half a character and of probability 0."""
    logprobs = [
        {5: Logprob(-0.5, 2, " a"), 7: Logprob(-0.25, 1, " b")},
        {6: Logprob(float("-inf"), 9, ""), 7: Logprob(-0.1, 1, " b")},
    ]
    sample = CompletionOutput(0, " a", [5, 6], logprobs=logprobs, finish_reason="stop", stop_reason="x")
    return RequestOutput("r", "w1", [1], [sample], True, **more)


def test_an_answer_by_hand(tokenizer: Tokenizer) -> None:
    ask = Ask(False, ("w1",), SamplingParams(), echo=True, return_token_ids=True, request_id="mine")
    made = response(ask, [hand_made()], tokenizer, request_id="x", created=1, model="m")
    assert made == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "w1 a",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "x",
                "token_ids": [5, 6],
                "prompt_token_ids": [1],
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    assert usage([hand_made(), hand_made()]) == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


def test_logprobs_by_hand(tokenizer: Tokenizer) -> None:
    def logprobs(chat: bool, **more: Any) -> dict[str, Any]:
        ask = Ask(chat, ("w1",), SamplingParams(), **more)
        made = response(ask, [hand_made()], tokenizer, request_id="x", created=1, model="m")
        return made["choices"][0]["logprobs"]

    assert logprobs(False, top_logprobs=1) == {
        "tokens": [" a", ""],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{" b": -0.25}, {" b": -0.1}],
        "text_offset": [0, 2],
    }
    assert logprobs(False, top_logprobs=0)["top_logprobs"] == [None, None]
    assert logprobs(False, top_logprobs=0, tokens_as_ids=True)["tokens"] == ["token_id:5", "token_id:6"]
    first, second = logprobs(True, top_logprobs=1)["content"]
    data = {i: list(tokenizer.token_bytes(i)) for i in (5, 6, 7)}
    assert first == {
        "token": " a",
        "logprob": -0.5,
        "bytes": data[5],
        "top_logprobs": [{"token": " b", "logprob": -0.25, "bytes": data[7]}],
    }
    assert (second["logprob"], second["bytes"]) == (-9999.0, data[6])


def test_every_field_of_openais_requests_is_known() -> None:
    """None is unknown, so that each is honoured or refused as itself."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    common = SAMPLING | COMMON | LABELS | REFUSED.keys()
    names = chats.CompletionCreateParamsBase.__annotations__.keys()
    assert set(names) <= common | CHAT
    assert set(completions.CompletionCreateParamsBase.__annotations__) <= common | COMPLETION
