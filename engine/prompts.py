"""The forms in which prompts and their parameters may come, checked and made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
FORMS = 'a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int, ...]}'


def list_of_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
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


def list_of_messages(messages: Sequence[Any]) -> list[Sequence[dict[str, Any]]]:
    """One conversation or many, as a list."""
    if not messages:
        raise ValueError("messages is empty: give at least one, like {'role': 'user', 'content': 'Hi'}")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """The token ids of one prompt. Raises ValueError for an empty one and for ids that the model does not have."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - KEYS
        if unknown or ("prompt" in prompt) + ("prompt_token_ids" in prompt) != 1:
            raise ValueError(f"prompt {dict(prompt)!r}: a prompt is {FORMS}, and may have a cache_salt")
        prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {prompt!r} is text and there is no tokenizer: give prompt_token_ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = _checked_ids(prompt, vocab_size)
    if not ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    return ids


def salt_of(prompt: Prompt, default: str | None) -> str | None:
    """The prompt's own cache_salt, else the default. Raises ValueError for one that is not text."""
    salt = prompt.get("cache_salt", default) if isinstance(prompt, Mapping) else default
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt {salt!r} is not a string of at least one character")
    return salt


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text, if it came as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _checked_ids(ids: Any, vocab_size: int) -> list[int]:
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ValueError(f"prompt {ids!r}: a prompt is {FORMS}")
    ids = list(ids)
    for i in ids:
        if not isinstance(i, Integral) or isinstance(i, bool) or not 0 <= int(i) < vocab_size:
            raise ValueError(f"token id {i!r} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
    return [int(i) for i in ids]
