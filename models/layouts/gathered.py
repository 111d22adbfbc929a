"""Attention for layouts that ops.attention cannot read: keys and values gathered through block tables, then dense.

The step's queries are cut into tiles (W) of at most Q tokens of one sequence; M are the slots of a sequence's block
table, in its order. A few tiles are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..interface import Array, AttentionSpec, Step

QUERIES = 16  # of a tile; 1 in a decode step
MEMORY = 1 << 23  # elements of gathered keys at a time
FAR = 1 << 30  # a window that hides nothing
HIDDEN = -1e30

# read(table_WB, ...) -> keys [W, M, K, D], values [W, M, K, Dv] and the keys' positions [W, M], -1 where there is none
Read = Callable[..., tuple[Array, Array, Array]]


class Tiles(NamedTuple):
    """The sequence and first token of every tile, and each token's tile and place in it."""

    seq_W: Array
    start_W: Array
    tile_T: Array
    place_T: Array
    queries: int


def gather(pool: Array, table_WB: Array, order: str = "n p k d") -> Array:
    """The slots of these block tables [W, M, K, D], of a pool that lies in `order`; one without "d": [W, M, K]."""
    found, axes = pool[table_WB], ["w", *order.split()]
    for place, axis in enumerate("wnpkd"[: len(axes)]):
        at = axes.index(axis)
        axes[at], axes[place] = axes[place], axes[at]
        found = found if at == place else found.swapaxes(at, place)
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def positions(ops: Any, table_WB: Array, block_size: int) -> Array:
    """The position of each slot [W, M], as its block's place in the table says it; -1 in the null block."""
    width = table_WB.shape[1]
    slot_BP = ops.arange(width * block_size, like=table_WB).reshape(width, block_size)
    return ops.xp.where(table_WB[..., None] > 0, slot_BP, -1).reshape(-1, width * block_size)


