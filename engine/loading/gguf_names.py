"""What llama.cpp calls things, in Hugging Face's words: tensor names, and the order of their rows.

llama.cpp's converter (convert_hf_to_gguf.py) renames the tensors, and for the llama architecture interleaves the
rows of q and k within each head, because its rope rotates neighbours; Hugging Face rotates halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .gguf import GGUFFile
from .gguf_config import ROPE_FREQS, architecture_of, number
from .gguf_quants import dequantise
from .source import Stored

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# one tensor for all experts of a layer
STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if there is none."""
    *front, kind = name.split(".")
    if len(front) == 1 and front[0] in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[front[0]]}.{kind}"
    if len(front) == 3 and front[0] == "blk" and front[2] in LAYER_NAMES:
        return f"model.layers.{front[1]}.{LAYER_NAMES[front[2]]}.{kind}"
    return None


def expert_names(name: str, num_experts: int) -> list[str]:
    """The Hugging Face names of the experts in a GGUF tensor that stacks them; none if it does not."""
    front, kind = name.rpartition(".")[::2]
    parts = front.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in STACKED:
        return []
    return [f"model.layers.{parts[1]}.mlp.experts.{i}.{STACKED[parts[2]]}.{kind}" for i in range(num_experts)]


@dataclass(frozen=True)
class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names, dequantised to float32, rows in halves order."""

    file: GGUFFile
    identity: str
    gguf_names: dict[str, tuple[str, int | None]]  # Hugging Face name -> name in the file, and which of its experts
    heads: dict[str, int]  # tensors with interleaved rows (names in the file) -> number of heads

    def names(self) -> list[str]:
        return list(self.gguf_names)

    def get(self, name: str) -> np.ndarray:
        name, expert = self.gguf_names[name]
        tensor, raw = self.file.tensors[name], self.file.raw(name)
        if expert is not None:
            return dequantise(raw[expert], tensor.type_id, tensor.shape[1:])
        if name in self.heads:
            # rows are made of whole blocks, so that their order may be undone before they are dequantised
            num_heads, num_rows = self.heads[name], tensor.shape[0]
            if num_rows % (2 * num_heads):
                raise ValueError(f"{self.file.path}: {name} has {num_rows} rows, which {num_heads} heads do not divide")
            raw = halves_order(raw.reshape(num_rows, -1), num_heads)
        x = dequantise(raw, tensor.type_id, tensor.shape)
        # llama.cpp keeps this one as a vector
        return x.reshape(1, -1) if "ffn_gate_inp_shexp" in name else x

    def stored(self, name: str) -> Stored:
        stored, expert = self.gguf_names[name]
        tensor = self.file.tensors[stored]
        if expert is None:
            return Stored(name, tensor.shape, tensor.type_name, tensor.nbytes)
        return Stored(name, tensor.shape[1:], tensor.type_name, tensor.nbytes // tensor.shape[0])

    def nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self.stored(name).shape))


def halves_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of llama.cpp's converter: in each head, rows 0 2 4 ... 1 3 5 ... of [rows, x]."""
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_source(file: GGUFFile, identity: str) -> GGUFSource:
    """Names the tensors of a file. Raises ValueError listing those that no supported architecture has."""
    names: dict[str, tuple[str, int | None]] = {}
    unknown = []
    for name in file.tensors:
        if name == ROPE_FREQS:
            continue
        if experts := expert_names(name, file.tensors[name].shape[0]):
            names |= {known: (name, i) for i, known in enumerate(experts)}
        elif known := hf_name(name):
            names[known] = name, None
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{file.path}: tensors without a meaning in {architecture_of(file)!r}: {', '.join(unknown)}")
    return GGUFSource(file, identity, names, _interleaved(file))


def _interleaved(file: GGUFFile) -> dict[str, int]:
    if architecture_of(file) != "llama":
        return {}
    num_heads, num_layers = number(file, "attention.head_count"), number(file, "block_count")
    heads = {"attn_q": num_heads, "attn_k": number(file, "attention.head_count_kv", num_heads)}
    named = {
        f"blk.{n}.{part}.{kind}": num
        for n in range(num_layers)
        for part, num in heads.items()
        for kind in ("weight", "bias")
    }
    return {name: num for name, num in named.items() if name in file.tensors}
