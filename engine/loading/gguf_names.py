"""What llama.cpp calls things, in Hugging Face's words: tensor names, their order of rows, and the config.

llama.cpp's converter (convert_hf_to_gguf.py) renames the tensors, and for the llama architecture interleaves the
rows of q and k within each head, because its rope rotates neighbours; Hugging Face rotates halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gguf import GGUFFile
from .gguf_quants import dequantise

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# factors of the rotary frequencies, a table and no weight: config_from_gguf turns them into rope_scaling
ROPE_FREQS = "rope_freqs.weight"


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if there is none."""
    *front, kind = name.split(".")
    if len(front) == 1 and front[0] in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[front[0]]}.{kind}"
    if len(front) == 3 and front[0] == "blk" and front[2] in LAYER_NAMES:
        return f"model.layers.{front[1]}.{LAYER_NAMES[front[2]]}.{kind}"
    return None


@dataclass(frozen=True)
class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names, dequantised to float32, rows in halves order."""

    file: GGUFFile
    identity: str
    gguf_names: dict[str, str]  # Hugging Face name -> name in the file
    heads: dict[str, int]  # tensors with interleaved rows (names in the file) -> number of heads

    def names(self) -> list[str]:
        return list(self.gguf_names)

    def get(self, name: str) -> np.ndarray:
        name = self.gguf_names[name]
        tensor, raw = self.file.tensors[name], self.file.raw(name)
        if name in self.heads:
            # rows are made of whole blocks, so that their order may be undone before they are dequantised
            raw = halves_order(raw.reshape(tensor.shape[0], -1), self.heads[name])
        return dequantise(raw, tensor.type_id, tensor.shape)

    def nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self.file.tensors[self.gguf_names[name]].shape))


def halves_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of llama.cpp's converter: in each head, rows 0 2 4 ... 1 3 5 ... of [rows, x]."""
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_source(file: GGUFFile, identity: str) -> GGUFSource:
    """Names the tensors of a file. Raises ValueError listing those that no supported architecture has."""
    names, unknown = {}, []
    for name in file.tensors:
        if name == ROPE_FREQS:
            continue
        known = hf_name(name)
        if known is None:
            unknown.append(name)
        else:
            names[known] = name
    if unknown:
        raise ValueError(f"{file.path}: tensors without a meaning in {_architecture(file)!r}: {', '.join(unknown)}")
    return GGUFSource(file, identity, names, _interleaved(file))


def _interleaved(file: GGUFFile) -> dict[str, int]:
    if _architecture(file) != "llama":
        return {}
    read = _reader(file)
    num_heads, num_layers = read("attention.head_count"), read("block_count")
    heads = {"attn_q": num_heads, "attn_k": read("attention.head_count_kv", num_heads)}
    names = {f"blk.{n}.{part}.{kind}": h for n in range(num_layers) for part, h in heads.items() for kind in KINDS}
    return {name: h for name, h in names.items() if name in file.tensors}


KINDS = ("weight", "bias")
# GGUF architecture -> model_type, architectures
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
MISSING = object()


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise NotImplementedError(f"{file.path}: GGUF architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return name


def _reader(file: GGUFFile) -> Callable[..., Any]:
    """read(key, default) of the metadata under the architecture's name; without a default the key must be there."""
    prefix = _architecture(file)

    def read(key: str, default: Any = MISSING) -> Any:
        value = file.metadata.get(f"{prefix}.{key}", default)
        if value is MISSING:
            raise ValueError(f"{file.path}: the metadata lacks {prefix}.{key}")
        return value

    return read


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the checkpoint would have had."""
    read, metadata = _reader(file), file.metadata
    model_type, architecture = ARCHITECTURES[_architecture(file)]
    if read("expert_count", 0):
        raise NotImplementedError(
            f"{file.path}: {read('expert_count')} experts: GGUF files of dense models are supported"
        )
    num_heads = read("attention.head_count")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    head_dim = read("attention.key_length", read("embedding_length") // num_heads)
    _refuse_odd_heads(file, head_dim)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in file.tensors
        else len(tokens),
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": read("context_length"),
        "rms_norm_eps": _shortest(read("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read("rope.freq_base", 10_000.0)),
        "rope_scaling": rope_scaling_from_gguf(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | _window(file) | _dtype(file)


def _refuse_odd_heads(file: GGUFFile, head_dim: int) -> None:
    read = _reader(file)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read(key, head_dim) != head_dim:
            raise NotImplementedError(f"{file.path}: {key} {read(key)} differs from the head dim {head_dim}")


def _shortest(x: float) -> float:
    """The shortest decimal with the same float32: 1e-05, where the file's float32 widens to 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _window(file: GGUFFile) -> dict[str, Any]:
    window = _reader(file)("attention.sliding_window", 0)
    if not window:
        return {}
    if _architecture(file) != "llama":
        raise NotImplementedError(f"{file.path}: sliding_window {window} in architecture {_architecture(file)!r}")
    # Hugging Face's Llama has no window; its Mistral is Llama with one
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _dtype(file: GGUFFile) -> dict[str, Any]:
    """The dtype of a file that is not quantised. Quantised ones do not say in which dtype to run."""
    kinds = {t.type_name for t in file.tensors.values() if len(t.shape) > 1}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return {"torch_dtype": names[kinds.pop()]} if len(kinds) == 1 and kinds <= set(names) else {}


def rope_scaling_from_gguf(file: GGUFFile) -> dict[str, Any] | None:
    """rope_scaling of the config. Llama 3's lies in the file as a table of factors, from which it is read back."""
    read = _reader(file)
    kind = read("rope.scaling.type", "none")
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return None
    original = read("rope.scaling.original_context_length", None)
    if kind == "linear":
        return {"rope_type": "linear", "factor": read("rope.scaling.factor")}
    if kind == "yarn" and original:
        scaling = {"rope_type": "yarn", "factor": read("rope.scaling.factor")}
        return scaling | {"original_max_position_embeddings": original}
    raise NotImplementedError(f"{file.path}: rope.scaling.type {kind!r} (original_context_length {original})")


def _llama3_scaling(file: GGUFFile) -> dict[str, Any]:
    tensor = file.tensors[ROPE_FREQS]
    factors = dequantise(file.raw(ROPE_FREQS), tensor.type_id, tensor.shape)
    theta = _reader(file)("rope.freq_base", 10_000.0)
    # every published Llama 3 has these three; the table tells the factor, and whether they hold here
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    if not np.allclose(factors, llama3_factors(scaling, theta, len(factors)), rtol=1e-4):
        raise NotImplementedError(f"{file.path}: {ROPE_FREQS} is not the table of {scaling}")
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> np.ndarray:
    """What Llama 3.1 divides the rotary frequencies by: 1 for short waves, `factor` for long ones, smooth between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    return 1 / ((1 - smooth.clip(0, 1)) / scaling["factor"] + smooth.clip(0, 1))
