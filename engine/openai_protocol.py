"""Bodies of OpenAI's API to what the engine takes. Checked functions on plain dicts: for the batch file and the server.

A field is honoured, or refused by an error that names it. One that is null counts as not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from .checks import UnknownArgumentError, check_names, flag, integer
from .prompts import Prompt
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20  # of a chat, as OpenAI has it; the engine's own max_logprobs may be lower
LOGIT_BIAS = 100.0

# under the same name in SamplingParams
SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids")
    + ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs")
    + ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens")
    + ("truncation_side", "prompt_logprob_start", "prompt_logprob_token_ids")
    + ("thinking_token_budget", "repetition_detection", "logprob_token_ids", "skip_reading_prefix_cache")
)
TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents")
COMMON = frozenset(
    ("model", "stream", "stream_options", "max_tokens", "logit_bias", "logprobs", "echo", "response_format")
    + ("structured_outputs", "priority", "cache_salt", "request_id", "return_token_ids", "return_tokens_as_token_ids")
    + ("vllm_xargs", "add_special_tokens")
)
CHAT = frozenset(("messages", "max_completion_tokens", "top_logprobs", *TEMPLATE))
COMPLETION = frozenset(("prompt",))
# they say who asks, and ask for nothing
LABELS = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key"))
# known of OpenAI and vLLM, and not served; the values ask for nothing
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": ("calling functions", ([],)),
    "tool_choice": ("calling functions", ("none",)),
    "parallel_tool_calls": ("calling functions", ()),
    "functions": ("calling functions", ([],)),
    "function_call": ("calling functions", ("none",)),
    "audio": ("audio", ()),
    "modalities": ("anything but text", (["text"],)),
    "prediction": ("predicted output", ()),
    "reasoning_effort": ("a reasoning effort", ("none",)),
    "verbosity": ("a verbosity", ()),
    "web_search_options": ("a web search", ()),
    "moderation": ("moderation", ()),
    "prompt_cache_options": ("a cache that is told what to keep", ()),
    "prompt_cache_retention": ("a cache that is told what to keep", ("in_memory", "in-memory")),
    "store": ("stored completions", (False,)),
    "service_tier": ("service tiers", ("auto", "default")),
    "suffix": ("text to be inserted before", ("",)),
    "best_of": ("best_of, which is gone: use n", (1,)),
    "use_beam_search": ("beam search", (False,)),
    "length_penalty": ("beam search", (1.0,)),
    "mm_processor_kwargs": ("multimodal input", ({},)),
}


class RequestError(ValueError):
    """What is wrong with a request: an HTTP status, OpenAI's code for it, and the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Ask:
    """What one body asks for. Each of `prompts` gets params.n choices."""

    chat: bool
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    priority: int = 0
    # of the answer
    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    echo: str | bool = False  # text that goes before each choice; True: the prompt's
    top_logprobs: int | None = None  # how many beside the sampled one; None: no logprobs
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # in logprobs, "token_id:5" instead of text
    prompt_logprobs: bool = False  # those of the prompt in a field of their own
    silent: bool = False  # what is generated is left out
    request_id: str | None = None


def error_status(error: Exception) -> int:
    """The HTTP status of an error that a request has caused."""
    return error.status if isinstance(error, RequestError) else 400


