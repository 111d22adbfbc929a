"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with a bias on q, k and v, and windows on the upper layers if asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .interface import ModelSpec
from .layers import layer_windows


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    config = llama.LlamaConfig.from_hf(hf)
    return llama.spec(replace(config, qkv_bias=True, out_bias=False, windows=layer_windows(hf)), "qwen2")
