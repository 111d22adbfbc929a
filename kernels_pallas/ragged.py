"""A step as the GPU and TPU kernels read it: rows with one token apart from tiles of several tokens of one sequence.

Letters: I rows with one token, W tiles, Q tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ORDERED = 64  # rows beyond which they do not all run at once
FILL = 512  # programs that keep an H200 busy: half or twice as many are 15-50 % slower
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2(e)): the hardware has exp2


class Rows(NamedTuple):
    """Tokens that are alone in their sequence's part of the step."""

    seq_I: jax.Array
    token_I: jax.Array  # where its query is
    length_I: jax.Array  # keys up to itself; 0: this row is none


class Tiles(NamedTuple):
    """Runs of at most Q tokens of one sequence each; the first `count` of them are real."""

    seq_W: jax.Array
    start_W: jax.Array  # first token
    end_W: jax.Array  # one past the last token of the sequence in this step; start_W where the tile is none
    position_W: jax.Array  # of the first token
    count_1: jax.Array


class Prefixes(NamedTuple):
    """First blocks that sequences of one token have in common: models/interface.py's SharedPrefixes, for rows."""

    members_WC: jax.Array
    lengths_W: jax.Array
    token_S: jax.Array  # where a sequence's query is
    length_I: jax.Array  # tokens that a row shares


class Several(NamedTuple):
    """Outputs of the tokens that are not alone, among which those of rows are put."""

    out_TKGD: jax.Array
    end_1: jax.Array  # tokens of the step that are real; what lies behind may be anything


@jax.tree_util.register_pytree_node_class
class Plan:
    """What the layers of a step share. Tiles of a size are made once, when first asked for. A pytree."""

    def __init__(self, step: Any) -> None:
        starts_S1, seq_T = step.query_starts_S1, step.seq_ids_T
        self.counts_S = starts_S1[1:] - starts_S1[:-1]
        self.starts_S, self.lengths_S, self.seq_T = starts_S1[:-1], step.lengths_S, seq_T
        self.decode, self.num_tokens = step.decode, seq_T.shape[0]
        token_T = jnp.arange(self.num_tokens, dtype=jnp.int32)
        # padding follows the last real token; positions there are 0, but belong to nobody
        self.end_1 = starts_S1[-1:].astype(jnp.int32)
        self.real_T = token_T < self.end_1
        if step.decode:
            length_T = jnp.where(self.real_T, step.positions_T + 1, 0).astype(jnp.int32)
            self.rows = Rows(seq_T.astype(jnp.int32), token_T, length_T)
        else:
            seq_S = jnp.arange(self.counts_S.shape[0], dtype=jnp.int32)
            length_S = jnp.where(self.counts_S == 1, self.lengths_S, 0).astype(jnp.int32)
            last = self.num_tokens - 1
            self.rows = Rows(seq_S, jnp.clip(self.starts_S, 0, last).astype(jnp.int32), length_S)
        if len(self.rows.length_I) > ORDERED:
            self.rows = longest_first(self.rows)
        self.prefixes = None
        if step.shared is not None:
            length_I = jnp.where(self.rows.length_I > 0, step.shared.lengths_S[self.rows.seq_I], 0)
            token_S = jnp.minimum(self.starts_S, self.num_tokens - 1)
            self.prefixes = Prefixes(step.shared.members_WC, step.shared.lengths_W, token_S, length_I)
        self._made: dict[Any, Any] = {}

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays, and what is no array."""
        arrays = (self.counts_S, self.starts_S, self.lengths_S, self.seq_T, self.end_1, self.real_T)
        arrays = (*arrays, self.rows, self.prefixes, self._made)
        return arrays, (self.decode, self.num_tokens)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: tuple) -> Plan:
        """The plan again."""
        plan = object.__new__(cls)
        plan.counts_S, plan.starts_S, plan.lengths_S, plan.seq_T, plan.end_1, plan.real_T = arrays[:6]
        plan.rows, plan.prefixes, plan._made = arrays[6:]
        plan.decode, plan.num_tokens = static
        return plan

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), for the first layer that asks; what was made then for all others."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def tiles(self, queries: int) -> Tiles:
        """The sequences with several tokens cut into tiles of `queries`. Their number is fixed by the step's shapes."""
        return self.once(("tiles", queries), lambda: self._cut(queries))

    def _cut(self, queries: int) -> Tiles:
        num_seqs = self.counts_S.shape[0]
        tiles_S = jnp.where(self.counts_S > 1, -(-self.counts_S // queries), 0)
        last_S = jnp.cumsum(tiles_S, dtype=jnp.int32)
        # a sequence with several tokens wastes at most one tile
        most = self.num_tokens // queries + min(num_seqs, self.num_tokens // 2) + 1
        tile_W = jnp.arange(most, dtype=jnp.int32)
        seq_W = jnp.minimum(jnp.sum(tile_W[:, None] >= last_S[None], axis=-1, dtype=jnp.int32), num_seqs - 1)
        ahead_W = (tile_W - (last_S - tiles_S)[seq_W]) * queries
        start_W = jnp.clip(self.starts_S[seq_W] + ahead_W, 0, self.num_tokens).astype(jnp.int32)
        end_W = (self.starts_S + self.counts_S)[seq_W].astype(jnp.int32)
        end_W = jnp.where(tile_W < last_S[-1], end_W, start_W)
        position_W = ((self.lengths_S - self.counts_S)[seq_W] + ahead_W).astype(jnp.int32)
        return Tiles(seq_W, start_W, end_W, position_W, last_S[-1:])


def longest_first(rows: Rows) -> Rows:
    """The rows by falling length, so that those which begin last take least. By comparing all: no GPU has to loop."""
    length_I, index_I = rows.length_I, jnp.arange(rows.length_I.shape[0], dtype=jnp.int32)
    ahead_II = (length_I[None] > length_I[:, None]) | (
        (length_I[None] == length_I[:, None]) & (index_I[None] < index_I[:, None])
    )
    place_I = jnp.sum(ahead_II, axis=-1, dtype=jnp.int32)
    row_I = jnp.sum(jnp.where(place_I[None] == index_I[:, None], index_I[None], 0), axis=-1, dtype=jnp.int32)
    return Rows(*(x[row_I] for x in rows))


def split_count(num_rows: int, num_kv_heads: int, fill: int = FILL, most: int = 64) -> int:
    """Parts of a row's keys that are attended to at once, so that about `fill` programs keep the device busy."""
    parts = 1
    while parts < most and num_rows * num_kv_heads * parts < fill:
        parts *= 2
    return parts