def seen_blocks(ops: Any, step: Step, block_size: int, window: int, first: int) -> Array:
    """The blocks of each sequence that its queries may see, and behind them their places in its table: [S, 2 C].

    They see the `first` tokens, and the last `window`. So many blocks are read, however long the sequence is.
    """
    xp, table_SB, starts_S1 = ops.xp, step.block_tables_SB, step.query_starts_S1
    num_first = min(-(-first // block_size), table_SB.shape[1])
    num_new = 1 if step.decode else step.seq_ids_T.shape[0]
    width = min(table_SB.shape[1] - num_first, (window + num_new - 2) // block_size + 2)
    oldest_S = step.lengths_S - (starts_S1[1:] - starts_S1[:-1]) - window + 1
    near_SC = xp.clip(oldest_S // block_size, num_first, None)[:, None] + ops.arange(width, like=table_SB)
    place_SC = xp.concat([0 * oldest_S[:, None] + ops.arange(num_first, like=table_SB), near_SC], axis=-1)
    row_S1 = ops.arange(table_SB.shape[0], like=table_SB)[:, None]
    return xp.concat([table_SB[row_S1, xp.clip(place_SC, 0, table_SB.shape[1] - 1)], place_SC], axis=-1)


def places_of(ops: Any, table_WC: Array, block_size: int) -> tuple[Array, Array]:
    """Of rows of seen_blocks the blocks [W, B], and their slots' positions [W, M]; below 0 in the null block."""
    width = table_WC.shape[1] // 2
    table_WB, place_WB = table_WC[:, :width], table_WC[:, width:]
    start_WB = ops.xp.where(table_WB > 0, place_WB * block_size, -FAR)
    slot_WBP = start_WB[..., None] + ops.arange(block_size, like=table_WC)
    return table_WB, slot_WBP.reshape(table_WB.shape[0], -1)


def attend(
    ops: Any,
    q_TKGD: Array,
    read: Read,
    step: Step,
    spec: AttentionSpec,
    block_size: int,
    *,
    sinks_KG: Array | None = None,
    count_T: Array | None = None,
    first: int = 0,
    tiles: Tiles | None = None,
    more: tuple[Array, ...] = (),
) -> tuple[Array, Array | None]:
    """Attention of each query over its sequence's keys up to itself, within the spec's window: [T, K, G, Dv].

    The `first` positions are seen beyond a window too. Keys without a position, and those behind the sequence's end,
    take no part, whatever they hold. With `count_T` (float), also the weights that slots got from a sequence's queries,
    each times its count, summed over them and over the heads of a group: [S, M, K]. Weights and output are float32.
    `more` are arrays with an entry a tile, which `read` gets too; with them go the `tiles` that they were made for.
    """
    xp, tiles = ops.xp, tiles or query_tiles(ops, step)

    def some_tiles(seq_W: Array, start_W: Array, *more: Array) -> tuple[Array, ...]:
        k_WMKD, v_WMKD, pos_WM = read(step.block_tables_SB[seq_W], *more)
        if not tuple(k_WMKD.shape[:2]) == tuple(v_WMKD.shape[:2]) == tuple(pos_WM.shape):
            shapes = ", ".join(str(tuple(x.shape)) for x in (k_WMKD, v_WMKD, pos_WM))
            raise ValueError(
                f"read returned {shapes}: give [W, M, K, D], [W, M, K, D] and [W, M]; gather has an `order`"
            )
        there_WM = (pos_WM >= 0) & (pos_WM < step.lengths_S[seq_W][:, None])
        token_WQ = start_W[:, None] + ops.arange(tiles.queries, like=start_W)
        own_WQ = token_WQ < step.query_starts_S1[1:][seq_W][:, None]
        token_WQ = xp.clip(token_WQ, 0, q_TKGD.shape[0] - 1)
        behind_WQM = step.positions_T[token_WQ][..., None] - pos_WM[:, None]
        near_WQM = (behind_WQM < (spec.window or FAR)) | (pos_WM < first)[:, None]
        visible_WQM = (behind_WQM >= 0) & near_WQM & there_WM[:, None]
        # weight zero times what an unwritten slot holds would still be a nan, if that is one
        k_WMKD, v_WMKD = (xp.where(there_WM[..., None, None], x, 0) for x in (k_WMKD, v_WMKD))
        scores_WKGQM = ops.dot("wqkgd,wmkd->wkgqm", q_TKGD[token_WQ], k_WMKD) * spec.scale
        weights_WKGQM = softmax(xp, scores_WKGQM, visible_WQM[:, None, None], spec.softcap, sinks_KG)
        out_WQKGD = ops.dot("wkgqm,wmkd->wqkgd", weights_WKGQM, v_WMKD)
        if count_T is None:
            return (out_WQKGD,)
        return out_WQKGD, ops.dot("wkgqm,wq->wmk", weights_WKGQM, xp.where(own_WQ, count_T[token_WQ], 0.0))

    keys = step.block_tables_SB.shape[1] * block_size * q_TKGD.shape[1] * spec.k_dim
    at_once = max(1, min(tiles.seq_W.shape[0], MEMORY // keys))
    out_WQKGD, *mass_WMK = ops.map_tiles(some_tiles, (tiles.seq_W, tiles.start_W, *more), at_once)
    out_TKGD = ops.show("attention", xp.astype(out_WQKGD[tiles.tile_T, tiles.place_T], q_TKGD.dtype))
    if not mass_WMK:
        return out_TKGD, None
    seq_S = ops.arange(step.lengths_S.shape[0], like=tiles.seq_W)
    whose_SW = xp.astype(seq_S[:, None] == tiles.seq_W[None], mass_WMK[0].dtype)
    return out_TKGD, ops.dot("sw,wmk->smk", whose_SW, mass_WMK[0])


def query_tiles(ops: Any, step: Step) -> Tiles:
    """The step's tokens cut into tiles. There are more of them than needed: their number follows from shapes alone."""
    xp, starts_S1, seq_T = ops.xp, step.query_starts_S1, step.seq_ids_T
    num_seqs, num_tokens = starts_S1.shape[0] - 1, seq_T.shape[0]
    queries = 1 if step.decode else QUERIES
    ends_S = xp.cumulative_sum(-(-(starts_S1[1:] - starts_S1[:-1]) // queries), axis=0)
    first_S = xp.concat([xp.zeros_like(ends_S[:1]), ends_S[:-1]])
    num_tiles = num_seqs if step.decode else -(-num_tokens // queries) + num_seqs
    tile_W = ops.arange(num_tiles, like=starts_S1)
    seq_W = xp.clip(xp.searchsorted(ends_S, tile_W, side="right"), 0, num_seqs - 1)
    start_W = starts_S1[seq_W] + (tile_W - first_S[seq_W]) * queries
    within_T = ops.arange(num_tokens, like=starts_S1) - starts_S1[seq_T]
    # a padding token belongs to no tile: any place will do
    tile_T = xp.clip(first_S[seq_T] + within_T // queries, 0, num_tiles - 1)
    return Tiles(seq_W, start_W, tile_T, within_T % queries, queries)


def softmax(xp: Any, scores: Array, visible: Array, softcap: float | None, sinks_KG: Array | None) -> Array:
    """Weights [W, K, G, Q, M]. A sink is one more score, whose weight goes nowhere; who sees nothing has none."""
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    scores = xp.where(visible, scores, HIDDEN)
    top = xp.max(scores, axis=-1, keepdims=True)
    if sinks_KG is not None:
        sinks = xp.astype(sinks_KG, scores.dtype)[:, :, None, None]
        top = xp.maximum(top, sinks)
    weights = xp.where(visible, xp.exp(scores - top), 0.0)
    total = xp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks_KG is None else total + xp.exp(sinks - top)
    return weights / xp.where(total > 0, total, 1.0)
