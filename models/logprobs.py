"""Logprobs, or logits, of sampled and of known tokens: theirs, those of the most likely, and those of given ids."""

from __future__ import annotations

from typing import Any

from .interface import Array, ModelSpec, Output, Reading, Sampling

# raw: before everything, grammar and penalties included. processed: of the distribution sampled from
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def of_sampled(raw_RV: Array, processed_RV: Array, ids_R: Array, sampling: Sampling, ops: Any) -> Output:
    """What the head hands to the host: the sampled ids, and as much about them as was asked for.

    `processed_RV` are the logits whose softmax was sampled from; of a greedy row those that the argmax saw, as in vLLM.
    """
    digests_R = ops.digest(raw_RV) if sampling.digest else None
    if sampling.num_logprobs < 0:
        return Output(ids_R, digests_R=digests_R)
    logits_RV = raw_RV if sampling.logprobs_mode.startswith("raw") else processed_RV
    found = about(logits_RV, ids_R, sampling.num_logprobs, sampling.token_ids_RN, sampling.logprobs_mode, ops)
    return Output(ids_R, digests_R=digests_R, **found)


def of_known(
    weights: dict, rows: dict[str, Array], x_TE: Array, reading: Reading, *, ops: Any, model: ModelSpec
) -> tuple[Output, dict[str, Array]]:
    """About the known tokens behind a tile of hidden rows. Nothing is processed: no token of a prompt is sampled.

    `rows` come through as they are: every program consumes a part of the state, and this one needs none of it.
    """
    raw_RV = model.unembed(weights, x_TE[reading.hidden_R], ops)
    ids_R = reading.targets_R
    found = about(raw_RV, ids_R, reading.num_logprobs, reading.token_ids_RN, reading.logprobs_mode, ops)
    return Output(ids_R, **found), rows


def about(
    logits_RV: Array, ids_R: Array, num: int, token_ids_RN: Array | None, mode: str, ops: Any
) -> dict[str, Array]:
    """The fields of Output about ids_R, the `num` largest, and token_ids_RN. Values are logprobs or, by mode, logits.

    A rank is how many of the vocabulary are at least as likely, the token itself included.
    """
    row_R = ops.arange(ids_R.shape[0], like=ids_R)
    logits_RV = ops.xp.astype(logits_RV, ops.xp.float32)
    shift_R1 = 0.0 if mode.endswith("logits") else ops.logsumexp(logits_RV)[:, None]
    picked_R1 = logits_RV[row_R, ids_R][:, None]
    found = {"logprobs_R": (picked_R1 - shift_R1)[:, 0], "ranks_R": rank(logits_RV, picked_R1, ops)}
    if num > 0:
        top_RN, ids_RN = ops.top_k(logits_RV, num)
        found |= {"top_ids_RN": ids_RN, "top_logprobs_RN": top_RN - shift_R1}
    if token_ids_RN is not None:
        given_RN = logits_RV[row_R[:, None], token_ids_RN]
        found |= {"id_logprobs_RN": given_RN - shift_R1, "id_ranks_RN": ranks(logits_RV, given_RN, ops)}
    return found


def rank(logits_RV: Array, value_R1: Array, ops: Any) -> Array:
    """int32 [R]: how many logits of a row are at least its value."""
    xp = ops.xp
    return xp.astype(xp.sum(xp.where(logits_RV >= value_R1, 1.0, 0.0), axis=-1), xp.int32)


def ranks(logits_RV: Array, values_RN: Array, ops: Any) -> Array:
    """rank of each column of values_RN, one after the other: all at a time would be [R, N, V]."""
    xp = ops.xp
    row_R = ops.arange(values_RN.shape[0], like=rank(logits_RV, values_RN[:, :1], ops))

    def body(state: tuple) -> tuple:
        ranks_RN, n_R = state
        value_R1 = values_RN[row_R, n_R][:, None]
        return ops.scatter(ranks_RN, (row_R, n_R), rank(logits_RV, value_R1, ops)), n_R + 1

    start = xp.zeros_like(values_RN, dtype=xp.int32), row_R * 0
    return ops.loop(lambda state: state[1][0] < values_RN.shape[1], body, start)[0]
