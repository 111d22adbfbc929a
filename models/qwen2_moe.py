"""Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts, and one that every token goes through, behind a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .interface import ModelSpec
from .layers import layer_windows
from .moe import mixture_from_hf, sparse_layers, with_experts


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    if hf.get("use_sliding_window") and not hf.get("layer_types"):
        raise NotImplementedError("use_sliding_window without layer_types is not supported in a Qwen2MoeForCausalLM")
    config = llama.LlamaConfig.from_hf(hf)
    config = replace(
        config, qkv_bias=hf.get("qkv_bias", True), out_bias=False, mlp_bias=False, windows=layer_windows(hf)
    )
    normalise = hf.get("norm_topk_prob", False)
    mixture = mixture_from_hf(hf, "moe_intermediate_size", sparse_layers(hf), normalise=normalise)
    mixture = replace(mixture, shared_dim=hf["shared_expert_intermediate_size"], shared_gate=True)
    return with_experts(llama.spec(config), "qwen2_moe", mixture)
