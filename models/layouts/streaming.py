"""StreamingLLM (arXiv:2309.17453): the first tokens, into which attention sinks, and the last ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..interface import Array, AttentionSpec, LayerCache, Rope, Step
from ..keeps import Keeps
from .gathered import attend, gather
from .paged import TokenMajor

NOWHERE = -(1 << 30)  # a position that no token has


@dataclass(frozen=True)
class StreamingLLM(TokenMajor):
    """A query sees the first `sinks` tokens and the last `window`, itself included. Positions are those in the cache.

    The paper stores keys unturned and turns them on every read by their place in the cache. Rope is relative, so that
    is the same as this: keys lie turned by their position, and the sinks meet a second query, turned to the last place
    of a full cache. Both queries lie in one row, and a key is zero where it meets the other one.
    """

    window: int = 252
    sinks: int = 4

    def __post_init__(self) -> None:
        # it checks them
        assert self.keeps

    @property
    def keeps(self) -> Keeps:
        return Keeps(window=self.window, sinks=self.sinks)

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, write, then attend; as ever in layers that have a window of their own."""
        if spec.window is not None:
            return super().attention(ops, cache, parts, step, spec)
        xp, rope, far_q = ops.xp, None, parts["q"]
        if spec.rope is not None:
            rope = step.ropes[spec.rope]
            far_T = xp.minimum(step.positions_T, self.sinks + self.window - 1)
            far_q = ops.rope(far_q, Rope(rope.inv_freq_D, *ops.rope_table(far_T, rope.inv_freq_D)))
        near_q, cache = ops.rope_write(parts["q"], {n: parts[n] for n in "kv"}, rope, cache, self.order, step)

        def read(table_WB: Array) -> tuple[Array, Array, Array]:
            blocks, places = table_WB[:, : table_WB.shape[1] // 2], table_WB[:, table_WB.shape[1] // 2 :]
            offset_P = ops.arange(self.block_size, like=blocks)
            pos_WM = xp.where(blocks > 0, places * self.block_size, NOWHERE)[..., None] + offset_P
            pos_WM = pos_WM.reshape(blocks.shape[0], -1)
            k, v = gather(cache["k"], blocks), gather(cache["v"], blocks)
            sink = (pos_WM < self.sinks)[..., None, None]
            return xp.concat([xp.where(sink, 0, k), xp.where(sink, k, 0)], axis=-1), v, pos_WM

        spec = replace(spec, window=self.window, k_dim=2 * spec.k_dim)
        seen, q = replace(step, block_tables_SB=self._seen(ops, step)), xp.concat([near_q, far_q], axis=-1)
        sinks = parts.get("sinks")
        return attend(ops, q, read, seen, spec, self.block_size, sinks_KG=sinks, first=self.sinks)[0], cache

    def _seen(self, ops: Any, step: Step) -> Array:
        """Of each sequence the blocks that its queries may see, and behind them their places in its table: [S, 2 C]."""
        xp, table_SB, size, starts = ops.xp, step.block_tables_SB, self.block_size, step.query_starts_S1
        first = min(-(-self.sinks // size), table_SB.shape[1])
        new = 1 if step.decode else step.seq_ids_T.shape[0]
        width = min(table_SB.shape[1] - first, (self.window + new - 2) // size + 2)
        oldest_S = step.lengths_S - (starts[1:] - starts[:-1]) - self.window + 1
        near_SC = xp.clip(oldest_S // size, first, None)[:, None] + ops.arange(width, like=table_SB)
        places = xp.concat([0 * near_SC[:, :1] + ops.arange(first, like=table_SB), near_SC], axis=-1)
        row_S1 = ops.arange(table_SB.shape[0], like=table_SB)[:, None]
        return xp.concat([table_SB[row_S1, xp.clip(places, 0, table_SB.shape[1] - 1)], places], axis=-1)