def error_object(error: Exception) -> dict[str, Any]:
    """The value of "error" in OpenAI's answer to a request that cannot be served."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    if code is None and isinstance(error, NotImplementedError):
        code = "unsupported_value"
    kind = "server_error" if error_status(error) >= 500 else "invalid_request_error"
    return {"message": str(error), "type": kind, "param": param, "code": code}


def served_names(model: Any) -> tuple[str, ...]:
    """The names by which a request may ask for this model: as it was given to LLM, or the last part of a path."""
    name = str(model if isinstance(model, str | PurePath) else model.name)
    last = PurePath(name).name
    return tuple(dict.fromkeys((name, last, last.removesuffix(".gguf"))))


def check_model(body: Mapping[str, Any], names: Sequence[str]) -> str:
    """The model that the body asks for, else the first name. Raises RequestError (404) for one that is not served."""
    asked = body.get("model")
    if asked is None:
        return names[0]
    if asked not in names:
        raise RequestError(
            f"the model {asked!r} does not exist: this is {' or '.join(map(repr, names))}",
            param="model",
            status=404,
            code="model_not_found",
        )
    return asked


def chat_ask(body: Any, tokenizer: Tokenizer, defaults: Mapping[str, Any]) -> Ask:
    """What a body for /v1/chat/completions asks for. `defaults` are those of the checkpoint's generation_config."""
    given = given_fields(body, SAMPLING | COMMON | CHAT)
    messages = _messages(given)
    template = {name: given[name] for name in TEMPLATE if name in given and name != "chat_template_kwargs"}
    template |= _mapping(given, "chat_template_kwargs") or {}
    if "tokenize" in template:
        raise RequestError("unknown template argument 'tokenize'", param="chat_template_kwargs")
    if _flag(given, "add_special_tokens"):
        raise RequestError(
            "add_special_tokens=True is not supported: the template has them", param="add_special_tokens"
        )
    ids = tokenizer.apply_chat_template(messages, **template)
    top = _chat_logprobs(given)
    longest = given.get("max_completion_tokens", given.get("max_tokens", defaults.get("max_tokens")))
    last = messages[-1]
    echo = last["content"] if _flag(given, "echo") and last["role"] == "assistant" else False
    shown = given.get("prompt_logprobs") is not None
    answer = {"chat": True, "top_logprobs": top, "echo": echo, "prompt_logprobs": shown}
    return _ask(given, defaults, [_salted({"prompt_token_ids": ids}, given)], longest, answer)


def completion_ask(body: Any, tokenizer: Tokenizer | None, defaults: Mapping[str, Any]) -> Ask:
    """What a body for /v1/completions asks for."""
    given = given_fields(body, SAMPLING | COMMON | COMPLETION)
    top = given.get("logprobs")
    top = None if top is None else checked(integer, "logprobs", top, 0)
    prompts = prompts_of(given.get("prompt"))
    if not _flag(given, "add_special_tokens", True):
        prompts = [_unmarked(p, tokenizer) for p in prompts]
    echo, longest = _flag(given, "echo"), given.get("max_tokens", 16)
    shown = given.get("prompt_logprobs") is not None
    if echo and top is not None:
        given = {"prompt_logprobs": top, **given}
    # how clients have a text scored: nothing is to be generated, and the engine makes no less than a token
    if silent := echo and longest == 0 and not isinstance(longest, bool):
        longest = 1
    answer = {"chat": False, "top_logprobs": top, "echo": echo, "silent": silent, "prompt_logprobs": shown}
    return _ask(given, defaults, [_salted(p, given) for p in prompts], longest, answer)


def given_fields(body: Any, known: frozenset[str]) -> dict[str, Any]:
    """The fields that are not null, and no labels. Raises RequestError for one that is unknown or not served."""
    if not isinstance(body, Mapping):
        raise RequestError(f"the body is {_kind(body)}, not an object", param="body")
    for name in body:
        try:
            check_names("field", [name], known | LABELS | REFUSED.keys())
        except UnknownArgumentError as error:
            raise RequestError(str(error), param=name, code="unknown_parameter") from None
    given = {name: value for name, value in body.items() if value is not None and name not in LABELS}
    for name in given.keys() & REFUSED.keys():
        feature, harmless = REFUSED[name]
        if given.pop(name) not in harmless:
            raise RequestError(f"{name}: {feature} is not supported", param=name, code="unsupported_parameter")
    return given


