"""Blocks that a step adds tokens to, whole: for layouts that round a block once it is full.

Until then its tokens lie in the row of their request (CacheLayout.row_spec). W here are the blocks that get tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..interface import Array, Step
from .gathered import Tiles, query_tiles


class Growing(NamedTuple):
    """The blocks that get tokens, each with those as its tile, its place in the block table and its id.

    `row_W` is the request's row for the last block of a sequence, and the scratch row for all others.
    """

    tiles: Tiles
    index_W: Array
    at_W: Array
    row_W: Array


def growing(ops: Any, step: Step, block_size: int, scratch: int) -> Growing:
    """The blocks that the step adds tokens to. Those that stand for padding are the null block."""
    tiles, xp = block_tiles(ops, step, block_size), ops.xp
    seq_W, num_tokens = tiles.seq_W, step.seq_ids_T.shape[0]
    real_W = tiles.start_W < step.query_starts_S1[1:][seq_W]
    index_W = step.positions_T[xp.clip(tiles.start_W, 0, num_tokens - 1)] // block_size
    last_W = real_W & (index_W == (step.lengths_S[seq_W] - 1) // block_size)
    at_W = xp.where(real_W, step.block_tables_SB[seq_W, index_W], 0)
    return Growing(tiles, index_W, at_W, xp.where(last_W, step.rows_S[seq_W], scratch))


def whole(ops: Any, x_TKD: Array, rows_RPKD: Array, blocks: Growing, step: Step) -> Array:
    """All of these blocks [W, P, K, D]: the step's own tokens, and those before it from their row.

    Slots that have no token yet hold anything.
    """
    xp, seq_W, block_size = ops.xp, blocks.tiles.seq_W, rows_RPKD.shape[1]
    # where a sequence's first token would lie in the step
    first_S = step.query_starts_S1[1:] - step.lengths_S
    token_WP = (first_S[seq_W] + blocks.index_W * block_size)[:, None] + ops.arange(block_size, like=seq_W)
    before_WP = token_WP < step.query_starts_S1[seq_W][:, None]
    now_WPKD = x_TKD[xp.clip(token_WP, 0, x_TKD.shape[0] - 1)]
    return xp.where(before_WP[..., None, None], rows_RPKD[step.rows_S[seq_W]], now_WPKD)


def block_tiles(ops: Any, step: Step, block_size: int) -> Tiles:
    """The step's tokens cut where blocks end: a tile for each block that gets tokens (in a decode step: queries 1)."""
    if step.decode:
        return query_tiles(ops, step)
    xp, starts_S1, seq_T = ops.xp, step.query_starts_S1, step.seq_ids_T
    num_seqs, num_tokens = starts_S1.shape[0] - 1, seq_T.shape[0]
    counts_S = starts_S1[1:] - starts_S1[:-1]
    computed_S = step.lengths_S - counts_S
    before_S = computed_S // block_size  # blocks of a sequence that get nothing
    tiles_S = xp.where(counts_S > 0, (step.lengths_S - 1) // block_size - before_S + 1, 0)
    ends_S = xp.cumulative_sum(tiles_S, axis=0)
    first_S = ends_S - tiles_S
    num_tiles = num_tokens // block_size + 2 * num_seqs
    tile_W = ops.arange(num_tiles, like=starts_S1)
    seq_W = xp.clip(xp.searchsorted(ends_S, tile_W, side="right"), 0, num_seqs - 1)
    ahead_W = (before_S[seq_W] + tile_W - first_S[seq_W]) * block_size - computed_S[seq_W]
    start_W = starts_S1[seq_W] + xp.clip(ahead_W, 0, None)
    tile_T = xp.clip(first_S[seq_T] + step.positions_T // block_size - before_S[seq_T], 0, num_tiles - 1)
    place_T = xp.clip(ops.arange(num_tokens, like=starts_S1) - start_W[tile_T], 0, block_size - 1)
    return Tiles(seq_W, start_W, tile_T, place_T, block_size)
