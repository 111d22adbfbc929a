"""What a request asks of the logits before one of them is sampled: pure functions, in the order of semantics 3.2.

What forbids ids (allowed ids, bad words, min_tokens) does so only as long as another id is left: a row of nothing but
-inf has no distribution. So whichever of these comes later gives way, and a grammar, which comes first, never does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .interface import Array, ArraySpec

MAX_STOP_IDS = 64  # ids a row can forbid until min_tokens
MAX_BIAS = 1024  # ids a row can bias
MAX_BAD_WORDS = 128  # words a row can forbid, each as up to two sequences of ids
MAX_BAD_IDS = 1024  # ids in all these sequences together
MAX_PROCESSOR_COLUMNS = 64  # all processors of an engine: one to select it, and one for each of its parameters
STOP = 1 << 16  # weight of a stop id beside bad words, of which there are fewer
NEVER = float("-inf")


@dataclass(frozen=True)
class History:
    """The ids that a row has so far: its first `num_known_R`, of which `prompt_len_R` are prompt.

    What lies behind is of no meaning, and an id below 0 stands for a prompt embedding.
    """

    tokens_RL: Array
    num_known_R: Array
    prompt_len_R: Array


@dataclass(frozen=True)
class LogitsProcessor:
    """A step of one's own between penalties and temperature, for the requests that name it in extra_args.

    `function(logits_RV, history, params, ops)` returns new logits [R, V] of the same dtype (else the step fails with
    ValueError) and is written once for both backends: it may use operators, indexing, `ops` and `ops.xp`, and must
    treat each row by itself. `history` is a History; `params` holds a float32 [R, 1] for each of the declared `params`,
    whose values here are the defaults.
    """

    name: str
    function: Callable[[Array, History, dict[str, Array], Any], Array]
    params: Mapping[str, float] = field(default_factory=dict)


def edit_specs(row: Callable[..., ArraySpec], vocab_size: int) -> dict[str, ArraySpec]:
    """The columns that hold a row's edits. They mean something where "edited" (which is none of them) is not 0."""
    return {
        "allowed": row(-(-vocab_size // 32)),  # bits, as `unpack` reads them
        "bias_ids": row(MAX_BIAS),  # padded with -1
        "bias": row(MAX_BIAS, dtype="float32"),
        "bad_ids": row(MAX_BAD_IDS),  # of the sequences, one behind the other
        "bad_back": row(MAX_BAD_IDS),  # how far each is from the last of its sequence
        "bad_words": row(MAX_BAD_IDS),  # which sequence that is; padded with -1
        "bad_last": row(2 * MAX_BAD_WORDS),  # the last id of each sequence; padded with -1
        "processors": row(MAX_PROCESSOR_COLUMNS, dtype="float32"),
    }


def unpack(words_RW: Array, size: int, ops: Any) -> Array:
    """bool [R, size] of int32 [R, W]: bit i % 32 of word i // 32 says whether id i is allowed."""
    bits_RWB = (words_RW[:, :, None] >> ops.arange(32, like=words_RW)) & 1
    return bits_RWB.reshape(words_RW.shape[0], -1)[:, :size] > 0


def forbid(logits_RV: Array, forbidden_RV: Array, ops: Any) -> Array:
    """Forbidden ids at -inf, in the rows that keep another."""
    left_RV = (logits_RV > NEVER) & ~forbidden_RV
    some_R1 = ops.xp.any(left_RV, axis=-1, keepdims=True)
    return ops.xp.where(forbidden_RV & some_R1, NEVER, logits_RV)


def edit(logits_RV: Array, rows: dict[str, Array], at_R: Array, ops: Any) -> Array:
    """allowed_token_ids, bad_words, logit_bias, min_tokens."""
    xp, size = ops.xp, logits_RV.shape[1]
    edited_R1 = (rows["edited"][at_R] != 0)[:, None]
    count_RV = _count_forbidden(rows, at_R, edited_R1, size, ops)
    logits_RV = forbid(logits_RV, edited_R1 & ~unpack(rows["allowed"][at_R], size, ops), ops)
    logits_RV = forbid(logits_RV, count_RV % STOP > 0, ops)
    ids_RM = xp.where(edited_R1, rows["bias_ids"][at_R], -1)
    logits_RV = logits_RV + ops.tally(ids_RM, rows["bias"][at_R], size)
    return forbid(logits_RV, count_RV >= STOP, ops)


def _count_forbidden(rows: dict[str, Array], at_R: Array, edited_R1: Array, size: int, ops: Any) -> Array:
    """int32 [R, V]: how many bad words an id would end, plus STOP for each time that min_tokens forbids it."""
    xp = ops.xp
    early_R1 = (rows["num_computed"][at_R] - rows["prompt_len"][at_R] < rows["min_tokens"][at_R])[:, None]
    stops_RM = xp.where(early_R1, rows["stop_ids"][at_R], -1)
    bad_RM = xp.where(edited_R1, last_of_bad_words(rows, at_R, ops), -1)
    weight_RM = xp.concat([xp.ones_like(stops_RM) * STOP, xp.ones_like(bad_RM)], axis=1)
    return ops.tally(xp.concat([stops_RM, bad_RM], axis=1), weight_RM, size)


def last_of_bad_words(rows: dict[str, Array], at_R: Array, ops: Any) -> Array:
    """For each forbidden sequence its last id if the output ends with all before it, else -1.

    All sequences are compared at once: a sequence fits if none of its ids misses.
    """
    xp, ids_RM, back_RM = ops.xp, rows["bad_ids"][at_R], rows["bad_back"][at_R]
    place_RM = rows["num_computed"][at_R][:, None] - back_RM
    found_RM = rows["tokens"][at_R[:, None], xp.clip(place_RM, 0, rows["tokens"].shape[1] - 1)]
    # the last of a sequence is what may come, and only output counts
    fits_RM = (back_RM == 0) | ((found_RM == ids_RM) & (place_RM >= rows["prompt_len"][at_R][:, None]))
    misses_RM = xp.where(fits_RM, xp.zeros_like(ids_RM), 1)
    last_RN = rows["bad_last"][at_R]
    return xp.where(ops.tally(rows["bad_words"][at_R], misses_RM, last_RN.shape[1]) == 0, last_RN, -1)


def history(rows: dict[str, Array], at_R: Array) -> History:
    """What the sampled rows have so far."""
    return History(rows["tokens"][at_R], rows["num_computed"][at_R], rows["prompt_len"][at_R])


def penalise(logits_RV: Array, past: History, params: dict[str, Array], ops: Any) -> Array:
    """repetition_penalty over prompt and output, then frequency_penalty and presence_penalty over the output."""
    xp, size = ops.xp, logits_RV.shape[1]
    place_L = ops.arange(past.tokens_RL.shape[1], like=past.num_known_R)[None]
    counts_RL = (place_L < past.num_known_R[:, None]) & (past.tokens_RL >= 0)
    # one histogram of twice the vocabulary: prompt, then output
    made_RL = xp.where(place_L >= past.prompt_len_R[:, None], past.tokens_RL + size, past.tokens_RL)
    ids_RL = xp.where(counts_RL, made_RL, -1)
    count_RV2 = ops.tally(ids_RL, xp.ones_like(ids_RL), 2 * size, xp.max(past.num_known_R))
    prompt_RV, output_RV = count_RV2[:, :size], count_RV2[:, size:]
    repetition_R1 = params["repetition_penalty"]
    repeated_RV = xp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = xp.where(prompt_RV + output_RV > 0, repeated_RV, logits_RV)
    logits_RV = logits_RV - params["frequency_penalty"] * xp.astype(output_RV, xp.float32)
    return logits_RV - xp.where(output_RV > 0, params["presence_penalty"], 0.0)


def process(
    logits_RV: Array,
    rows: dict[str, Array],
    at_R: Array,
    past: History,
    processors: Sequence[LogitsProcessor],
    ops: Any,
) -> Array:
    """Each processor, in the order of registration, on the rows that select it."""
    columns_RC, first = rows["processors"][at_R], 0
    edited_R1 = (rows["edited"][at_R] != 0)[:, None]
    for p in processors:
        chosen_R1 = edited_R1 & (columns_RC[:, first : first + 1] > 0)
        params = {name: columns_RC[:, first + i : first + i + 1] for i, name in enumerate(p.params, 1)}
        made = p.function(logits_RV, past, params, ops)
        _check_made(p.name, made, logits_RV)
        logits_RV = ops.xp.where(chosen_R1, made, logits_RV)
        first += 1 + len(p.params)
    return logits_RV


def _check_made(name: str, made: Any, logits_RV: Array) -> None:
    """Raises ValueError for what would be broadcast or cast into something that nobody meant."""
    found, want = ((type(x).__name__, getattr(x, "shape", None), getattr(x, "dtype", None)) for x in (made, logits_RV))
    if found[1:] != want[1:] or made is None:
        raise ValueError(f"logits processor {name!r} returned {found}, and must return logits like those given: {want}")
