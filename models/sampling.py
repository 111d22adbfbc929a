"""One pure sampler. Parameters and history live in CacheState.rows, so a step says only which rows to sample.

The order is semantics 3.2: raw logprobs, grammar, min_tokens, [penalties], greedy, temperature, min_p, top_k, top_p,
Gumbel-max.
"""

from __future__ import annotations

from typing import Any

from .interface import Array, ArraySpec, Output, Sampling

VARIANTS = ("greedy", "sample", "truncate", "edits", "penalties")  # each includes those before it
PARAMS = ("temperature", "top_k", "top_p", "min_p")  # columns of rows["params"]
MAX_STOP_IDS = 64  # ids a row can forbid until min_tokens
NEVER = float("-inf")


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
    }


def sample(logits_RV: Array, rows: dict[str, Array], sampling: Sampling, ops: Any) -> Output:
    """The next token of each sampled row, and the logprobs that were asked for."""
    xp, at = ops.xp, sampling.rows_R
    raw_RV = xp.astype(logits_RV, xp.float32)
    logits_RV = raw_RV
    if sampling.mask_RW is not None:
        logits_RV = xp.where(unpack(sampling.mask_RW, raw_RV.shape[1], ops), raw_RV, NEVER)
    param = {name: rows["params"][at, i][:, None] for i, name in enumerate(PARAMS)}
    index_R = rows["num_computed"][at] - rows["prompt_len"][at]  # of the token about to be made
    if VARIANTS.index(sampling.variant) >= VARIANTS.index("edits"):
        logits_RV = forbid_stops(logits_RV, rows, at, index_R, ops)
    ids_R = ops.argmax(logits_RV)
    if sampling.variant != "greedy":
        greedy_R1 = param["temperature"] == 0
        scaled_RV = logits_RV / xp.where(greedy_R1, 1.0, param["temperature"])
        if sampling.variant != "sample":
            scaled_RV = truncate(scaled_RV, param, ops)
        noise_RV = ops.gumbel(rows["keys"][at], index_R, scaled_RV.shape[-1])
        ids_R = xp.where(greedy_R1[:, 0], ids_R, ops.argmax(scaled_RV + noise_RV))
    return logprobs(raw_RV, ids_R, sampling, ops)


def unpack(words_RW: Array, size: int, ops: Any) -> Array:
    """bool [R, size] of int32 [R, W]: bit i % 32 of word i // 32 says whether id i is allowed."""
    bits_RWB = (words_RW[:, :, None] >> ops.arange(32, like=words_RW)) & 1
    return bits_RWB.reshape(words_RW.shape[0], -1)[:, :size] > 0


def forbid_stops(logits_RV: Array, rows: dict[str, Array], at_R: Array, index_R: Array, ops: Any) -> Array:
    """Until min_tokens are out, a row's stop ids cannot be sampled."""
    xp = ops.xp
    early_R1 = (index_R < rows["min_tokens"][at_R])[:, None]
    ids_RM, row_R = rows["stop_ids"][at_R], ops.arange(at_R.shape[0], like=at_R)
    # into a mask of its own: scatter consumes what it writes to, and the raw logits are still needed
    early_RM = xp.where(early_R1, xp.ones_like(ids_RM), 0)
    stop_RV = ops.scatter(xp.zeros_like(logits_RV, dtype=xp.int32), (row_R[:, None], ids_RM), early_RM)
    return xp.where(stop_RV > 0, NEVER, logits_RV)


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


def logprobs(raw_RV: Array, ids_R: Array, sampling: Sampling, ops: Any) -> Output:
    """Logprobs of the raw distribution: before grammar, temperature and truncation (vLLM's raw_logprobs)."""
    xp, digests_R = ops.xp, ops.digest(raw_RV) if sampling.digest else None
    if sampling.num_logprobs < 0:
        return Output(ids_R, digests_R=digests_R)
    row_R = ops.arange(ids_R.shape[0], like=ids_R)
    picked_R = raw_RV[row_R, ids_R]
    total_R = ops.logsumexp(raw_RV)
    ranks_R = xp.astype(xp.sum(xp.where(raw_RV >= picked_R[:, None], 1.0, 0.0), axis=-1), xp.int32)
    if sampling.num_logprobs == 0:
        return Output(ids_R, picked_R - total_R, ranks_R, digests_R=digests_R)
    top_RN, top_ids_RN = ops.top_k(raw_RV, sampling.num_logprobs)
    return Output(ids_R, picked_R - total_R, ranks_R, top_ids_RN, top_RN - total_R[:, None], digests_R)
