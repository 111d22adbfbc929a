"""Keys and values in 8 bits. What a block holds follows from its tokens alone, so prefixes are shared as ever."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..interface import Array, ArraySpec, AttentionSpec, LayerCache, Step
from .paged import TokenMajor, turned

LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True)
class Int8(TokenMajor):
    """Integers of 8 bits, and a float32 scale for each token and head, by which attention multiplies them."""

    dtype: str | None = "int8"
    dtypes: ClassVar[tuple[str | None, ...]] = ("int8",)
    largest: ClassVar[float] = 127.0

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """k and v, and of each the scales [N, P, K]."""
        codes = super().spec(attention, num_blocks)
        return codes | {
            f"{name}_scale": replace(s, shape=s.shape[:-1], axes=s.axes[:-1], dtype="float32")
            for name, s in codes.items()
        }

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, divide by the scale, write, then attend to what was written."""
        xp, (q, k), new = ops.xp, turned(ops, parts, step, spec), {}
        for name, x in (("k", k), ("v", parts["v"])):
            x = xp.astype(x, xp.float32)
            scale = xp.max(xp.abs(x), axis=-1) / self.largest
            new |= {name: self.rounded(xp, x / xp.where(scale > 0, scale, 1.0)[..., None]), f"{name}_scale": scale}
        q, cache = ops.rope_write(q, new, None, cache, self.order, step)
        scales = cache["k_scale"], cache["v_scale"]
        return ops.attention(q, cache["k"], cache["v"], self.order, step, spec, parts.get("sinks"), scales), cache

    def rounded(self, xp: Any, x: Array) -> Array:
        """What the cache's dtype holds of x."""
        return xp.round(x)


@dataclass(frozen=True)
class Fp8PerTokenHead(Int8):
    """Floats of 8 bits (e4m3) with such a scale: small numbers keep their digits, large ones have but three bits."""

    dtype: str | None = "float8_e4m3fn"
    dtypes: ClassVar[tuple[str | None, ...]] = ("float8_e4m3fn",)
    largest: ClassVar[float] = LARGEST

    def rounded(self, xp: Any, x: Array) -> Array:
        """As it is but for what rounding brought beyond the largest: writing rounds."""
        return xp.clip(x, -LARGEST, LARGEST)
