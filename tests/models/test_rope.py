"""Rotary frequencies against transformers, and what a config may say."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import tolerance
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.models.rope import RopeConfig, inv_freq, max_model_len

SMOLLM2 = {"rope_type": "default", "rope_theta": 100_000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
# parameters, head dim, max_position_embeddings
CASES = {
    "smollm2": (SMOLLM2, 64, 8192),
    "llama2": ({"rope_type": "default", "rope_theta": 10_000.0}, 128, 4096),
    "longchat-linear": ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}, 128, 2048),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}, 128, 2048),
    "llama3.1": (LLAMA3, 128, 131_072),
    "llama3.2": (LLAMA3 | {"factor": 32.0}, 64, 131_072),
    "qwen-yarn": (YARN, 128, 32768),
    "yarn-mscale": (YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}, 64, 131_072),
    "yarn-attention-factor": (YARN | {"attention_factor": 1.2}, 64, 131_072),
    "yarn-untruncated": (YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 80, 131_072),
}


def _theirs(parameters, head_dim, max_len):
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    config = LlamaConfig(rope_parameters=dict(parameters), max_position_embeddings=max_len, **sizes)
    if parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding(config).inv_freq.numpy(), 1.0
    longest = int(max_len * parameters["factor"])
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=longest)
    return frequencies.numpy(), factor


def _ours(parameters, max_len):
    return RopeConfig.from_hf({"rope_parameters": parameters, "max_position_embeddings": max_len})


@pytest.mark.parametrize("case", CASES)
def test_frequencies_agree_with_transformers(case):
    parameters, head_dim, max_len = CASES[case]
    theirs, factor = _theirs(parameters, head_dim, max_len)
    ours = _ours(parameters, max_len)
    assert inv_freq(ours, head_dim).dtype == np.float32
    np.testing.assert_allclose(inv_freq(ours, head_dim), theirs, rtol=tolerance("float32", "frequency"), atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_frequencies_of_smollm2_are_bit_equal():
    parameters, head_dim, max_len = CASES["smollm2"]
    np.testing.assert_array_equal(inv_freq(_ours(parameters, max_len), head_dim), _theirs(*CASES["smollm2"])[0])


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("parameters", [SMOLLM2, LLAMA3, YARN, CASES["dynamic"][0]], ids=lambda p: p["rope_type"])
def test_older_configs_read_alike(parameters, key):
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_type", "rope_theta")}
    older = {"rope_theta": parameters["rope_theta"], "rope_scaling": {key: parameters["rope_type"], **scaling}}
    assert RopeConfig.from_hf(older | {"max_position_embeddings": 4096}) == _ours(parameters, 4096)


def test_theta_is_ten_thousand_where_a_config_says_nothing():
    assert RopeConfig.from_hf({"rope_scaling": None, "max_position_embeddings": 4096}) == RopeConfig(theta=10_000.0)


def test_overriding_rope_scaling_wins_over_rope_parameters():
    hf = {"rope_parameters": SMOLLM2, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert RopeConfig.from_hf(hf | {"max_position_embeddings": 4096}).kind == "linear"


def test_yarn_derives_its_factor_from_the_lengths():
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 1024}
    assert _ours(parameters, 8192).factor == 8


@pytest.mark.parametrize(
    "case, length",
    [("llama2", 4096), ("llama3.1", 131_072), ("longchat-linear", 16_384), ("dynamic", 8192), ("qwen-yarn", 131_072)],
)
def test_longest_context_is_derived_as_vllm_does(case, length):
    parameters, _, max_len = CASES[case]
    assert max_model_len(_ours(parameters, max_len), max_len) == length


@pytest.mark.parametrize(
    "hf, error, message",
    [
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            NotImplementedError,
            "'longrope' is not .* known: default, lin",
        ),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor 0.5"),
        ({"rope_parameters": SMOLLM2 | {"partial_rotary_factor": 0.25}}, NotImplementedError, "partial_rotary_factor"),
        ({"rope_parameters": SMOLLM2 | {"mrope_section": [4, 2, 2]}}, NotImplementedError, "mrope_section"),
        ({"rope_parameters": {"rope_type": "linear"}}, ValueError, "'linear' needs a 'factor'"),
    ],
)
def test_what_is_not_supported_is_named(hf, error, message):
    with pytest.raises(error, match=message):
        RopeConfig.from_hf(hf | {"max_position_embeddings": 4096})
