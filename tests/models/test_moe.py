"""Models with experts against transformers and the float64 oracle, on every backend."""

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
QWEN = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
SHARED = {"shared_expert_intermediate_size": 40}
CASES = {
    "Qwen3Moe": QWEN,
    "Qwen3Moe-normalised": QWEN | {"norm_topk_prob": True, "num_experts_per_tok": 8},
    "Qwen3Moe-some-dense": QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4},
    "Qwen3Moe-one-chosen": QWEN | {"num_experts_per_tok": 1, "attention_bias": True},
    "Qwen3Moe-sliding": QWEN | {"use_sliding_window": True, "sliding_window": 50},
    "Qwen2Moe": QWEN | SHARED,
    "Qwen2Moe-normalised": QWEN | SHARED | {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral-sliding": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 50},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each case's model, its weights, and what transformers and the oracle make of them, once for all backends."""
    known = {}

    def get(case):
        if case not in known:
            folder = tmp_path_factory.mktemp(case)
            hf = tiny_hf.make(case.split("-")[0], **CASES[case])
            model = spec_from_hf(tiny_hf.save(hf, folder))
            weights = read_checkpoint(model, folder)
            known[case] = model, weights, tiny_hf.logits(hf, IDS), oracle.logits(model, weights, IDS)
        return known[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_oracle_agrees_with_transformers(made, case):
    _, _, theirs, exact = made(case)
    np.testing.assert_allclose(exact, theirs, rtol=0, atol=tolerance("float32", "logits"))


# one of each model
FAST = ("Qwen3Moe-some-dense", "Qwen2Moe", "Mixtral")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_agree_with_transformers_and_oracle(made, case, backend):
    model, weights, theirs, exact = made(case)
    ours = all_logits(model, weights, get_backend(backend), IDS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance("float32", "logits"))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance("float32", "logits"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Qwen3Moe-some-dense", "Qwen2Moe", "Mixtral-sliding"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_through_the_cache_agree_with_transformers(made, case, backend):
    """The last chunk is padded: padding goes to no expert."""
    model, weights, theirs, _ = made(case)
    positions, ours = chunked_logits(model, weights, get_backend(backend), IDS, chunk=7)
    np.testing.assert_allclose(ours, theirs[positions], rtol=0, atol=tolerance("float32", "logits"))


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_experts_may_lie_in_one_tensor(name, tmp_path):
    """As transformers 5 holds them, and writes them when it is told not to split them again."""
    hf = tiny_hf.make(name, **CASES[name])
    hf.save_pretrained(tmp_path / "split")
    hf.save_pretrained(tmp_path / "stacked", save_original_format=False)
    model = spec_from_hf(tiny_hf.save(hf, tmp_path / "split"))
    split, stacked = (read_checkpoint(model, tmp_path / kind) for kind in ("split", "stacked"))
    for a, b in zip(split["layers"], stacked["layers"], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
