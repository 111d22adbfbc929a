"""The config.json that a GGUF file's checkpoint would have had, read off its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from .gguf import GGUFFile
from .gguf_quants import dequantise

# GGUF architecture -> model_type, architecture
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
MIXTURES = ("llama", "qwen2moe", "qwen3moe")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# factors of the rotary frequencies: a table that lies among the weights
ROPE_FREQS = "rope_freqs.weight"
EMBEDDING = "token_embd.weight"


def architecture_of(file: GGUFFile) -> str:
    """general.architecture. Raises NotImplementedError if it is none that octavo reads."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise NotImplementedError(f"{file.path}: GGUF architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return name


def number(file: GGUFFile, key: str, default: Any = None) -> Any:
    """The number under the architecture's key; without a default it must be there, and positive."""
    key = f"{architecture_of(file)}.{key}"
    value = file.metadata.get(key, default)
    if value is None:
        raise ValueError(f"{file.path}: the metadata lacks {key}")
    if isinstance(value, list):
        raise NotImplementedError(f"{file.path}: {key} differs from layer to layer: {value}")
    if not isinstance(value, int | float) or value < 0 or (default is None and value == 0):
        raise ValueError(f"{file.path}: {key} is {value!r}, expected a positive number")
    return value


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config in Hugging Face's words. Raises NotImplementedError naming what octavo does not do."""
    model_type, architecture = ARCHITECTURES[architecture_of(file)]
    if EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path}: expected a tensor {EMBEDDING}, found none: this is no language model")
    num_heads, hidden_size = number(file, "attention.head_count"), number(file, "embedding_length")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": number(file, "feed_forward_length"),
        "num_hidden_layers": number(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number(file, "attention.head_count_kv", num_heads),
        "head_dim": number(file, "attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": number(file, "context_length"),
        "rms_norm_eps": _shortest(number(file, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(number(file, "rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    _refuse_others(file, config["head_dim"])
    return config | _window(file) | _experts(file) | _dtype(file)


def _refuse_others(file: GGUFFile, head_dim: int) -> None:
    if architecture_of(file) not in MIXTURES and (num_experts := number(file, "expert_count", 0)):
        raise NotImplementedError(f"{file.path}: expert_count {num_experts} in architecture {architecture_of(file)!r}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := number(file, key, head_dim)) != head_dim:
            raise NotImplementedError(f"{file.path}: {key} {found} differs from the head dim {head_dim}")


def _experts(file: GGUFFile) -> dict[str, Any]:
    """What a config says of experts. Whether weights are normalised the file does not say: the architecture does."""
    architecture, num_experts = architecture_of(file), number(file, "expert_count", 0)
    if not num_experts:
        return {}
    chosen = {"num_experts_per_tok": number(file, "expert_used_count")}
    if architecture == "llama":
        # llama.cpp's Llama may have experts; Hugging Face's Mixtral is that
        mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return mixtral | chosen | {"num_local_experts": num_experts}
    # by the tensors: not every converter has written the lengths
    dims = {"moe_intermediate_size": _rows(file, "ffn_gate_exps", 1)}
    if architecture == "qwen2moe":
        dims["shared_expert_intermediate_size"] = _rows(file, "ffn_gate_shexp", 0)
        dims["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    return chosen | dims | {"num_experts": num_experts, "norm_topk_prob": architecture == "qwen3moe"}


def _rows(file: GGUFFile, name: str, axis: int) -> int:
    """A dim of the first layer's tensor of that name."""
    found = [t.shape[axis] for full, t in file.tensors.items() if full.endswith(f".{name}.weight")]
    if not found:
        raise ValueError(f"{file.path}: expected tensors {name}, found none")
    return found[0]


def _shortest(x: float) -> float:
    """The shortest decimal of the same float32: 1e-05, where the file's float32 widens to 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _window(file: GGUFFile) -> dict[str, Any]:
    window = number(file, "attention.sliding_window", 0)
    if not window:
        return {}
    if architecture_of(file) != "llama":
        raise NotImplementedError(f"{file.path}: sliding_window {window} in architecture {architecture_of(file)!r}")
    # Hugging Face's Llama has no window; its Mistral is Llama with one
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _dtype(file: GGUFFile) -> dict[str, Any]:
    """The dtype of a file that is not quantised. Quantised ones do not say in which dtype to run."""
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"torch_dtype": DTYPES[kinds.pop()]} if len(kinds) == 1 and kinds <= set(DTYPES) else {}


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file)
    kind = file.metadata.get(f"{architecture_of(file)}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise NotImplementedError(f"{file.path}: rope.scaling.type {kind!r} is not one of none, linear, yarn")
    scaling = {"rope_type": kind, "factor": number(file, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = number(file, "rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile) -> dict[str, Any]:
    """Llama 3's scaling, read back from the table that the converter made of it."""
    tensor = file.tensors[ROPE_FREQS]
    factors = dequantise(file.raw(ROPE_FREQS), tensor.type_id, tensor.shape)
    # every published Llama 3 has these three; the table tells the factor, and whether they hold here
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    expected = llama3_factors(scaling, number(file, "rope.freq_base", 10_000.0), len(factors))
    if not np.allclose(factors, expected, rtol=1e-4):
        raise NotImplementedError(f"{file.path}: the factors in {ROPE_FREQS} are not those of {scaling}")
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> np.ndarray:
    """What Llama 3.1 divides the rotary frequencies by: 1 for short waves, `factor` for long ones, smooth between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
