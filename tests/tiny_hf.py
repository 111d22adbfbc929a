"""Tiny random models of transformers, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def make(name: str, seed: int = 0, **config: Any) -> Any:
    """A float32 `{name}ForCausalLM`. Norm scales and biases are random too: a forgotten one shall show."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}Config")(**SIZES | config)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def save(model: Any, folder: Path) -> dict[str, Any]:
    """Writes config.json and safetensors; returns the config as a loader would read it."""
    model.save_pretrained(folder)
    return transformers.PretrainedConfig.get_config_dict(folder)[0]


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> np.ndarray:
    """[T, V]: teacher-forced."""
    return model(torch.tensor([ids])).logits[0].numpy()
