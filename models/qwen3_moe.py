"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen3
from .interface import Mixture, ModelSpec
from .moe import mixture_from_hf, sparse_layers, with_experts


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    c = llama.LlamaConfig.from_hf(hf)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    normalise = hf.get("norm_topk_prob", False)
    mixture = mixture_from_hf(hf, "moe_intermediate_size", sparse_layers(hf), normalise=normalise)
    return spec(replace(c, windows=(window,) * c.num_layers, mlp_bias=False), mixture)


def spec(c: llama.LlamaConfig, mixture: Mixture) -> ModelSpec:
    return with_experts(qwen3.spec(c), "qwen3_moe", mixture)
