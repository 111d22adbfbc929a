"""Every architecture and rope kind against transformers and the float64 oracle, on every backend."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import tiny_hf
from backends import BACKENDS
from model_harness import all_logits, chunked_logits, read_checkpoint
from tolerances import tolerance

from octavo.engine.backend import get_backend
from octavo.models.registry import spec_from_hf

IDS = np.random.default_rng(5).integers(0, 512, 300).tolist()
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    # 75 x 4 = 300 tokens: the one length at which transformers' growing frequencies are ours
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 96,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128},
}  # fmt: skip
YARN = ROPES["yarn"]
SLIDING = {"use_sliding_window": True, "sliding_window": 50, "num_hidden_layers": 3}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
CASES = {
    **{
        f"{name}-{kind}": (name, {"rope_parameters": rope, "max_position_embeddings": 75 if kind == "dynamic" else 512})
        for name in ("Llama", "Qwen2", "Qwen3", "Mistral")
        for kind, rope in ROPES.items()
    },
    "Llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama-derived-head-dim": ("Llama", {"head_dim": None, "num_key_value_heads": 1}),
    "Llama-no-groups": ("Llama", {"num_key_value_heads": 4}),
    "Llama-yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}),
    "Llama-yarn-attention-factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "Llama-yarn-betas": ("Llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "Qwen2-sliding": ("Qwen2", SLIDING | {"max_window_layers": 1}),
    "Qwen2-mixed": ("Qwen2", SLIDING | {"layer_types": MIXED}),
    "Qwen2-window-off": ("Qwen2", {"sliding_window": 50, "use_sliding_window": False, "max_window_layers": 0}),
    "Qwen3-mixed": ("Qwen3", SLIDING | {"layer_types": MIXED, "head_dim": 32}),
    "Qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "Mistral-no-window": ("Mistral", {"sliding_window": None}),
}


def _make(case, folder):
    name, config = CASES[case]
    if name == "Mistral":
        config = {"sliding_window": 50} | config
    hf = tiny_hf.make(name, **config)
    model = spec_from_hf(tiny_hf.save(hf, folder))
    return hf, model, read_checkpoint(model, folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each case's model, its weights, and what transformers and the oracle make of them, once for all backends."""
    known = {}

    def get(case):
        if case not in known:
            hf, model, weights = _make(case, tmp_path_factory.mktemp(case))
            known[case] = model, weights, tiny_hf.logits(hf, IDS), oracle.logits(model, weights, IDS)
        return known[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_oracle_agrees_with_transformers(made, case):
    _, _, theirs, exact = made(case)
    np.testing.assert_allclose(exact, theirs, rtol=0, atol=tolerance("float32", "logits"))


# XLA compiles each case: of the ropes, which are numbers when they reach a backend, one architecture has them all
QUICK = {name for name in CASES if name.startswith("Llama") or name.partition("-")[2] not in ROPES} | {
    "Qwen2-default", "Qwen3-yarn", "Mistral-default",
}  # fmt: skip
ON_EACH = [
    pytest.param(backend, case, marks=[pytest.mark.slow] * (backend == "jax" and case not in QUICK))
    for backend in BACKENDS
    for case in CASES
]


@pytest.mark.parametrize("backend, case", ON_EACH)
def test_logits_agree_with_transformers_and_oracle(made, backend, case):
    model, weights, theirs, exact = made(case)
    ours = all_logits(model, weights, get_backend(backend), IDS)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance("float32", "logits"))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance("float32", "logits"))


@pytest.mark.parametrize("case", ["Llama-yarn", "Qwen2-mixed", "Qwen3-mixed", "Mistral-default"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_through_the_cache_agree_with_transformers(made, case, backend):
    model, weights, theirs, _ = made(case)
    positions, ours = chunked_logits(model, weights, get_backend(backend), IDS, chunk=7)
    assert positions[-1] == len(IDS) - 1
    np.testing.assert_allclose(ours, theirs[positions], rtol=0, atol=tolerance("float32", "logits"))
