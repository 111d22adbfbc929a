"""Attention the obvious way: cut the ragged queries into tiles of one sequence each, and give each tile its keys.

A tile's keys are gathered once for all its queries; a few tiles are in memory at a time. Nothing is per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

QUERIES = 16  # of a tile; 1 in a decode step
MEMORY = 1 << 23  # elements of gathered keys at a time
FAR = 1 << 30  # a window that hides nothing
HIDDEN = -1e30  # score of a key that is not seen: finite, so that a query which sees none stays a number


class Tiles(NamedTuple):
    """Tiles (W) of `queries` tokens (Q), none of two sequences."""

    seq_W: jax.Array
    start_W: jax.Array  # first token
    tile_T: jax.Array  # tile of each token
    place_T: jax.Array  # and its place in it
    queries: int


def query_tiles(step: Any, queries: int = QUERIES) -> Tiles:
    """The step's tokens cut into tiles. There are more tiles than needed: the number is fixed by the step's shapes."""
    starts_S1, seq_T = step.query_starts_S1, step.seq_ids_T
    num_seqs, num_tokens = starts_S1.shape[0] - 1, seq_T.shape[0]
    queries = 1 if step.decode else queries
    ends_S = jnp.cumsum(-(-(starts_S1[1:] - starts_S1[:-1]) // queries), dtype=jnp.int32)
    first_S = jnp.concatenate([jnp.zeros(1, ends_S.dtype), ends_S[:-1]])
    tile_W = jnp.arange(num_seqs if step.decode else -(-num_tokens // queries) + num_seqs, dtype=jnp.int32)
    seq_W = jnp.minimum(jnp.searchsorted(ends_S, tile_W, side="right").astype(jnp.int32), num_seqs - 1)
    start_W = starts_S1[seq_W] + (tile_W - first_S[seq_W]) * queries
    within_T = jnp.arange(num_tokens, dtype=jnp.int32) - starts_S1[seq_T]
    return Tiles(seq_W, start_W, first_S[seq_T] + within_T // queries, within_T % queries, queries)


def keys_of(x: jax.Array, scale: jax.Array | None, order: str, table_SB: jax.Array) -> jax.Array:
    """The keys, or values, of block tables [..., B] as float32 [..., M, K, D]; of a quantised cache times its scales.

    `order` is that of x, and of `scale` without d.
    """
    found = rearrange(x[table_SB], f"... {order} -> ... (n p) k d").astype(jnp.float32)
    return found if scale is None else found * rearrange(scale[table_SB], f"... {order[:-2]} -> ... (n p) k 1")


def masked_scores(scores: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    """Scores after softcap (Gemma 2, arXiv 2408.00118 section 2), invisible keys far below all others."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(visible, scores, HIDDEN)


def attend(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    order: str,
    step: Any,
    spec: Any,
    sinks_KG: jax.Array | None,
    tiles: Tiles,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """softmax(scale q k^T + mask) v, each query over its sequence's keys up to itself; [T, K, G, Dv].

    `scales`: of k and of v, in their order without d; what lies in the cache is times them.
    """
    seq_W, start_W, tile_T, place_T, queries = tiles

    def one_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        seq, start = tile
        table_B = step.block_tables_SB[seq]
        k_MKD, v_MKD = (keys_of(x, scale, order, table_B) for x, scale in zip((k, v), scales or (None, None)))
        # weight zero times what an unwritten slot holds would still be a nan, if that is one
        written_M11 = (jnp.arange(k_MKD.shape[0]) < step.lengths_S[seq])[:, None, None]
        k_MKD, v_MKD = jnp.where(written_M11, k_MKD, 0), jnp.where(written_M11, v_MKD, 0)
        token_Q = jnp.minimum(start + jnp.arange(queries), q_TKGD.shape[0] - 1)
        behind_QM = step.positions_T[token_Q][:, None] - jnp.arange(k_MKD.shape[0])
        visible_QM = (behind_QM >= 0) & (behind_QM < (spec.window or FAR))
        q_QKGD = q_TKGD[token_Q].astype(jnp.float32)
        scores_KGQM = jnp.einsum("qkgd,mkd->kgqm", q_QKGD, k_MKD, precision="highest") * spec.scale
        probs_KGQM = softmax(masked_scores(scores_KGQM, visible_QM, spec.softcap), sinks_KG)
        return jnp.einsum("kgqm,mkd->qkgd", probs_KGQM, v_MKD, precision="highest")

    keys = step.block_tables_SB.shape[1] * k.size // k.shape[0]
    at_once = max(1, min(len(seq_W), MEMORY // keys))
    out_WQKGD = jax.lax.map(one_tile, (seq_W, start_W), batch_size=at_once)
    return out_WQKGD[tile_T, place_T].astype(q_TKGD.dtype)


def softmax(scores_KGQM: jax.Array, sinks_KG: jax.Array | None) -> jax.Array:
    """Over keys; sinks are one more logit each, whose probability goes nowhere (gpt-oss)."""
    if sinks_KG is None:
        return jax.nn.softmax(scores_KGQM, -1)
    sinks_KG11 = sinks_KG.astype(jnp.float32)[:, :, None, None]
    top = jnp.maximum(scores_KGQM.max(-1, keepdims=True), sinks_KG11)
    weights = jnp.exp(scores_KGQM - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - top))
