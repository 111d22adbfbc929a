"""Which architectures we know. One line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import llama, mistral, qwen2, qwen3
from .interface import ModelSpec

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama.from_hf,
    "MistralForCausalLM": mistral.from_hf,
    "Qwen2ForCausalLM": qwen2.from_hf,
    "Qwen3ForCausalLM": qwen3.from_hf,
}


def spec_from_hf(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json of transformers describes."""
    names = hf_config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise NotImplementedError(f"architectures {list(names)} are not supported; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[known[0]](hf_config)
