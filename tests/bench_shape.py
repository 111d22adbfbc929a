"""The shape of a model that the tests of `octavo bench` start, and what of them is torch's."""

from __future__ import annotations

import pytest
from backends import BACKENDS

on_torch = pytest.mark.skipif("torch" not in BACKENDS, reason="threads, and bfloat16 on a CPU, are torch's")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "torch_dtype": "float32", "eos_token_id": 1,
}  # fmt: skip
