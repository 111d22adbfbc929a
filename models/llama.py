"""Llama (arXiv:2407.21783). The other models are told as differences from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .interface import Array, ArraySpec, AttentionSpec, CacheLayout, LayerCache, ModelSpec, Step
from .layers import HIDDEN, Weight, fuse, groups_by_window, host, linear, norm_scale, split
from .rope import RopeConfig, inv_freq, max_model_len


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    tied: bool = False  # the embedding is the unembedding too
    windows: tuple[int | None, ...] = ()  # tokens a query sees, one a layer; empty: all full
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows names {len(self.windows)} layers, num_layers is {self.num_layers}")

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json of transformers."""
        if hf.get("hidden_act", "silu") != "silu":
            raise NotImplementedError(f"hidden_act {hf['hidden_act']!r} is not supported; 'silu' is")
        rope, heads = RopeConfig.from_hf(hf), hf["num_attention_heads"]
        return LlamaConfig(
            vocab_size=hf["vocab_size"],
            embed_dim=hf["hidden_size"],
            mlp_dim=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            max_model_len=max_model_len(rope, hf["max_position_embeddings"]),
            rope=rope,
            norm_eps=hf["rms_norm_eps"],
            tied=hf.get("tie_word_embeddings", False),
            qkv_bias=hf.get("attention_bias", False),
            out_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
        )


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    return spec(LlamaConfig.from_hf(hf))


def spec(c: LlamaConfig, name: str = "llama") -> ModelSpec:
    group_size, windows = c.num_heads // c.num_kv_heads, c.windows or (None,) * c.num_layers
    # yarn scales both q and k: attention takes the square
    scale = c.head_dim**-0.5 * c.rope.attention_factor**2
    weights, checkpoint = split(all_weights(c))
    return ModelSpec(
        name=name,
        config=c,
        vocab_size=c.vocab_size,
        max_model_len=c.max_model_len,
        weights=weights,
        checkpoint=checkpoint,
        pattern_sizes={"k": c.num_kv_heads, "g": group_size, "d": c.head_dim},
        groups=groups_by_window(windows),
        attention=tuple(AttentionSpec(c.num_kv_heads, group_size, c.head_dim, c.head_dim, scale, w) for w in windows),
        embed=embed,
        layer=partial(layer, eps=c.norm_eps),
        norm=partial(norm, eps=c.norm_eps),
        unembed=partial(unembed, eps=c.norm_eps),
    )


def embed(w: dict, step: Step, ops: Any) -> Array:
    return ops.embed(w["embed"], step.token_ids_T)


def qkv(w: dict, x_TE: Array, ops: Any, eps: float) -> dict[str, Array]:
    """Queries, keys and values of x_TE, which is normed here, before rope.

    Those of one kv head lie together, so that a shard holds whole groups.
    """
    out = (None, "kv_heads", None, None)
    qkv_TKXD = linear(ops, "te,ekxd->tkxd", x_TE, w, "qkv", out=out, norm=(w["attn_norm"], eps))
    return {"q": qkv_TKXD[:, :, :-2], "k": qkv_TKXD[:, :, -2], "v": qkv_TKXD[:, :, -1]}


def mlp(w: dict, x_TE: Array, step: Step, ops: Any, eps: float) -> Array:
    """x_TE, and added to it what the MLP makes of its norm."""
    norm = (w["mlp_norm"], eps)
    h_TF = linear(ops, "te,exf->txf", x_TE, w, "gate_up", out=(None, None, "mlp"), norm=norm, gate=True)
    return linear(ops, "tf,fe->te", h_TF, w, "down", out=HIDDEN, reduce="mlp", add=x_TE)


def layer(
    w: dict, cache: LayerCache, x_TE: Array, step: Step, attention: AttentionSpec, ops: Any, layout: CacheLayout,
    *, eps: float, qkv: Callable = qkv, mlp: Callable = mlp,
) -> tuple[Array, LayerCache]:  # fmt: skip
    a_TKGD, cache = layout.attention(ops, cache, qkv(w, x_TE, ops, eps), step, attention)
    x_TE = linear(ops, "tkgd,kgde->te", a_TKGD, w, "out", out=HIDDEN, reduce="kv_heads", add=x_TE)
    return mlp(w, x_TE, step, ops, eps), cache


