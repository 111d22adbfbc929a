"""Models changed so that they split: the same logits, from arrays of other shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.engine.loading.arrange import arrange
from octavo.engine.loading.fitted import fit_arrays
from octavo.engine.loading.tree import Leaf, leaves_of
from octavo.models import llama
from octavo.models.fit import deal, fit, kv_copies
from octavo.models.interface import map_tree
from octavo.models.registry import spec_from_hf

CONFIG = llama.LlamaConfig(
    vocab_size=11, embed_dim=6, mlp_dim=8, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=4, max_model_len=16,
    qkv_bias=True,
)  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


class Tensors:
    """Random tensors of a checkpoint, made when they are asked for, and which were."""

    identity = None

    def __init__(self, model):
        self.shapes, self.read = {}, set()
        sizes = model.pattern_sizes
        k, g, d, e = sizes["k"], sizes["g"], sizes["d"], model.weights["embed"].shape[1]
        for leaf in leaves_of(model, "float32"):
            for name in leaf.names:
                shape = {"q_proj": (k * g * d, e), "k_proj": (k * d, e), "v_proj": (k * d, e), "o_proj": (e, k * g * d)}
                kind = name.split(".")[-2]
                if kind in shape:
                    self.shapes[name] = shape[kind][: 1 if name.endswith("bias") else 2]

    def get(self, name):
        self.read.add(name)
        return np.random.default_rng(abs(hash(name)) % 2**32).normal(size=self.shapes[name]).astype(np.float32)


def _leaves(model, source):
    return {
        leaf.path: arrange(leaf, source, model.pattern_sizes)
        for leaf in leaves_of(model, "float32")
        if leaf.names and all(name in source.shapes for name in leaf.names)
    }


def test_kv_heads_lie_on_several_devices_with_a_part_of_their_queries():
    model, source = llama.spec(CONFIG), Tensors(llama.spec(CONFIG))
    fitted = fit(model, {"kv_heads": 4, "vocab": 1})
    whole, split = _leaves(model, source), _leaves(fitted, source)
    assert split["layers.0.qkv"].shape == (6, 4, 4, 4) and split["layers.0.out"].shape == (4, 2, 4, 6)
    assert fitted.attention[0].num_kv_heads == 4 and fitted.attention[0].group_size == 2
    for head in range(4):
        old, queries = head // 2, slice(head % 2 * 2, head % 2 * 2 + 2)
        for name, new, axis in (("qkv", split["layers.0.qkv"], 1), ("qkv_bias", split["layers.0.qkv_bias"], 0)):
            mine = np.take(whole[f"layers.0.{name}"], old, axis)
            np.testing.assert_array_equal(np.take(new, head, axis), np.concatenate(
                [np.take(mine, range(queries.start, queries.stop), -2), mine[..., -2:, :]], -2))  # fmt: skip
        np.testing.assert_array_equal(split["layers.0.out"][head], whole["layers.0.out"][old, queries])
    again = fit_arrays(_tree(model, whole), model, fitted)
    for name in ("qkv", "qkv_bias", "out"):
        np.testing.assert_array_equal(again["layers"][0][name], split[f"layers.0.{name}"])


def _tree(model, leaves):
    names = iter([leaf.path for leaf in leaves_of(model, "float32")])
    return map_tree(lambda spec: leaves.get(next(names), np.zeros(spec.shape)), model.weights)


@pytest.mark.parametrize(("heads", "kv", "devices", "copies"), [(9, 3, 9, 3), (8, 2, 4, 2), (8, 2, 2, 1), (9, 3, 2, 1)])
def test_as_many_copies_as_divide(heads, kv, devices, copies):
    assert kv_copies(llama.spec(replace(CONFIG, num_heads=heads, num_kv_heads=kv)), devices) == copies


def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros():
    fitted = fit(llama.spec(CONFIG), {"vocab": 4})
    assert fitted.weights["embed"].shape == (12, 6) and fitted.vocab_size == 11
    leaf = Leaf("embed", fitted.weights["embed"], fitted.checkpoint["embed"], np.dtype(np.float32))
    source = Tensors(fitted)
    source.shapes["model.embed_tokens.weight"] = (11, 6)
    table = arrange(leaf, source, {})
    np.testing.assert_array_equal(table[:11], source.get("model.embed_tokens.weight"))
    np.testing.assert_array_equal(table[11], 0)
    np.testing.assert_array_equal(arrange(leaf, source, {}, (slice(9, 12), slice(2, 4))), table[9:12, 2:4])


@pytest.mark.parametrize("in_turn", [False, True], ids=["linear", "in_turn"])
def test_a_device_reads_its_own_experts_alone(in_turn):
    model = spec_from_hf(MOE)
    fitted = fit(model, {"experts": 4}, in_turn)
    spec, fuse = (t["layers"][0]["experts_gate_up"] for t in (fitted.weights, fitted.checkpoint))
    assert spec.shape == (8, 8, 2, 4)
    source = Tensors(model)
    source.shapes |= {n: (4, 8) for leaf in leaves_of(model, "float32") for n in leaf.names if "mlp.experts" in n}
    leaf = Leaf("x", spec, fuse, np.dtype(np.float32))
    whole = arrange(leaf, source, {})
    order = deal(8, 4) if in_turn else list(range(8))
    for rank in range(4):
        source.read.clear()
        window = (slice(2 * rank, 2 * rank + 2), slice(0, 8), slice(0, 2), slice(0, 4))
        np.testing.assert_array_equal(arrange(leaf, source, {}, window), whole[window])
        mine = [i for i in order[2 * rank : 2 * rank + 2] if i < 6]
        assert source.read == {f"model.layers.0.mlp.experts.{i}.{n}_proj.weight" for i in mine for n in ("gate", "up")}
        for place, i in enumerate(order[2 * rank : 2 * rank + 2]):
            got = whole[2 * rank + place]
            if i >= 6:
                assert not got.any()
            else:
                gate = source.get(f"model.layers.0.mlp.experts.{i}.gate_proj.weight")
                np.testing.assert_array_equal(got[:, 0], gate.T)
