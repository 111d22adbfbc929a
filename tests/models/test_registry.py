"""What a config.json becomes, and what is refused."""

from __future__ import annotations

import pytest
import tiny_moe

from octavo.models import qwen3_moe
from octavo.models.interface import ArraySpec, CacheGroup, Mixture, Routing, leaves, map_tree
from octavo.models.registry import ARCHITECTURES, spec_from_hf

HF = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def _spec(architecture, **changes):
    return spec_from_hf({"architectures": [architecture]} | HF | changes)


def test_unknown_architecture_names_the_known_ones():
    with pytest.raises(NotImplementedError, match=r"\['MambaForCausalLM'\] are not supported; known: Llama.*Qwen3"):
        _spec("MambaForCausalLM")


def test_config_without_architectures_names_the_known_ones():
    with pytest.raises(NotImplementedError, match=r"\[\] are not supported; known: LlamaForCausalLM"):
        spec_from_hf(HF)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoint_has_a_source_for_every_weight_and_no_more(architecture):
    for changes in ({}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}):
        model = _spec(architecture, **changes)
        shape = map_tree(lambda _: 0, model.weights)
        assert shape == map_tree(lambda _: 0, model.checkpoint)
        for spec in leaves(model.weights):
            assert isinstance(spec, ArraySpec)
            assert len(spec.shape) == len(spec.axes)


def test_tied_embedding_is_used_in_the_unembedding():
    tied, untied = (_spec("LlamaForCausalLM", tie_word_embeddings=t).weights for t in (True, False))
    assert "unembed" not in tied
    assert tied["embed"].product == untied["unembed"].product == "re,ve->rv"
    assert untied["embed"].product is None


def test_layers_of_one_window_share_a_cache_group_full_first():
    kinds = ["sliding_attention", "full_attention"] * 2
    model = _spec("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert model.groups == (CacheGroup(None, (1, 3)), CacheGroup(8, (0, 2)))
    assert [attention.window for attention in model.attention] == [8, None, 8, None]


def test_max_window_layers_counts_the_full_ones_from_below():
    model = _spec("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    assert model.groups == (CacheGroup(None, (0, 1, 2)), CacheGroup(8, (3,)))


@pytest.mark.parametrize("window, group", [(8, CacheGroup(8, (0, 1, 2, 3))), (None, CacheGroup(None, (0, 1, 2, 3)))])
def test_mistral_has_one_window(window, group):
    assert _spec("MistralForCausalLM", sliding_window=window).groups == (group,)


def test_every_query_head_has_its_own_kv_head_where_a_config_says_nothing():
    model = _spec("LlamaForCausalLM", num_key_value_heads=None)
    assert (model.attention[0].num_kv_heads, model.attention[0].group_size) == (4, 1)


@pytest.mark.parametrize(
    "architecture, changes, error, message",
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, NotImplementedError, "hidden_act 'gelu'"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 4}, NotImplementedError, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 4}, NotImplementedError, "linear_attention"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3}, ValueError, "names 3 layers, .* is 4"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, ValueError, "sliding_window is None"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, ValueError, "decoder_sparse_step 0"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, ValueError, "num_chosen 9 of 8 experts"),
        ("LlamaForCausalLM", {"num_attention_heads": 3}, ValueError, "num_heads 3 is not divisible by num_kv_heads 2"),
    ],
)
def test_what_does_not_work_is_named(architecture, changes, error, message):
    with pytest.raises(error, match=message):
        _spec(architecture, **changes)


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_mixture_without_its_sizes_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{'num_local_experts' if name == 'num_experts' else name} None"):
        _spec("Qwen3MoeForCausalLM", **{name: None})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_chosen": 0}, "num_chosen 0 must be at least 1"),
        ({"num_chosen": 9}, "num_chosen 9 of 8 experts: at most 8"),
        ({"num_chosen": 5, "num_groups": 4, "num_top_groups": 2}, "num_chosen 5 of 8 experts: at most 4"),
        ({"num_groups": 3}, "num_experts 8 must be at least 1, in 3 equal groups"),
        ({"num_groups": 2, "num_top_groups": 3}, "num_top_groups 3 must be from 1 to num_groups 2"),
        ({"num_groups": 4, "group_best": 3}, "group_best 3 of 8 experts: at most 2"),
        ({"scoring": "relu"}, "scoring 'relu' is neither"),
        ({"num_experts": 0}, "num_experts 0 must be at least 1"),
        ({"expert_dim": 0}, "expert_dim 0 must be at least 1"),
        ({"layers": ()}, r"layers \(\): name each"),
        ({"layers": (-1,)}, r"layers \(-1,\): name each"),
        ({"layers": (1, 1)}, r"layers \(1, 1\): name each"),
        ({"layers": (0, 4)}, "layer 4 of the mixture: the model has 4 layers, 0 to 3"),
        ({"shared_gate": True}, "shared_dim 0 must be"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(values, message):
    own = ("num_experts", "expert_dim", "layers", "shared_dim", "shared_gate")
    routing = {"num_chosen": 2} | {k: v for k, v in values.items() if k not in own}
    given = {"num_experts": 8, "expert_dim": 24, "layers": (0,)} | {k: v for k, v in values.items() if k in own}
    with pytest.raises(ValueError, match=message):
        qwen3_moe.spec(tiny_moe.CONFIG, Mixture(**given, routing=Routing(**routing)))
