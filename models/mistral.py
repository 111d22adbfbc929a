"""Mistral (arXiv:2310.06825): Llama with one window for all layers, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .interface import ModelSpec


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    if hf.get("layer_types"):
        raise NotImplementedError("layer_types is not supported in a MistralForCausalLM; sliding_window is")
    config = llama.LlamaConfig.from_hf(hf)
    windows = (hf.get("sliding_window"),) * config.num_layers
    return llama.spec(replace(config, windows=windows, qkv_bias=False, out_bias=False, mlp_bias=False), "mistral")