def norm(w: dict, x_TE: Array, ops: Any, *, eps: float) -> Array:
    return ops.rms_norm(x_TE, w["final_norm"], eps)


def unembed(w: dict, x_RE: Array, ops: Any, *, eps: float) -> Array:
    h_RE = norm(w, x_RE, ops, eps=eps)
    logits_RV = ops.einsum("re,ve->rv", h_RE, w["unembed"] if "unembed" in w else w["embed"], out=(None, "vocab"))
    return ops.constrain(logits_RV, (None, "vocab"), (None, None))


def all_weights(c: LlamaConfig) -> dict[str, Any]:
    """Every weight: shape, axes, the product it is used in, and the checkpoint tensors that it is made of."""
    shape, axes, product = (c.vocab_size, c.embed_dim), ("vocab", None), "re,ve->rv"
    table = ArraySpec(shape, axes, product=product if c.tied else None)
    tree = {
        "embed": Weight(table, fuse(0, ("model.embed_tokens.weight", "v e -> v e"))),
        "layers": [layer_weights(c, f"model.layers.{n}.") for n in range(c.num_layers)],
        "final_norm": norm_scale(c.embed_dim, "model.norm.weight"),
        "ropes": {"rope": host(inv_freq(c.rope, c.head_dim))},
    }
    if not c.tied:
        tree["unembed"] = Weight(ArraySpec(shape, axes, product=product), fuse(0, ("lm_head.weight", "v e -> v e")))
    return tree


def layer_weights(c: LlamaConfig, at: str) -> dict[str, Weight]:
    e, f, k, g, d = c.embed_dim, c.mlp_dim, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
    q_proj, k_proj, v_proj, o_proj = (f"{at}self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"{at}mlp.{name}_proj" for name in ("gate", "up", "down"))
    q, kv, mlp = "(k g d) e -> e k g d", "(k d) e -> e k 1 d", "f e -> e 1 f"
    tree = {
        "attn_norm": norm_scale(e, f"{at}input_layernorm.weight"),
        "qkv": Weight(
            ArraySpec((e, k, g + 2, d), (None, "kv_heads", None, None), product="te,ekxd->tkxd"),
            fuse(2, (f"{q_proj}.weight", q), (f"{k_proj}.weight", kv), (f"{v_proj}.weight", kv)),
        ),
        "out": Weight(
            ArraySpec((k, g, d, e), ("kv_heads", None, None, None), product="tkgd,kgde->te"),
            fuse(0, (f"{o_proj}.weight", "e (k g d) -> k g d e")),
        ),
        "mlp_norm": norm_scale(e, f"{at}post_attention_layernorm.weight"),
        "gate_up": Weight(
            ArraySpec((e, 2, f), (None, None, "mlp"), product="te,exf->txf"),
            fuse(1, (f"{gate}.weight", mlp), (f"{up}.weight", mlp)),
        ),
        "down": Weight(
            ArraySpec((f, e), ("mlp", None), product="tf,fe->te"), fuse(0, (f"{down}.weight", "e f -> f e"))
        ),
    }
    q, kv, mlp = "(k g d) -> k g d", "(k d) -> k 1 d", "f -> 1 f"
    if c.qkv_bias:
        parts = fuse(1, (f"{q_proj}.bias", q), (f"{k_proj}.bias", kv), (f"{v_proj}.bias", kv))
        tree["qkv_bias"] = Weight(ArraySpec((k, g + 2, d), ("kv_heads", None, None)), parts)
    if c.out_bias:
        tree["out_bias"] = Weight(ArraySpec((e,), (None,)), fuse(0, (f"{o_proj}.bias", "e -> e")))
    if c.mlp_bias:
        parts = fuse(0, (f"{gate}.bias", mlp), (f"{up}.bias", mlp))
        tree["gate_up_bias"] = Weight(ArraySpec((2, f), (None, "mlp")), parts)
        tree["down_bias"] = Weight(ArraySpec((e,), (None,)), fuse(0, (f"{down}.bias", "e -> e")))
    return tree
