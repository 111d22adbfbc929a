"""Attention that is meant to be fast on XLA:CPU: flash-style loops over tiles of queries and tiles of keys.

Letters: W tiles of a step, C tiles at once, Q queries of a tile, X = Q x G, M keys at once, B blocks at once.

Trip counts are dynamic: only real tiles, and only as many keys as the longest of the C tiles sees, are computed; so a
wide block table costs nothing. Sequences with one token and sequences with more are cut apart: a decode row shall not
pay for a tile of 32 queries. Keys and values are gathered as rows of a matrix, which XLA:CPU copies several times as
fast as a gather of more dims, in the order in which both products run as batched matrix products (Eigen).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from .reference import FAR, masked_scores

QUERIES = 32  # of a tile, for sequences with more than one token
LANES = 128  # query tokens at once
KEYS = 128  # keys at once and tile; twice as many where there are few tiles
FEW = 8  # X up to which scores are computed transposed
LATE = 2**31 - 1


class Tiles(NamedTuple):
    """Tiles of tokens of one sequence each; the first `count` of them are real."""

    seq_W: jax.Array
    start_W: jax.Array  # first token
    end_W: jax.Array  # one past the last token
    count: jax.Array


class Several(NamedTuple):
    """Tiles of the sequences with more than one token, and where in their outputs each token's is."""

    tiles: Tiles
    at_T: jax.Array
    is_single_T: jax.Array  # the token is that of a sequence with one token, and not here


class Plan(NamedTuple):
    """What the layers of a step share."""

    single: Tiles
    single_at_T: jax.Array
    several: Several | None  # None in a decode step


class Inputs(NamedTuple):
    """What one layer's attention reads."""

    q_TKGD: jax.Array
    k: jax.Array
    v: jax.Array
    block_tables_SB: jax.Array
    positions_T: jax.Array
    sinks_KG: jax.Array | None
    order: str
    spec: Any


def supports(spec: Any, dtype: str, platform: str, mode: str, block_size: int) -> str | None:
    """Why it cannot serve, or None."""
    if platform != "cpu":
        return f"it is for CPUs, not for {platform}"
    if dtype != "float32":
        return f"it wants a float32 cache, not {dtype}"
    if mode == "auto":
        return "it flattens blocks, which would gather a cache that the compiler shards"
    return None


def plan(step: Any) -> Plan:
    """Cuts the step's tokens into tiles."""
    starts_S, ends_S, seq_T = step.query_starts_S1[:-1], step.query_starts_S1[1:], step.seq_ids_T
    single_S = ends_S - starts_S == 1
    # shortest first, so that sequences computed together are about equally long
    seq_W = jnp.argsort(jnp.where(single_S, step.lengths_S, LATE)).astype(jnp.int32)
    rank_S = jnp.zeros_like(seq_W).at[seq_W].set(jnp.arange(seq_W.shape[0], dtype=jnp.int32))
    single = Tiles(seq_W, starts_S[seq_W], ends_S[seq_W], jnp.sum(single_S, dtype=jnp.int32))
    if step.decode:
        return Plan(single, rank_S[seq_T], None)
    tiles, first_S = _tiles_of_several(starts_S, ends_S, seq_T.shape[0])
    within_T = jnp.arange(seq_T.shape[0], dtype=jnp.int32) - starts_S[seq_T]
    several = Several(tiles, first_S[seq_T] * QUERIES + within_T, single_S[seq_T])
    return Plan(single, rank_S[seq_T], several)


