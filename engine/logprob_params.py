"""The sampling parameters that ask for logprobs: what is legal, and what they mean for one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .batch import MAX_TOKEN_IDS
from .checks import flag, integer, sequence
from .reads import Wanted

if TYPE_CHECKING:
    from .sampling_params import SamplingParams


def checked_logprobs(p: SamplingParams) -> dict[str, Any]:
    """The fields that ask for logprobs, checked and normalised: True is 1, False is None, lists are tuples."""
    start, given = p.prompt_logprob_start, p.prompt_logprob_token_ids
    prompt = {
        "prompt_logprobs": _count("prompt_logprobs", p.prompt_logprobs),
        "prompt_logprob_start": None if start is None else integer("prompt_logprob_start", start, 0),
        "prompt_logprob_token_ids": None
        if given is None
        else tuple(_ids("prompt_logprob_token_ids", ids) for ids in sequence("prompt_logprob_token_ids", given)),
    }
    asked = prompt["prompt_logprobs"] is not None or given is not None
    if start is not None and not asked:
        raise ValueError(f"prompt_logprob_start {start} without prompt_logprobs or prompt_logprob_token_ids")
    skip = p.skip_reading_prefix_cache
    return prompt | {
        "logprobs": _count("logprobs", p.logprobs),
        "logprob_token_ids": None if p.logprob_token_ids is None else _ids("logprob_token_ids", p.logprob_token_ids),
        "flat_logprobs": flag("flat_logprobs", p.flat_logprobs),
        # a cached token has no hidden row: what is wanted of the prompt is always computed, this only says it
        "skip_reading_prefix_cache": asked and not start if skip is None else flag("skip_reading_prefix_cache", skip),
    }


def _count(name: str, value: Any) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    return None if value is None else integer(name, value, -1)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Distinct ids, in order. Raises ValueError for more than the device takes."""
    ids = tuple(dict.fromkeys(integer(name, i, 0) for i in sequence(name, value)))
    if len(ids) > MAX_TOKEN_IDS:
        raise ValueError(f"{name} has {len(ids)} ids: at most {MAX_TOKEN_IDS} can be asked for a token")
    return ids


def resolved_logprobs(p: SamplingParams, vocab_size: int, max_logprobs: int) -> dict[str, Any]:
    """The counts with -1 made vocab_size. Raises ValueError for more than max_logprobs, and for ids of no token."""
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    counts = {name: getattr(p, name) for name in ("logprobs", "prompt_logprobs")}
    for name, asked in counts.items():
        counts[name] = vocab_size if asked == -1 else asked
        if (counts[name] or 0) > limit:
            raise ValueError(
                f"{name} {asked} asks for {counts[name]} a token: more than {limit}, which max_logprobs "
                f"{max_logprobs} and a vocabulary of {vocab_size} allow"
            )
    for name in ("logprob_token_ids", "prompt_logprob_token_ids"):
        given = getattr(p, name) or ()
        ids = given if name == "logprob_token_ids" else (i for row in given for i in row)
        if wrong := [i for i in ids if i >= vocab_size]:
            raise ValueError(f"{name} {wrong} are outside the vocabulary, 0 to {vocab_size - 1}")
    return counts


def sibling_params(p: SamplingParams) -> SamplingParams:
    """Those of the n - 1 samples that take the prompt over from the first, which reads what is wanted of it."""
    if p.n == 1 or (p.prompt_logprobs is None and p.prompt_logprob_token_ids is None):
        return p
    return p.clone(skip_reading_prefix_cache=False)


def wanted_of(p: SamplingParams, prompt: Sequence[int]) -> Wanted | None:
    """What is to be read of a prompt, by resolved params; None: nothing. Raises ValueError where they do not fit it."""
    given = p.prompt_logprob_token_ids
    if p.prompt_logprobs is None and given is None:
        return None
    start, stop = p.prompt_logprob_start or 0, len(prompt) - 1
    if start > stop:
        raise ValueError(f"prompt_logprob_start {start} is beyond a prompt of {len(prompt)} tokens")
    if given is not None and len(given) != stop - start:
        raise ValueError(
            f"prompt_logprob_token_ids has {len(given)} lists of ids: give one for each of the {stop - start} tokens "
            f"behind prompt_logprob_start {start}"
        )
    if start == stop:
        return None
    return Wanted(start, stop, tuple(prompt[start + 1 :]), p.prompt_logprobs or 0, tuple(map(tuple, given or ())))
