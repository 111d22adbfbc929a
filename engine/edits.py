"""What a request asks of the logits: checked as a user writes it, then in ids as one engine understands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..models.logit_edits import MAX_BAD_IDS, MAX_BAD_WORDS, MAX_BIAS, LogitsProcessor
from .checks import integer, number, sequence
from .logits_processors import columns_of
from .plan import Edits

if TYPE_CHECKING:
    from .sampling_params import SamplingParams
    from .tokenizer import Tokenizer

# beyond these, products and quotients of float32 logits could reach infinity
MOST_BIAS, MOST_REPETITION = 1e9, 1e6


def checked_edits(p: SamplingParams) -> dict[str, Any]:
    """The fields that change logits, checked and normalised: what asks for nothing is None."""
    least = 1 / MOST_REPETITION
    allowed = None if p.allowed_token_ids is None else sequence("allowed_token_ids", p.allowed_token_ids)
    if allowed == ():
        raise ValueError("allowed_token_ids [] allows nothing: give at least one id, or None for all")
    words = sequence("bad_words", p.bad_words)
    for word in words:
        if not isinstance(word, str) or not word:
            raise ValueError(f"bad_words: {word!r} is not a string of at least one character")
    return {
        "presence_penalty": number("presence_penalty", p.presence_penalty, -2, 2),
        "frequency_penalty": number("frequency_penalty", p.frequency_penalty, -2, 2),
        "repetition_penalty": number("repetition_penalty", p.repetition_penalty, least, MOST_REPETITION),
        "logit_bias": _bias(p.logit_bias),
        "allowed_token_ids": allowed and tuple(dict.fromkeys(integer("allowed_token_ids", i, 0) for i in allowed)),
        "bad_words": tuple(dict.fromkeys(words)) or None,
        "extra_args": _extra(p.extra_args),
    }


def _bias(given: Any) -> dict[int, float] | None:
    """Ids may be strings, as JSON has them."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias {given!r} is not a dict of token ids to numbers")
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = integer("logit_bias: token id", int(key) if isinstance(key, str) and key.isdecimal() else key, 0)
        if token in bias:
            raise ValueError(f"logit_bias has token id {token} twice")
        bias[token] = number(f"logit_bias of token id {token}", value, -MOST_BIAS, MOST_BIAS)
    return bias or None


def _extra(given: Any) -> dict[str, dict[str, float]] | None:
    if given is None:
        return None
    shape = "a dict of logits processors' names to dicts of their parameters"
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"extra_args {given!r} is not {shape}, such as {{'name': {{'parameter': 1.0}}}}")
    most = 3e38
    return {
        name: {key: number(f"extra_args: {name} {key}", v, -most, most) for key, v in params.items()}
        for name, params in given.items()
    } or None


def edits_of(
    p: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None, processors: Sequence[LogitsProcessor]
) -> Edits | None:
    """The edits of resolved params in ids; None for the many requests that have none.

    Raises ValueError for what this engine cannot serve: ids outside the vocabulary, more than a row of the cache holds,
    words without a tokenizer, a processor that is not registered.
    """
    if not (p.allowed_token_ids or p.logit_bias or p.bad_words or p.extra_args):
        return None
    allowed, bias = p.allowed_token_ids or (), p.logit_bias or {}
    for name, ids in (("allowed_token_ids", allowed), ("logit_bias", bias)):
        if wrong := [i for i in ids if i >= vocab_size]:
            raise ValueError(f"{name}: {wrong} are outside the vocabulary, 0 to {vocab_size - 1}")
    if len(bias) > MAX_BIAS:
        raise ValueError(f"logit_bias has {len(bias)} token ids, and at most {MAX_BIAS} are possible")
    words = _sequences(p.bad_words or (), vocab_size, tokenizer)
    if allowed and {(i,) for i in allowed} <= set(words):
        raise ValueError(f"bad_words {list(p.bad_words or ())} forbid every one of allowed_token_ids")
    return Edits(tuple(allowed), tuple(bias.items()), words, columns_of(p.extra_args or {}, processors))


def _sequences(words: Sequence[str], vocab_size: int, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The ids of each word; and, as in vLLM, of the word behind a space, if they are as many and begin otherwise."""
    if not words:
        return ()
    if tokenizer is None:
        raise ValueError(f"bad_words {list(words)} need a tokenizer, and the engine has none (skip_tokenizer_init)")
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words has {len(words)} words, and at most {MAX_BAD_WORDS} are possible")
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not plain:
            raise ValueError(f"bad_words: the tokenizer makes no ids of {word!r}")
        found += [plain] if len(spaced) != len(plain) or spaced[0] == plain[0] else [plain, spaced]
    found = list(dict.fromkeys(found))
    if wrong := [ids for ids in found if max(ids) >= vocab_size]:
        raise ValueError(f"bad_words: ids {wrong} are outside the vocabulary, 0 to {vocab_size - 1}")
    if (count := sum(map(len, found))) > MAX_BAD_IDS:
        raise ValueError(f"bad_words are {count} token ids in all, and at most {MAX_BAD_IDS} are possible")
    return tuple(found)


def edits_to_json(edits: Edits) -> dict[str, Any]:
    """A JSON-able value, without the fields that are empty."""
    return {name: value for name, value in asdict(edits).items() if value}


def edits_from_json(value: Mapping[str, Any]) -> Edits:
    """The Edits that edits_to_json was given."""
    return Edits(**{name: tuple(_frozen(x) for x in items) for name, items in value.items()})


def _frozen(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x