def _tiles_of_several(starts_S: jax.Array, ends_S: jax.Array, num_tokens: int) -> tuple[Tiles, jax.Array]:
    """Tiles of the sequences with more than one token, and the first tile of each sequence."""
    counts_S, num_seqs = ends_S - starts_S, starts_S.shape[0]
    tiles_S = jnp.where(counts_S > 1, -(-counts_S // QUERIES), 0)
    last_S = jnp.cumsum(tiles_S, dtype=jnp.int32)
    first_S = last_S - tiles_S
    tile_W = jnp.arange(num_tokens // QUERIES + min(num_seqs, num_tokens // 2) + 1, dtype=jnp.int32)
    seq_W = jnp.minimum(jnp.searchsorted(last_S, tile_W, side="right").astype(jnp.int32), num_seqs - 1)
    start_W = starts_S[seq_W] + (tile_W - first_S[seq_W]) * QUERIES
    end_W = jnp.minimum(start_W + QUERIES, ends_S[seq_W])
    return Tiles(seq_W, start_W, end_W, last_S[-1]), first_S


def attend(
    q_TKGD: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks_KG: Any, plan: Plan
) -> jax.Array:
    """softmax(scale q k^T + mask) v, each query over its sequence's keys up to itself; [T, K, G, Dv].

    Reference: reference.py. Tolerance: 1e-5 absolute in float32, for inputs of unit variance.
    """
    return _attend(q_TKGD, k, v, step.block_tables_SB, step.positions_T, sinks_KG, plan, order, spec)


# a function of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("order", "spec"))
def _attend(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables_SB: jax.Array,
    positions_T: jax.Array,
    sinks_KG: jax.Array | None,
    plan: Plan,
    order: str,
    spec: Any,
) -> jax.Array:
    inputs = Inputs(q_TKGD, k, v, block_tables_SB, positions_T, sinks_KG, order, spec)
    single_TKGD = _run(inputs, plan.single, 1)[plan.single_at_T]
    if plan.several is None:
        return single_TKGD
    several_TKGD = _run(inputs, plan.several.tiles, QUERIES)[plan.several.at_T]
    return jnp.where(plan.several.is_single_T[:, None, None, None], single_TKGD, several_TKGD)


def _run(x: Inputs, tiles: Tiles, queries: int) -> jax.Array:
    """Outputs of all tiles' queries, [W Q, K, G, Dv]; zeros where no tile is real."""
    size = min(max(1, LANES // queries), tiles.seq_W.shape[0])
    pad = -tiles.seq_W.shape[0] % size
    seq_W, start_W, end_W = (jnp.pad(a, (0, pad)) for a in tiles[:3])
    out = jnp.zeros((seq_W.shape[0] * queries, *x.q_TKGD.shape[1:3], x.v.shape[-1]), x.q_TKGD.dtype)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        seq_C, start_C, end_C = (lax.dynamic_slice(a, (i * size,), (size,)) for a in (seq_W, start_W, end_W))
        real_C = i * size + jnp.arange(size) < tiles.count
        new = _attend_tiles(x, seq_C, start_C, jnp.where(real_C, end_C, start_C), queries)
        return lax.dynamic_update_slice(out, new, (i * size * queries, 0, 0, 0))

    return lax.fori_loop(0, -(-tiles.count // size), body, out)


def _attend_tiles(x: Inputs, seq_C: jax.Array, start_C: jax.Array, end_C: jax.Array, queries: int) -> jax.Array:
    """The C tiles' outputs, [C Q, K, G, Dv]. A running maximum and sum over tiles of keys (arXiv:2205.14135)."""
    spec = x.spec
    token_CQ = jnp.clip(start_C[:, None] + jnp.arange(queries), 0, jnp.maximum(end_C - 1, 0)[:, None])
    position_CQ = x.positions_T[token_CQ]
    # tokens of the sequence that the tile's last query sees; 0 where the tile is padding
    length_C = jnp.where(end_C > start_C, position_CQ[:, -1] + 1, 0)
    q_CKXD = rearrange(x.q_TKGD[token_CQ] * spec.scale, "c q k g d -> c k (q g) d")
    position_CX = jnp.repeat(position_CQ, x.q_TKGD.shape[2], axis=1)
    size = x.k.shape[x.order.split().index("p")]
    blocks = max(1, KEYS * (1 if len(seq_C) >= 8 else 2) // size)
    blocks = min(blocks, x.block_tables_SB.shape[1])
    table_CB = jnp.pad(x.block_tables_SB, ((0, 0), (0, -x.block_tables_SB.shape[1] % blocks)))[seq_C]
    keys = blocks * size

    def body(i: jax.Array, carry: tuple) -> tuple:
        top_CKX, sum_CKX, out_CKXD = carry
        ids_CB = lax.dynamic_slice(table_CB, (0, i * blocks), (len(seq_C), blocks))
        key_M = i * keys + jnp.arange(keys)
        behind_CXM = position_CX[:, :, None] - key_M
        visible_CXM = (behind_CXM >= 0) & (behind_CXM < (spec.window or FAR))
        scores_CKXM = _scores(q_CKXD, _gather(x.k, x.order, ids_CB))
        scores_CKXM = masked_scores(scores_CKXM, visible_CXM[:, None], spec.softcap)
        # weight zero times what an unwritten slot holds would still be a nan, if that is one
        written_CM = key_M < length_C[:, None]
        v_CKMD = jnp.where(written_CM[:, None, :, None], _gather(x.v, x.order, ids_CB), 0)
        new_CKX = jnp.maximum(top_CKX, scores_CKXM.max(-1))
        shrink_CKX = jnp.exp(top_CKX - new_CKX)
        weight_CKXM = jnp.exp(scores_CKXM - new_CKX[..., None])
        added_CKXD = jnp.einsum("ckxm,ckmd->ckxd", weight_CKXM, v_CKMD, precision="highest")
        return new_CKX, sum_CKX * shrink_CKX + weight_CKXM.sum(-1), out_CKXD * shrink_CKX[..., None] + added_CKXD

    last = -(-jnp.max(length_C) // keys)
    first = 0
    if spec.window is not None:
        oldest_C = jnp.where(length_C > 0, position_CQ[:, 0] - (spec.window - 1), LATE)
        first = jnp.clip(jnp.min(oldest_C), 0, None) // keys
    start = _start(q_CKXD, x.v.shape[-1], x.sinks_KG, queries)
    _, sum_CKX, out_CKXD = lax.fori_loop(first, last, body, start)
    out_CKXD = out_CKXD / jnp.where(sum_CKX > 0, sum_CKX, 1.0)[..., None]
    return rearrange(out_CKXD, "c k (q g) d -> (c q) k g d", q=queries)


def _gather(x: jax.Array, order: str, ids_CB: jax.Array) -> jax.Array:
    """[C, K, M, D]: the blocks' keys or values, one kv head after the other."""
    size = dict(zip(order.split(), x.shape, strict=True))
    row_CKB = ids_CB[:, None] * size["k"] + jnp.arange(size["k"])[:, None]
    if order == "n p k d":
        head_K11, slot_P = jnp.arange(size["k"])[:, None, None], jnp.arange(size["p"])
        row_CKB = (ids_CB[:, None, :, None] * size["p"] + slot_P) * size["k"] + head_K11
    rows = x.reshape(-1, size["d"] if order == "n p k d" else size["p"] * size["d"])
    found = rows.at[row_CKB.reshape(-1)].get(mode="promise_in_bounds")
    # or XLA:CPU fuses the reshape into the gather, which then copies element by element
    return lax.optimization_barrier(found).reshape(len(ids_CB), size["k"], -1, size["d"])


def _scores(q_CKXD: jax.Array, k_CKMD: jax.Array) -> jax.Array:
    """q k^T, [C, K, X, M]. With few queries Eigen is four times as fast the other way round."""
    if q_CKXD.shape[2] > FEW:
        return jnp.einsum("ckxd,ckmd->ckxm", q_CKXD, k_CKMD, precision="highest")
    scores_CKMX = jnp.einsum("ckmd,ckxd->ckmx", k_CKMD, q_CKXD, precision="highest")
    # or XLA moves the transpose into the product, which makes it the slow one
    return lax.optimization_barrier(scores_CKMX).swapaxes(2, 3)


def _start(q_CKXD: jax.Array, v_dim: int, sinks_KG: Any, queries: int) -> tuple:
    """Maximum, sum and output before the first key; sinks are keys without a value."""
    shape = q_CKXD.shape[:-1]
    out_CKXD = jnp.zeros((*shape, v_dim), jnp.float32)
    if sinks_KG is None:
        return jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32), out_CKXD
    sinks_CKX = jnp.broadcast_to(jnp.tile(sinks_KG.astype(jnp.float32), (1, queries)), shape)
    return sinks_CKX, jnp.ones(shape, jnp.float32), out_CKXD
