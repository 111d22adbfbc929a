"""Keys transposed inside the block, as kernels like them that multiply queries by a tile of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..interface import Array, ArraySpec, AttentionSpec, LayerCache, Step
from . import gathered
from .paged import turned


@dataclass(frozen=True)
class KTransposed:
    """Keys [N, K, D, P], values [N, K, P, D]. Exact; ops.attention does not know it, so it gathers."""

    block_size: int = 16

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """One array for keys and one for values, in the cache dtype."""
        heads, axes = attention.num_kv_heads, ("blocks", "kv_heads", None, None)
        return {
            "k": ArraySpec((num_blocks, heads, attention.k_dim, self.block_size), axes, None, "zeros"),
            "v": ArraySpec((num_blocks, heads, self.block_size, attention.v_dim), axes, None, "zeros"),
        }

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, write, then attend: every row's keys are in the cache before any row reads."""
        q, k = turned(ops, parts, step, spec)
        blocks, offsets, all_ = step.blocks_T, step.offsets_T, slice(None)
        cache = {
            "k": ops.scatter(cache["k"], (blocks, all_, all_, offsets), k),
            "v": ops.scatter(cache["v"], (blocks, all_, offsets), parts["v"]),
        }

        def read(table_WB: Array) -> tuple[Array, Array, Array]:
            found = (gathered.gather(cache[n], table_WB, o) for n, o in (("k", "n k d p"), ("v", "n k p d")))
            return *found, gathered.positions(ops, table_WB, self.block_size)

        out, _ = gathered.attend(ops, q, read, step, spec, self.block_size, sinks_KG=parts.get("sinks"))
        return out, cache
