"""Qwen3 (arXiv:2505.09388): Llama with a norm on each head of q and k, before rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from . import llama
from .interface import Array, ModelSpec
from .layers import Weight, layer_windows, norm_scale, with_layer_weights


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    return spec(replace(llama.LlamaConfig.from_hf(hf), windows=layer_windows(hf)))


def spec(c: llama.LlamaConfig) -> ModelSpec:
    def norms(n: int) -> dict[str, Weight]:
        at = f"model.layers.{n}.self_attn."
        return {name: norm_scale(c.head_dim, f"{at}{name}.weight") for name in ("q_norm", "k_norm")}

    model = with_layer_weights(llama.spec(c, "qwen3"), norms)
    return replace(model, layer=partial(llama.layer, eps=c.norm_eps, qkv=normed_qkv))


class Heads(dict):
    """Parts whose q and k are normed when they are first read; who norms on the way reads "unnormed" instead."""

    def __init__(self, ops: Any, parts: Mapping[str, Array], norm: tuple[Array, Array, float]):
        super().__init__({name: x for name, x in parts.items() if name not in ("q", "k")})
        self.ops, self["unnormed"] = ops, (parts["q"], parts["k"], norm)

    def __missing__(self, name: str) -> Array:
        if name not in ("q", "k"):
            raise KeyError(name)
        q_TKGD, k_TKD, norm = self["unnormed"]
        self["q"], self["k"] = self.ops.qk_norm(q_TKGD, k_TKD, *norm)
        return self[name]


def normed_qkv(w: dict, x_TE: Array, ops: Any, eps: float) -> dict[str, Array]:
    return Heads(ops, llama.qkv(w, x_TE, ops, eps), (w["q_norm"], w["k_norm"], eps))
