"""The seeded workloads of the H200 marks, and the shapes of their models. Not to be changed: peers ran the same.

A workload is a list of (prompt token ids, how many tokens to make), greedy, end-of-text ignored.
"""

from __future__ import annotations

import json
import random
from typing import Any

from ..loading.cache_dir import cache_dir

Workload = list[tuple[list[int], int]]
NAMES = ("decode-1", "decode-64", "prefill", "offline", "prefix")


def random_ids(rng: random.Random, n: int, vocab: int) -> list[int]:
    return [rng.randrange(100, vocab - 100) for _ in range(n)]


def workload(name: str, vocab: int, seed: int = 0) -> Workload:
    """The requests of that name, the same for the same seed."""
    rng = random.Random(seed)
    if name == "decode-1":
        return [(random_ids(rng, 128, vocab), 512)]
    if name == "decode-64":
        return [(random_ids(rng, 128, vocab), 256) for _ in range(64)]
    if name == "offline":
        return [(random_ids(rng, rng.randrange(128, 1025), vocab), rng.randrange(64, 513)) for _ in range(1024)]
    if name == "prefill":
        return [(random_ids(rng, 4096, vocab), 1) for _ in range(64)]
    if name == "prefix":
        shared = random_ids(rng, 2048, vocab)
        return [(shared + random_ids(rng, 64, vocab), 64) for _ in range(256)]
    raise KeyError(name)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA
    | COMMON
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "mlp_bias": False,
    },
    "qwen3-0.6b": QWEN3
    | COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3-30b-a3b": QWEN3_MOE
    | COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}


def write_config(name: str) -> str:
    """A folder in octavo's cache with the model's config.json, for load_format="dummy"."""
    folder = cache_dir() / "bench-models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": CONFIGS[name]["eos_token_id"]}))
    return str(folder)
