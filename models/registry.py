"""Which architectures we know. One line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from .interface import ModelSpec

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama.from_hf,
    "MistralForCausalLM": mistral.from_hf,
    "MixtralForCausalLM": mixtral.from_hf,
    "Qwen2ForCausalLM": qwen2.from_hf,
    "Qwen2MoeForCausalLM": qwen2_moe.from_hf,
    "Qwen3ForCausalLM": qwen3.from_hf,
    "Qwen3MoeForCausalLM": qwen3_moe.from_hf,
}
LATER = {
    "DeepseekV2ForCausalLM": "its latent attention (MLA) is not built; models/moe.py has its experts",
    "DeepseekV3ForCausalLM": "its latent attention (MLA) is not built; models/moe.py has its experts",
}


# what each of them reads
WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
OPTIONAL_NUMBERS = ("num_key_value_heads", "head_dim")


def spec_from_hf(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json of transformers describes.

    Raises NotImplementedError for one that is not known, ValueError for a config that lacks what a model needs.
    """
    names = hf_config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    for name in LATER.keys() & names:
        raise NotImplementedError(f"{name} is not supported: {LATER[name]}")
    if not known:
        raise NotImplementedError(f"architectures {list(names)} are not supported; known: {', '.join(ARCHITECTURES)}")
    if quantization := hf_config.get("quantization_config"):
        raise NotImplementedError(f"quantization_config {quantization!r}: quantised checkpoints are not supported yet")
    check_config(hf_config)
    return ARCHITECTURES[known[0]](hf_config)


def check_config(hf: Mapping[str, Any]) -> None:
    """Raises ValueError for what is missing, or of a wrong type, and would fail far from here."""
    given = [name for name in OPTIONAL_NUMBERS if hf.get(name) is not None]
    for name in (*WHOLE_NUMBERS, *given):
        value = hf.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"the model's config has {name} {value!r}: it must be a whole number of at least 1")
    if not isinstance(eps := hf.get("rms_norm_eps"), float | int):
        raise ValueError(f"the model's config has rms_norm_eps {eps!r}: it must be a number")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(value := hf.get(name), Mapping | None):
            raise ValueError(f"the model's config has {name} {value!r}: it must be an object or null")
