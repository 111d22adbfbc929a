"""A tiny random model with two cache groups, its prompts, and engines on it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from octavo.engine import LLM, SamplingParams
from octavo.engine.backend import resolve_backend
from octavo.models import llama
from octavo.models.interface import ModelSpec, map_tree
from octavo.models.rope import RopeConfig

VOCAB = 97
MAX_MODEL_LEN = 128
TINY = llama.LlamaConfig(
    vocab_size=VOCAB, embed_dim=32, mlp_dim=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
    max_model_len=MAX_MODEL_LEN, rope=RopeConfig(theta=1000.0), windows=(None, 8, None, 8),
)  # fmt: skip
EIGHT_HEADS = llama.LlamaConfig(
    vocab_size=104, embed_dim=64, mlp_dim=64, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=8,
    max_model_len=MAX_MODEL_LEN, rope=RopeConfig(theta=1000.0), windows=(None, 8),
)  # fmt: skip

_rng = np.random.default_rng(7)
SHARED = _rng.integers(0, VOCAB, 41).tolist()
PROMPTS = [
    [1, 5, 9, 2, 7, 3, 3, 8, 1],
    [4],
    SHARED + [3, 4],
    _rng.integers(0, VOCAB, 77).tolist(),
    SHARED + [8],
    list(SHARED),
    SHARED[:33],
    *(_rng.integers(0, VOCAB, n).tolist() for n in (24, 17, 29, 22, 31, 20)),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
RANDOM = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11, max_tokens=24)


@functools.cache
def spec_of(config: llama.LlamaConfig) -> ModelSpec:
    return llama.spec(config)


@functools.cache
def numpy_weights(config: llama.LlamaConfig, seed: int = 0, scale: float = 0.2) -> Any:
    """Random weights as numpy arrays, in the model's own tree."""
    return weights_of(spec_of(config), seed, scale)


def weights_of(model: ModelSpec, seed: int = 0, scale: float = 0.2) -> Any:
    """The same of any model."""
    rng = np.random.default_rng(seed)

    def leaf(spec: Any, source: Any) -> np.ndarray:
        if spec.init == "host":
            return source
        x = np.ones(spec.shape) if spec.init == "ones" else rng.normal(0, scale, spec.shape)
        return x.astype(np.float32)

    return map_tree(leaf, model.weights, model.checkpoint)


def engine(config: llama.LlamaConfig = TINY, **arguments: Any) -> LLM:
    """An LLM on a tiny model: small, lazily compiled, blocks of 8 tokens unless told otherwise."""
    defaults = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 120}
    if resolve_backend(arguments.get("backend", "auto")) == "torch":
        # so small a model gains nothing from more, and on a busy machine they wait for each other
        defaults["threads"] = 1
    return LLM(spec_of(config), weights=numpy_weights(config), **(defaults | arguments))


def tokens(llm: LLM, prompts: Any = None, params: Any = GREEDY) -> list[list[int]]:
    """The first completion of each prompt."""
    outputs = llm.generate(prompts or PROMPTS, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]
