"""The forms in which prompts and their parameters may come, checked and made one."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from .checks import UnknownArgumentError
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int] | np.ndarray
EXAMPLE = "{'role': 'user', 'content': 'Hi'}"
# known of vLLM's chat; unnamed they would pass for variables of the template
LATER = ("lora_request", "mm_processor_kwargs", "chat_template_content_format")
# without references to what came before; behind a list's tag and length, its items
MARSHAL_VERSION, MARSHALLED = 2, np.dtype([("tag", "u1"), ("value", "<u4")])
KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# a prompt with both keys is its ids; the text is only shown
FORMS = (
    'a string, a list or array of ids, {"prompt": str}, {"prompt_token_ids": [int, ...]} or {"prompt_embeds": array}'
)


def list_of_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | Mapping) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts {prompts!r}: a prompt is {FORMS}, or give a list of these")
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]
    return list(prompts)


def list_of_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts or one each, as a list."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"sampling_params {params!r} is not a SamplingParams or a list of them")
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling params for {num_prompts} prompts: give one, or one for each")
    return list(params)


def check_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params {params!r} is not a SamplingParams")
    return params


def check_id(request_id: Any) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request id {request_id!r} is not a string of at least one character")


def list_of_messages(messages: Any) -> list[Sequence[Any]]:
    """One conversation or many, as a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f"messages {messages!r} is not a list of at least one, like {EXAMPLE}")
    if not isinstance(messages[0], Sequence):
        return [messages]
    for one in messages:
        if not isinstance(one, Sequence) or isinstance(one, str | bytes):
            raise ValueError(f"conversation {one!r} is not a list of messages like {EXAMPLE}")
    return list(messages)


def is_chat(prompt: Any) -> bool:
    """Whether this is a list of chat messages: no form of a prompt is a list of dicts."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def template_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What goes to apply_chat_template. vLLM's chat_template_kwargs are variables, as all others are."""
    arguments = dict(given)
    more = arguments.pop("chat_template_kwargs", None)
    if more is not None and not isinstance(more, Mapping):
        raise ValueError(f"chat_template_kwargs {more!r} is not a dict")
    if "tokenize" in (arguments := arguments | dict(more or {})):
        raise UnknownArgumentError("unknown argument 'tokenize': the model wants ids; a tokenizer gives the text")
    for name in LATER:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"{name}={arguments[name]!r} is not supported yet")
    return arguments


def salt_of(prompt: Prompt, default: str | None) -> str | None:
    """The prompt's own cache_salt, else the default. Raises ValueError for one that is not text."""
    salt = prompt.get("cache_salt", default) if isinstance(prompt, Mapping) else default
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt {salt!r} is not a string of at least one character")
    return salt


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """The token ids of one prompt. Raises ValueError for an empty one and for ids that the model does not have."""
    if isinstance(prompt, Mapping):
        if "prompt_embeds" in prompt:
            raise ValueError("this wants text or token ids: prompt_embeds go with generate and add_request")
        unknown = set(prompt) - KEYS
        if unknown or not ("prompt" in prompt or "prompt_token_ids" in prompt):
            raise ValueError(f"prompt {dict(prompt)!r}: a prompt is {FORMS}, and may have a cache_salt")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {prompt!r} is text and there is no tokenizer: give prompt_token_ids")
        ids = tokenizer.encode(prompt)
        if ids and max(ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer gives token id {max(ids)}, and the model's go to {vocab_size - 1}: do they match?"
            )
    else:
        ids = _checked_ids(prompt, vocab_size)
    if not ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    return ids


def cut(ids: list[int], params: SamplingParams, max_model_len: int, auto: bool) -> list[int]:
    """The part of a prompt that its truncate_prompt_tokens keeps.

    With `auto` (allow_auto_truncate), one that would still be too long loses its end, as in SGLang, and that is logged.
    """
    keep, longest = params.truncate_prompt_tokens, max_model_len - 1
    if keep == -1:
        keep = max(1, max_model_len - (params.max_tokens or 1))
    if keep is not None and keep < len(ids):
        ids = ids[-keep:] if params.truncation_side == "left" else ids[:keep]
    if auto and len(ids) > longest:
        log.warning("a prompt of %d tokens is cut to its first %d (allow_auto_truncate)", len(ids), longest)
        ids = ids[:longest]
    return ids


def untokenized(prompt: Prompt) -> str | None:
    """The text that is still to become ids; None: there is none."""
    return None if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt else text_of(prompt)


def with_ids(prompt: Prompt, ids: list[int]) -> Prompt:
    """A prompt of text with the ids that a tokenizer has made of it."""
    return {**(prompt if isinstance(prompt, Mapping) else {"prompt": prompt}), "prompt_token_ids": ids}


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text, if it came as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _checked_ids(ids: Any, vocab_size: int) -> list[int]:
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ValueError(f"prompt {ids!r}: a prompt is {FORMS}")
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if _are_plain(ids, vocab_size):
        return ids
    for i in ids:
        if not isinstance(i, Integral) or isinstance(i, bool) or not 0 <= int(i) < vocab_size:
            raise ValueError(f"token id {i!r} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
    return [int(i) for i in ids]


def _are_plain(ids: list[Any], vocab_size: int) -> bool:
    """Whether these are ints (no bools, no numpy's) from 0 to below vocab_size, as far as is seen at a glance.

    marshal puts an int of 32 bits down as its tag and its value, whatever else with another tag or length: one pass
    in C sees types and values of a benchmark's half a million ids in a few ms.
    """
    try:
        data = marshal.dumps(ids, MARSHAL_VERSION)
    # an object of a kind that it does not know
    except ValueError:
        return False
    if not ids or len(data) != MARSHALLED.itemsize * (len(ids) + 1):
        return False
    found = np.frombuffer(data, MARSHALLED, offset=MARSHALLED.itemsize)
    # below 0 is more than any vocabulary has
    return bool((found["tag"] == ord("i")).all()) and int(found["value"].max()) < vocab_size