def _ask(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    prompts: Sequence[Prompt],
    max_tokens: Any,
    answer: Mapping[str, Any],
) -> Ask:
    """The fields that both kinds of body have; `answer` holds those of Ask that only the caller knows."""
    sampling = {**defaults, **{name: given[name] for name in SAMPLING if name in given}}
    sampling |= {"max_tokens": max_tokens, "logprobs": answer["top_logprobs"], **constraint_of(given)}
    if "logit_bias" in given:
        sampling["logit_bias"] = _logit_bias(given["logit_bias"])
    if "vllm_xargs" in given:
        sampling["extra_args"] = _mapping(given, "vllm_xargs")
    options = _mapping(given, "stream_options")
    if options is not None and not given.get("stream"):
        raise RequestError("stream_options needs stream=true", param="stream_options")
    return Ask(
        prompts=tuple(prompts),
        params=SamplingParams(**sampling),
        priority=checked(integer, "priority", given.get("priority", 0)),
        stream=_flag(given, "stream"),
        stream_options=options,
        return_token_ids=_flag(given, "return_token_ids"),
        tokens_as_ids=_flag(given, "return_tokens_as_token_ids"),
        request_id=text_of_field(given, "request_id"),
        **answer,
    )


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages with their contents as text, which is what the templates of text models take."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages is {_kind(messages)}, not a list of at least one message", param="messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} is not an object with a role", param=where)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(f"{where}.{name} is not supported", param=where, code="unsupported_parameter")
    if message["role"] in ("tool", "function"):
        raise RequestError(f"{where}: the role {message['role']!r} is not supported", param=where)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where}.content is {_kind(content)}, not text or a list of texts", param=where)
    return {**message, "content": content}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        raise RequestError(f"{where} is {kind!r}: this model takes text alone", param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has no text", param=where)
    return part["text"]


def prompts_of(prompt: Any, name: str = "prompt") -> list[dict[str, Any]]:
    """One prompt or many: text, a list of texts, ids, or a list of lists of ids."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{name} is {_kind(prompt)}, not text, token ids or a list of these", param=name)
    if all(isinstance(p, str) for p in prompt):
        return [{"prompt": p} for p in prompt]
    if all(isinstance(p, list) for p in prompt):
        return [{"prompt_token_ids": p} for p in prompt]
    return [{"prompt_token_ids": prompt}]


def _unmarked(prompt: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The prompt without the special tokens that the tokenizer would put round it."""
    if "prompt" not in prompt or tokenizer is None:
        return prompt
    return {"prompt_token_ids": tokenizer.encode(prompt["prompt"], add_special_tokens=False)}


def _salted(prompt: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return prompt | ({"cache_salt": given["cache_salt"]} if "cache_salt" in given else {})


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted, top = _flag(given, "logprobs"), given.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted and top != 0:
        raise RequestError(f"top_logprobs {top!r} needs logprobs=true", param="top_logprobs")
    top = checked(integer, "top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    return top if wanted else None


def _logit_bias(bias: Any) -> dict[int, float]:
    """Token ids, which JSON can only name as strings, to biases from -100 to 100."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {_kind(bias)}, not an object of token ids and numbers", param="logit_bias")
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not str(key).isdecimal() or not str(key).isascii():
            raise RequestError(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise RequestError(f"logit_bias: {value!r} of token {key} is not a number", param="logit_bias")
        found[int(key)] = min(max(float(value), -LOGIT_BIAS), LOGIT_BIAS)
    return found


def constraint_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar that response_format or structured_outputs asks for, as a field of SamplingParams."""
    own, form = given.get("structured_outputs"), _mapping(given, "response_format")
    if form is None or form.get("type") == "text":
        return {} if own is None else {"structured_outputs": own}
    if own is not None:
        raise RequestError("response_format and structured_outputs: give one of them", param="response_format")
    match form.get("type"):
        case "json_object":
            _only(form, ("type",), "response_format")
            return {"structured_outputs": {"json_object": True}}
        case "structural_tag":
            return {"structured_outputs": {"structural_tag": {k: v for k, v in form.items() if k != "type"}}}
        case "json_schema":
            schema = form.get("json_schema")
            if not isinstance(schema, Mapping) or "schema" not in schema:
                raise RequestError("response_format.json_schema has no schema", param="response_format")
            # a form is always kept to: `strict` asks for what is done anyway
            _only(schema, ("name", "description", "schema", "strict"), "response_format.json_schema")
            _only(form, ("type", "json_schema"), "response_format")
            return {"structured_outputs": {"json": schema["schema"]}}
    raise RequestError(
        f"response_format.type {form.get('type')!r} is none of text, json_object, json_schema, structural_tag",
        param="response_format",
    )


def _only(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises RequestError for a key that nobody would look at."""
    if unknown := sorted(given.keys() - {*known}):
        raise RequestError(f"{where} has {', '.join(unknown)}: known are {', '.join(known)}", param="response_format")


def _flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    return checked(flag, name, given.get(name, default))


def text_of_field(given: Mapping[str, Any], name: str) -> str | None:
    """A field that is text of at least one character, if it is given."""
    value = given.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise RequestError(f"{name} {value!r} is not a string of at least one character", param=name)
    return value


def _mapping(given: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = given.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} is {_kind(value)}, not an object", param=name)
    return value


def checked(check: Callable[..., Any], name: str, value: Any, *bounds: Any) -> Any:
    """check(name, value, *bounds); what is wrong is a RequestError of that field."""
    try:
        return check(name, value, *bounds)
    except ValueError as error:
        raise RequestError(str(error), param=name) from None


def _kind(value: Any) -> str:
    """What JSON calls this kind of value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "missing"}
    return names.get(type(value), "a number")
