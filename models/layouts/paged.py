"""Keys and values in blocks of tokens. A layout is a physical order; attention is told it as an einops-like string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..interface import Array, ArraySpec, AttentionSpec, LayerCache, Step


@dataclass(frozen=True)
class TokenMajor:
    """[N, P, K, D], as vLLM's flash backend: a token's heads lie together. `dtype` None: that of the model."""

    block_size: int = 16
    dtype: str | None = None
    order: ClassVar[str] = "n p k d"
    dtypes: ClassVar[tuple[str | None, ...]] = ("float32", "bfloat16", "float16", None)  # that `dtype` may be
    gathers: ClassVar[bool] = False  # True: ops.attention does not read it, and each column of a block table costs

    def __post_init__(self) -> None:
        if self.dtype not in self.dtypes:
            known = " or ".join(", ".join(map(str, self.dtypes)).rsplit(", ", 1))
            raise ValueError(f"dtype {self.dtype!r} of {type(self).__name__}: {known} is right")

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """One array for keys and one for values."""
        size = {"n": num_blocks, "p": self.block_size, "k": attention.num_kv_heads}
        axes = tuple({"k": "kv_heads", "n": "blocks"}.get(a) for a in self.order.split())

        def array(dim: int) -> ArraySpec:
            return ArraySpec(tuple((size | {"d": dim})[a] for a in self.order.split()), axes, self.dtype, "zeros")

        return {"k": array(attention.k_dim), "v": array(attention.v_dim)}

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Rope, write, then attend: every row's keys are in the cache before any row reads."""
        rope = None if spec.rope is None else step.ropes[spec.rope]
        q, k, norm = parts["unnormed"] if "unnormed" in parts else (parts["q"], parts["k"], None)
        new = {"k": k, "v": parts["v"]}
        return ops.attend_new(attend_new, q, new, rope, cache, self.order, step, spec, norm, parts.get("sinks"))


@dataclass(frozen=True)
class HeadMajor(TokenMajor):
    """[N, K, P, D]: a head's keys of one block lie together."""

    order: ClassVar[str] = "n k p d"


def attend_new(
    q: Array, new: dict[str, Array], rope: Any, cache: LayerCache, order: str, step: Step, spec: AttentionSpec,
    norm: Any, sinks: Array | None, ops: Any,
) -> tuple[Array, LayerCache]:  # fmt: skip
    """([T, K, G, D], cache) of q [T, K, G, D] and the new k and v [T, K, D]: written first, then attended to."""
    q, cache = ops.rope_write(q, new, rope, cache, order, step, norm)
    return ops.attention(q, cache["k"], cache["v"], order, step, spec, sinks), cache


def turned(ops: Any, parts: dict[str, Array], step: Step, spec: AttentionSpec) -> tuple[Array, Array]:
    """Queries and keys after rope, for layouts that do more with them than write them."""
    rope = None if spec.rope is None else step.ropes[spec.rope]
    return (parts["q"], parts["k"]) if rope is None else (ops.rope(parts["q"], rope), ops.rope(parts["k"], rope))
