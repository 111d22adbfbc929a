"""Keys and values as floats of 8 bits, without scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..interface import Array, AttentionSpec, LayerCache, Step
from .narrow import LARGEST
from .paged import TokenMajor, turned


@dataclass(frozen=True)
class Fp8(TokenMajor):
    """e4m3 as it comes, as vLLM has it by default: what is beyond 448 becomes 448."""

    dtype: str | None = "float8_e4m3fn"
    dtypes: ClassVar[tuple[str | None, ...]] = ("float8_e4m3fn",)

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, saturate, round by writing, then attend to what was written."""
        q, k = turned(ops, parts, step, spec)
        new = {name: ops.xp.clip(x, -LARGEST, LARGEST) for name, x in (("k", k), ("v", parts["v"]))}
        q, cache = ops.rope_write(q, new, None, cache, self.order, step)
        return ops.attention(q, cache["k"], cache["v"], self.order, step, spec, parts.get("sinks")), cache
