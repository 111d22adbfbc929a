"""StreamingLLM (arXiv:2309.17453): the first tokens, into which attention sinks, and the last ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..interface import Array, AttentionSpec, LayerCache, Rope, Step
from ..keeps import Keeps
from .gathered import attend, gather, places_of, seen_blocks
from .paged import TokenMajor


@dataclass(frozen=True)
class StreamingLLM(TokenMajor):
    """A query sees the first `sinks` tokens and the last `window`, itself included. Positions are those in the cache.

    The paper stores keys unturned and turns them on every read by their place in the cache. Rope is relative, so that
    is the same as this: keys lie turned by their position, and the sinks meet a second query, turned to the last place
    of a full cache. Both queries lie in one row, and a key is zero where it meets the other one.
    """

    window: int = 252
    sinks: int = 4
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # it checks them, under python -O too
        Keeps(window=self.window, sinks=self.sinks)

    @property
    def keeps(self) -> Keeps:
        return Keeps(window=self.window, sinks=self.sinks)

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, write, then attend; as ever in layers that have a window of their own."""
        if spec.window is not None:
            return super().attention(ops, cache, parts, step, spec)
        xp, rope, far_q, sinks = ops.xp, None, parts["q"], parts.get("sinks")
        if spec.rope is not None:
            rope = step.ropes[spec.rope]
            far_T = xp.minimum(step.positions_T, self.sinks + self.window - 1)
            far_q = ops.rope(far_q, Rope(rope.inv_freq_D, *ops.rope_table(far_T, rope.inv_freq_D)))
        near_q, cache = ops.rope_write(parts["q"], {n: parts[n] for n in "kv"}, rope, cache, self.order, step)

        def read(table_WC: Array) -> tuple[Array, Array, Array]:
            table_WB, pos_WM = places_of(ops, table_WC, self.block_size)
            k, sink = gather(cache["k"], table_WB), (pos_WM < self.sinks)[..., None, None]
            both = xp.concat([xp.where(sink, 0, k), xp.where(sink, k, 0)], axis=-1)
            return both, gather(cache["v"], table_WB), pos_WM

        spec = replace(spec, window=self.window, k_dim=2 * spec.k_dim)
        seen = replace(step, block_tables_SB=seen_blocks(ops, step, self.block_size, self.window, self.sinks))
        q = xp.concat([near_q, far_q], axis=-1)
        return attend(ops, q, read, seen, spec, self.block_size, sinks_KG=sinks, first=self.sinks)[0], cache
