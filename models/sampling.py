"""One pure sampler. Parameters and history live in CacheState.rows, so a step says only which rows to sample.

The order is semantics 3.2: raw logprobs, grammar, allowed ids, bad words, bias, min_tokens, penalties, processors,
greedy, temperature, min_p, top_k, top_p, Gumbel-max. A smaller variant leaves out what no row of a step asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import logit_edits
from .interface import Array, ArraySpec, Output, Sampling
from .logit_edits import MAX_STOP_IDS, NEVER, LogitsProcessor, unpack
from .logprobs import of_sampled

# each includes those before it
VARIANTS = ("greedy", "sample", "truncate", "edits", "penalties", "processors")
PARAMS = (  # columns of rows["params"]
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def row_specs(num_rows: int, max_model_len: int, vocab_size: int) -> dict[str, ArraySpec]:
    """What CacheState.rows holds for each of num_rows rows."""

    def row(*shape: int, dtype: str = "int32") -> ArraySpec:
        return ArraySpec((num_rows, *shape), (None,) * (1 + len(shape)), dtype, "zeros")

    return {
        "tokens": row(max_model_len),
        "num_computed": row(),
        "prompt_len": row(),
        "keys": row(2),
        "params": row(len(PARAMS), dtype="float32"),
        "min_tokens": row(),
        "stop_ids": row(MAX_STOP_IDS),  # padded by repeating one of them
        "edited": row(),  # 1: what follows is this row's own
    } | logit_edits.edit_specs(row, vocab_size)


def at_least(variant: str, least: str) -> bool:
    """Whether a variant includes another."""
    return VARIANTS.index(variant) >= VARIANTS.index(least)


def sees_all(sampling: Sampling) -> bool:
    """Whether sampling has to see all logits of a row at once. If not, each device does with its part of them."""
    edits = at_least(sampling.variant, "truncate") or sampling.mask_RW is not None
    return edits or sampling.digest or sampling.num_logprobs >= 0


def sample(
    logits_RV: Array,
    rows: dict[str, Array],
    sampling: Sampling,
    ops: Any,
    processors: Sequence[LogitsProcessor] = (),
) -> Output:
    """The next token of each sampled row, and the logprobs that were asked for."""
    xp, at, variant = ops.xp, sampling.rows_R, sampling.variant
    if variant == "greedy" and not sees_all(sampling):
        # rounding to float32 first would change no order, and costs as much as finding the greatest
        return Output(ops.argmax(logits_RV, "vocab"))
    raw_RV = xp.astype(logits_RV, xp.float32)
    # greedy asks for none of them, and what is not asked for is not computed, op by op either
    param = {} if variant == "greedy" else columns(rows["params"][at])
    logits_RV = shape(raw_RV, rows, param, sampling, ops, processors)
    scaled_RV = best_RV = logits_RV
    if variant != "greedy":
        greedy_R1 = param["temperature"] == 0
        scaled_RV = logits_RV / xp.where(greedy_R1, 1.0, param["temperature"])
        if at_least(variant, "truncate"):
            scaled_RV = truncate(scaled_RV, param, ops)
        index_R = rows["num_computed"][at] - rows["prompt_len"][at]  # of the token about to be made
        noise_RV = ops.gumbel(rows["keys"][at], index_R, scaled_RV.shape[-1], "vocab")
        best_RV = xp.where(greedy_R1, logits_RV, scaled_RV + noise_RV)
    return of_sampled(raw_RV, scaled_RV, ops.argmax(best_RV, "vocab"), sampling, ops)


def columns(params_RP: Array) -> dict[str, Array]:
    """PARAMS by name, each [R, 1]."""
    return {name: params_RP[:, i : i + 1] for i, name in enumerate(PARAMS)}


def shape(
    logits_RV: Array,
    rows: dict[str, Array],
    param: dict[str, Array],
    sampling: Sampling,
    ops: Any,
    processors: Sequence[LogitsProcessor],
) -> Array:
    """The logits as everything before the temperature leaves them."""
    at, variant = sampling.rows_R, sampling.variant
    if sampling.mask_RW is not None:
        logits_RV = ops.xp.where(unpack(sampling.mask_RW, logits_RV.shape[1], ops), logits_RV, NEVER)
    if at_least(variant, "edits"):
        logits_RV = logit_edits.edit(logits_RV, rows, at, ops)
    if at_least(variant, "penalties"):
        past = logit_edits.history(rows, at)
        logits_RV = logit_edits.penalise(logits_RV, past, param, ops)
        if at_least(variant, "processors"):
            logits_RV = logit_edits.process(logits_RV, rows, at, past, processors, ops)
    return logits_RV


def truncate(logits_RV: Array, param: dict[str, Array], ops: Any) -> Array:
    """min_p, then top_k, then top_p, thresholds found by bisecting the bits of a float: exact, no sort, ties stay."""
    xp = ops.xp
    bits_RV = ops.ordered_bits(logits_RV)
    weight_RV = xp.exp(logits_RV - xp.max(logits_RV, axis=-1, keepdims=True))
    weight_RV = xp.where(weight_RV >= param["min_p"], weight_RV, 0.0)
    limit_R1 = xp.where(param["top_k"] > 0, param["top_k"], float(logits_RV.shape[1]))
    kth_R1 = ops.bisect(lambda t_R1: xp.sum(xp.where(bits_RV >= t_R1, 1.0, 0.0), axis=-1, keepdims=True) >= limit_R1)
    weight_RV = xp.where(bits_RV >= kth_R1, weight_RV, 0.0)
    mass_R1 = param["top_p"] * xp.sum(weight_RV, axis=-1, keepdims=True)
    edge_R1 = ops.bisect(
        lambda t_R1: xp.sum(xp.where(bits_RV >= t_R1, weight_RV, 0.0), axis=-1, keepdims=True) >= mass_R1
    )
    kept_RV = (weight_RV > 0) & ((bits_RV >= edge_R1) | (param["top_p"] >= 1.0))
    return xp.where(kept_RV, logits_RV, NEVER)
