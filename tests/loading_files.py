"""Checkpoint files for the tests of loading, and a backend that places nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.engine.loading.gguf_quants import QUANTS, TYPE_NAMES
from octavo.models.interface import ArraySpec

TYPES = {TYPE_NAMES[i]: i for i in QUANTS}
# where a block holds half-precision scales
SCALES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


class NumpyBackend:
    """Places weights as copies. Only what loading asks of a backend."""

    name = "numpy"

    def __init__(self, dtype: str = "float32"):
        self.dtype = dtype
        self.num_placed = 0

    def place_weight(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        assert x.shape == spec.shape
        assert x.flags.c_contiguous
        self.num_placed += 1
        return np.array(x)

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        return ()

    def place_shard(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return self.place_weight(x, spec)

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return self.place_weight(np.resize(x, spec.shape), spec)


def random_blocks(type_name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """The bytes, as rows, of a tensor of that type: random numbers in every field, and finite scales."""
    rng, quant = np.random.default_rng(seed), QUANTS[TYPES[type_name]]
    num_blocks = int(np.prod(shape)) // quant.numbers
    if type_name in ("F32", "F16", "BF16"):
        values = rng.normal(0, 0.2, num_blocks).astype(np.float32)
        if type_name == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        blocks = (values.astype(np.float16) if type_name == "F16" else values).view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (num_blocks, quant.nbytes), dtype=np.uint8)
        for at in SCALES[type_name]:
            scales = rng.normal(0, 0.02, num_blocks).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]
) -> Path:
    """A GGUF file by the gguf package. A tensor is (type name, its bytes as rows)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (type_name, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(TYPES[type_name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter leaves them, for its rope of neighbours (`LlamaModel.permute` there)."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


TOKENS = [f"t{i}" for i in range(32)]


def llama_metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """Metadata of a tiny model whose rows hold whole blocks of 256. `more` is put under the architecture's name."""
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0, "rope.dimension_count": 32, "vocab_size": 32,
    }  # fmt: skip
    named = {f"{architecture}.{key}": value for key, value in (sizes | more).items()}
    tokens = {"model": "gpt2", "tokens": TOKENS, "token_type": [1] * 32, "merges": ["t 1"], "bos_token_id": 1}
    return (
        named | {f"tokenizer.ggml.{key}": value for key, value in tokens.items()} | {"tokenizer.ggml.eos_token_id": 2}
    )


def llama_tensors(types: list[str], architecture: str = "llama", tied: bool = False) -> dict[str, Any]:
    """The tensors that go with llama_metadata; the matrices take turns in `types`."""
    # transformers reads no head dim from GGUF: it has to be the one that its Qwen3 takes
    q, kv, d = (1024, 256, 128) if architecture == "qwen3" else (256, 64, 32)
    matrices = {"token_embd.weight": (32, 256)} | ({} if tied else {"output.weight": (32, 256)})
    vectors = {"output_norm.weight": 256}
    for n in range(2):
        rows = {"attn_q": q, "attn_k": kv, "attn_v": kv, "ffn_gate": 512, "ffn_up": 512}
        matrices |= {f"blk.{n}.{name}.weight": (num, 256) for name, num in rows.items()}
        matrices |= {f"blk.{n}.attn_output.weight": (256, q), f"blk.{n}.ffn_down.weight": (256, 512)}
        vectors |= {f"blk.{n}.{name}.weight": 256 for name in ("attn_norm", "ffn_norm")}
        if architecture == "qwen2":
            vectors |= {f"blk.{n}.attn_{name}.bias": num for name, num in (("q", q), ("k", kv), ("v", kv))}
        if architecture == "qwen3":
            vectors |= {f"blk.{n}.attn_{name}_norm.weight": d for name in "qk"}
    tensors = {}
    for i, (name, shape) in enumerate(matrices.items()):
        kind = types[i % len(types)]
        tensors[name] = (kind, random_blocks(kind, shape, seed=i))
    for i, (name, size) in enumerate(vectors.items()):
        tensors[name] = ("F32", random_blocks("F32", (size,), seed=1000 + i).view(np.float32))
    return tensors
