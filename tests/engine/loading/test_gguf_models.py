"""Models in GGUF files: config and weights against what transformers makes of the same files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from embedded import embedded_model
from loading_files import TYPES, interleaved, llama_metadata, llama_tensors, write_gguf

from octavo.engine.loading.checkpoint import open_model
from octavo.engine.loading.gguf import read_gguf
from octavo.engine.loading.gguf_config import config_from_gguf, llama3_factors
from octavo.engine.loading.gguf_names import gguf_source

KINDS = [kind for kind in TYPES if kind != "F32"]
SHARED = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings", "tie_word_embeddings",
    "bos_token_id", "eos_token_id",
)  # fmt: skip


def _in_transformers(path) -> transformers.PreTrainedModel:
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )


def _assert_same(path) -> None:
    checkpoint, other = open_model(path), _in_transformers(path)
    expected = other.config.to_dict() | {"architectures": [type(other).__name__]}
    for key in SHARED:
        assert checkpoint.hf_config[key] == expected[key], key
    assert checkpoint.hf_config["rope_theta"] == other.config.rope_parameters["rope_theta"]
    assert np.float32(checkpoint.hf_config["rms_norm_eps"]) == np.float32(other.config.rms_norm_eps)
    state = {name: x.numpy() for name, x in other.state_dict().items()}
    if checkpoint.hf_config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    assert sorted(checkpoint.tensors.names()) == sorted(state)
    for name, x in state.items():
        np.testing.assert_array_equal(checkpoint.tensors.get(name), x, err_msg=name)
        assert checkpoint.tensors.nbytes(name) == x.nbytes


@pytest.mark.filterwarnings("ignore")  # transformers' own, while it loads
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_and_weights_equal_those_of_transformers(tmp_path, architecture, tied):
    more = (
        {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128}
        if architecture == "qwen3"
        else {}
    )
    tensors = llama_tensors(KINDS, architecture, tied)
    assert {kind for kind, _ in tensors.values()} == set(TYPES)
    path = write_gguf(tmp_path / "m.gguf", architecture, llama_metadata(architecture, **more), tensors)
    _assert_same(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_embedded_model_equals_that_of_transformers():
    _assert_same(embedded_model())


def test_interleaved_rows_come_back_in_halves_order(tmp_path):
    rng = np.random.default_rng(0)
    tensors = llama_tensors(["F32"])
    expected = {}
    for part, hf, rows, num_heads in (("attn_q", "q_proj", 256, 8), ("attn_k", "k_proj", 64, 2)):
        for kind, shape in (("weight", (rows, 256)), ("bias", (rows,))):
            x = rng.normal(size=shape).astype(np.float32)
            tensors[f"blk.1.{part}.{kind}"] = ("F32", interleaved(x, num_heads))
            expected[f"model.layers.1.self_attn.{hf}.{kind}"] = x
    source = open_model(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors)).tensors
    for name, x in expected.items():
        np.testing.assert_array_equal(source.get(name), x)


def _config(tmp_path, architecture="llama", more=None, tensors=None, drop=()):
    metadata = {key: v for key, v in llama_metadata(architecture, **(more or {})).items() if key not in drop}
    path = write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors or llama_tensors(["F16"], architecture))
    return config_from_gguf(read_gguf(path))


def test_an_unquantised_file_says_its_dtype_and_a_quantised_one_does_not(tmp_path):
    assert _config(tmp_path)["torch_dtype"] == "float16"
    assert _config(tmp_path, tensors=llama_tensors(["BF16"]))["torch_dtype"] == "bfloat16"
    assert "torch_dtype" not in _config(tmp_path, tensors=llama_tensors(["Q8_0"]))


def test_a_window_makes_llama_a_mistral(tmp_path):
    config = _config(tmp_path, more={"attention.sliding_window": 64})
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 64)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_back_from_its_table(tmp_path, factor):
    expected = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected["original_max_position_embeddings"] = 8192
    hf = transformers.LlamaConfig(head_dim=32, rope_parameters=expected | {"rope_theta": 5e5})
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
    plain = 1 / 5e5 ** (np.arange(16) / 16)
    tensors = llama_tensors(["F16"]) | {"rope_freqs.weight": ("F32", (plain / scaled.numpy()).astype(np.float32))}
    assert _config(tmp_path, more={"rope.freq_base": 5e5}, tensors=tensors)["rope_scaling"] == expected
    np.testing.assert_allclose(llama3_factors(expected, 5e5, 16), plain / scaled.numpy(), rtol=1e-5)


def test_rope_scaling_of_the_metadata_is_kept(tmp_path):
    linear = _config(tmp_path, more={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert _config(tmp_path, more=keys)["rope_scaling"] == yarn


@pytest.mark.parametrize(
    "architecture, more, message",
    [
        ("gemma3", {}, "architecture 'gemma3' is not one of llama, qwen2, qwen3, qwen2moe, qwen3moe"),
        ("qwen3", {"expert_count": 8}, "expert_count 8 in architecture 'qwen3'"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
        ("llama", {"attention.head_count_kv": [2, 4]}, "head_count_kv differs from layer to layer"),
        ("llama", {"attention.value_length": 16}, "value_length 16 differs from the head dim 32"),
        ("qwen2", {"attention.sliding_window": 64}, "sliding_window 64 in architecture 'qwen2'"),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)
def test_what_is_not_supported_is_named(tmp_path, architecture, more, message):
    with pytest.raises(NotImplementedError, match=message):
        _config(tmp_path, architecture, more)


def test_an_unknown_table_of_rope_factors_is_refused(tmp_path):
    tensors = llama_tensors(["F16"]) | {"rope_freqs.weight": ("F32", np.linspace(1, 3, 16, dtype=np.float32))}
    with pytest.raises(NotImplementedError, match=r"factors in rope_freqs\.weight are not those of"):
        _config(tmp_path, tensors=tensors)


def test_missing_metadata_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"lacks llama\.attention\.head_count"):
        _config(tmp_path, drop=("llama.attention.head_count",))
    with pytest.raises(ValueError, match=r"llama\.block_count is 0, expected a positive number"):
        _config(tmp_path, more={"block_count": 0})


def test_tensors_without_a_meaning_are_listed(tmp_path):
    tensors = llama_tensors(["F16"])
    tensors |= {"blk.0.attn_sinks.weight": tensors["output_norm.weight"], "odd": tensors["output_norm.weight"]}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors)
    with pytest.raises(ValueError, match=r"without a meaning in 'llama': blk\.0\.attn_sinks\.weight, odd"):
        gguf_source(read_gguf(path), "x")
