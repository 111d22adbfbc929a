"""A tiny random model with experts in three layers of four, and engines on it."""

from __future__ import annotations

import functools
from typing import Any

import oracle
import tiny
from tiny import MAX_MODEL_LEN, VOCAB

from octavo.engine import LLM
from octavo.engine.backend import resolve_backend
from octavo.models import llama, qwen3_moe
from octavo.models.interface import Mixture, ModelSpec, Routing
from octavo.models.rope import RopeConfig

CONFIG = llama.LlamaConfig(
    vocab_size=VOCAB, embed_dim=32, mlp_dim=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
    max_model_len=MAX_MODEL_LEN, rope=RopeConfig(theta=1000.0), windows=(None, 8, None, 8),
)  # fmt: skip
MIXTURE = Mixture(8, 24, (0, 2, 3), Routing(2, normalise=True))
LAYERS = MIXTURE.layers


@functools.cache
def spec() -> ModelSpec:
    return qwen3_moe.spec(CONFIG, MIXTURE)


@functools.cache
def weights() -> Any:
    return tiny.weights_of(spec())


def engine(**arguments: Any) -> LLM:
    defaults = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 120}
    if resolve_backend(arguments.get("backend", "auto")) == "torch":
        defaults["threads"] = 1
    return LLM(spec(), weights=weights(), **(defaults | arguments))


def experts_of(ids: list[int]) -> dict[int, list[list[int]]]:
    """By layer and token, the best expert first, from the float64 oracle."""
    model = spec()
    c, w = model.config, oracle.as_float64(weights())
    rows, (cos, sin) = oracle.hidden(model, weights(), ids), oracle.rotations(c, len(ids))
    found = {}
    for n in LAYERS:
        layer, x = w["layers"][n], rows[n]
        x = x + oracle.attention(c, layer, oracle.norm(x, layer["attn_norm"], c.norm_eps), cos, sin, c.windows[n])
        h = oracle.norm(x, layer["mlp_norm"], c.norm_eps)
        chosen = [oracle.chosen(model.mixture.routing, layer["router"] @ row, 0) for row in h]
        found[n] = [[expert for expert, _ in each] for each in chosen]
    return found
