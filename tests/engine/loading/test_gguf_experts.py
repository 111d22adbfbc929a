"""GGUF files of mixtures of experts: names, config, and the logits of the same weights in safetensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tiny_hf
from loading_files import TYPES, NumpyBackend, interleaved, llama_metadata, llama_tensors, random_blocks, write_gguf

from octavo.engine.loading.checkpoint import open_model
from octavo.engine.loading.safetensors import source_of_folder
from octavo.engine.loading.weights import load_weights
from octavo.models.registry import spec_from_hf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32, "num_hidden_layers": 2, "head_dim": 16}
QWEN = SIZES | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "qwen3moe": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen2moe": ("Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 48}),
    "llama": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
NAMES = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


def gguf_of(hf, architecture: str) -> dict[str, np.ndarray]:
    """A model as llama.cpp writes it: experts stacked, for Llama the rows of q and k interleaved."""
    found = {"output_norm.weight": hf.model.norm.weight, "output.weight": hf.lm_head.weight}
    for name, x in hf.model.named_parameters():
        parts = name.split(".")
        at = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        if name.endswith("experts.gate_up_proj"):
            found[f"{at}ffn_gate_exps.weight"], found[f"{at}ffn_up_exps.weight"] = x.chunk(2, 1)
        elif name.endswith("experts.down_proj"):
            found[f"{at}ffn_down_exps.weight"] = x
        elif ".shared_expert." in name:
            found[f"{at}ffn_{parts[-2].removesuffix('_proj')}_shexp.weight"] = x
        elif name != "norm.weight":
            found[f"{at}{NAMES[parts[-2]]}.{parts[-1]}"] = x[0] if "shared_expert_gate" in name else x
    arrays = {name: x.detach().numpy().copy() for name, x in found.items()}
    if architecture == "llama":
        for name, heads in [(n, 4 if "attn_q" in n else 2) for n in arrays if "attn_q." in n or "attn_k." in n]:
            arrays[name] = interleaved(arrays[name], heads)
    return arrays


@pytest.mark.parametrize("architecture", MODELS)
def test_weights_equal_those_of_safetensors(tmp_path, architecture):
    name, config = MODELS[architecture]
    hf = tiny_hf.make(name, **config)
    model = spec_from_hf(tiny_hf.save(hf, tmp_path / "hf"))
    sizes = {
        "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 16, "expert_count": 4, "expert_used_count": 2,
        "attention.layer_norm_rms_epsilon": hf.config.rms_norm_eps, "context_length": 512,
        "rope.freq_base": hf.config.rope_parameters["rope_theta"],
    }  # fmt: skip
    tensors = {name: ("F32", x) for name, x in gguf_of(hf, architecture).items()}
    path = write_gguf(tmp_path / "m.gguf", architecture, llama_metadata(architecture, **sizes), tensors)
    checkpoint = open_model(path)
    other = spec_from_hf(checkpoint.hf_config)
    assert (other.mixture, other.config, other.name) == (model.mixture, model.config, model.name)
    mine = load_weights(other, checkpoint.tensors, NumpyBackend())
    want = load_weights(model, source_of_folder(tmp_path / "hf"), NumpyBackend())
    for a, b in zip([mine, *mine["layers"]], [want, *want["layers"]], strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"layers", "ropes"}:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def test_an_expert_is_dequantised_alone(tmp_path):
    tensors = llama_tensors(["F16"], "qwen3")
    shapes = {"gate": (3, 32, 256), "up": (3, 32, 256), "down": (3, 256, 256)}
    for n in range(2):
        del tensors[f"blk.{n}.ffn_gate.weight"], tensors[f"blk.{n}.ffn_up.weight"], tensors[f"blk.{n}.ffn_down.weight"]
        for seed, (kind, shape) in enumerate(shapes.items()):
            tensors[f"blk.{n}.ffn_{kind}_exps.weight"] = "Q4_K", random_blocks("Q4_K", shape, seed)
    metadata = llama_metadata("qwen3moe", expert_count=3, expert_used_count=2)
    source = open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, tensors)).tensors
    kind = gguf.GGMLQuantizationType(TYPES["Q4_K"])
    whole = gguf.dequantize(tensors["blk.1.ffn_up_exps.weight"][1], kind)
    for i in range(3):
        name = f"model.layers.1.mlp.experts.{i}.up_proj.weight"
        np.testing.assert_array_equal(source.get(name), whole[i])
        assert source.nbytes(name) == whole[i].nbytes
        assert source.stored(name).num_bytes == 32 * 144
