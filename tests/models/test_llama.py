"""The Llama family against the float64 oracle where transformers has no such model, or none in that dtype."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import oracle
import pytest
from backends import BACKENDS
from model_harness import all_logits, chunked_logits, random_weights
from tolerances import tolerance

from octavo.engine.backend import get_backend
from octavo.models import llama, qwen3
from octavo.models.interface import map_tree
from octavo.models.rope import RopeConfig

IDS = np.random.default_rng(5).integers(0, 512, 300).tolist()
CONFIG = llama.LlamaConfig(
    vocab_size=512, embed_dim=64, mlp_dim=96, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=16, max_model_len=512,
    rope=RopeConfig(theta=500.0), windows=(None, 50, 8, None), qkv_bias=True, mlp_bias=True,
)  # fmt: skip
SPECS = {"llama": llama.spec, "qwen3": qwen3.spec}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [7, 300])
def test_three_cache_groups_agree_with_the_oracle(backend, chunk):
    model = llama.spec(CONFIG)
    assert [group.window for group in model.groups] == [None, 8, 50]
    weights = random_weights(model, scale=0.1)
    positions, ours = chunked_logits(model, weights, get_backend(backend), IDS, chunk)
    exact = oracle.logits(model, weights, IDS)[positions]
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance("float32", "logits"))


def test_windows_are_one_a_layer():
    with pytest.raises(ValueError, match="windows names 3 layers, num_layers is 4"):
        replace(CONFIG, windows=(None, 8, 50))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.skipif("torch" not in BACKENDS, reason="the JAX backend refuses bfloat16 on a CPU")
def test_bfloat16_stays_near_the_oracle(name):
    model = SPECS[name](replace(CONFIG, num_layers=2, windows=(None, 50)))
    drawn = random_weights(model, scale=0.1)
    weights = map_tree(lambda spec, x: x if spec.dtype else x.astype(ml_dtypes.bfloat16), model.weights, drawn)
    ours = all_logits(model, weights, get_backend("torch", {"dtype": "bfloat16"}), IDS)
    assert ours.dtype == ml_dtypes.bfloat16
    exact = oracle.logits(model, weights, IDS)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance("bfloat16", "logits"))


def test_oracle_goes_on_from_its_own_tokens():
    model = llama.spec(CONFIG)
    weights = random_weights(model)
    made = oracle.greedy(model, weights, IDS[:20], 5)
    teacher_forced = oracle.logits(model, weights, IDS[:20] + made)
    assert made == np.argmax(teacher_forced, -1)[19:-1].tolist()
