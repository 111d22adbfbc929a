"""Two bits a number, after KIVI (arXiv 2402.02750): keys are alike along a channel, values along a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..interface import Array, ArraySpec, AttentionSpec, LayerCache, Step
from ..keeps import Keeps
from .bits import rounded, widened
from .gathered import attend, gather, positions
from .paged import turned
from .unfinished import growing, whole


@dataclass(frozen=True)
class Kivi:
    """Keys in 2 bits within the range of a block's channel, values within that of a token's head.

    A query reads the keys of the block that it lies in as they are, from its row, and those before it in 2 bits: what
    it sees follows from its position, however steps are cut.
    """

    block_size: int = 16
    keeps: ClassVar[Keeps] = Keeps(forks=False)

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """Codes, four in a byte, and ranges."""
        n, p, k, kd, vd = num_blocks, self.block_size, attention.num_kv_heads, attention.k_dim, attention.v_dim
        axes, by_channel = ("blocks", None, "kv_heads", None), ("blocks", "kv_heads", None, None)
        codes = {name: ArraySpec((n, p, k, d // 4), axes, "uint8", "zeros") for name, d in (("k", kd), ("v", vd))}
        k_range = ArraySpec((n, k, kd, 2), by_channel, "float16", "zeros")
        return codes | {"k_range": k_range, "v_range": ArraySpec((n, p, k, 2), axes, "float16", "zeros")}

    def row_spec(self, attention: AttentionSpec, num_rows: int) -> dict[str, ArraySpec]:
        """The keys of a request's last block, as they are."""
        shape = (num_rows, self.block_size, attention.num_kv_heads, attention.k_dim)
        return {"k": ArraySpec(shape, (None, None, "kv_heads", None), None, "zeros")}

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, round the blocks that get tokens (of use once they are full) and all new values, then attend."""
        (q, k), xp, rows = turned(ops, parts, step, spec), ops.xp, cache["row.k"]
        blocks = growing(ops, step, self.block_size, scratch=rows.shape[0] - 1)
        own_WPKD = whole(ops, k, rows, blocks, step)
        new = {"row.k": ops.scatter(rows, (blocks.row_W,), own_WPKD)}
        at_T = step.blocks_T, step.offsets_T
        for name, x, axis, at in (("k", own_WPKD, 1, (blocks.at_W,)), ("v", parts["v"], -1, at_T)):
            for part, values in zip((name, f"{name}_range"), rounded(xp, x, axis), strict=True):
                new[part] = ops.scatter(cache[part], at, values)

        def read(table_WB: Array, own_WPKD: Array, index_W: Array) -> tuple[Array, Array, Array]:
            k_WBPKD = widened(xp, new["k"][table_WB], new["k_range"][table_WB][:, :, None])
            is_own_WB = ops.arange(table_WB.shape[1], like=table_WB) == index_W[:, None]
            k_WBPKD = xp.where(is_own_WB[:, :, None, None, None], own_WPKD[:, None], k_WBPKD)
            v_WMKD = widened(xp, gather(new["v"], table_WB), gather(new["v_range"], table_WB)[..., None, :])
            return k_WBPKD.reshape(*v_WMKD.shape[:3], -1), v_WMKD, positions(ops, table_WB, self.block_size)

        more, sinks = (own_WPKD, blocks.index_W), parts.get("sinks")
        out, _ = attend(ops, q, read, step, spec, self.block_size, sinks_KG=sinks, tiles=blocks.tiles, more=more)
        return out, new
