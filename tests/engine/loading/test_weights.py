"""load_weights, and weights from a seed, on a backend that only keeps numpy arrays."""

from __future__ import annotations

import logging
import zlib

import numpy as np
import pytest
from loading_files import NumpyBackend
from tiny import TINY, spec_of

from octavo.engine.loading.weights import dummy_weights, load_weights, random_weights
from octavo.models.interface import Fuse, leaves

MODEL = spec_of(TINY)


class Tensors(dict):
    """A TensorSource of arrays."""

    identity = None

    def names(self) -> list[str]:
        return list(self)

    def get(self, name: str) -> np.ndarray:
        return self[name]


@pytest.fixture
def tensors() -> Tensors:
    rng, c = np.random.default_rng(0), TINY
    q, kv, e, f = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.embed_dim, c.mlp_dim
    shapes = {"model.embed_tokens": (c.vocab_size, e), "lm_head": (c.vocab_size, e), "model.norm": (e,)}
    for n in range(c.num_layers):
        at = f"model.layers.{n}."
        shapes |= {f"{at}self_attn.{p}_proj": (rows, e) for p, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{at}self_attn.o_proj": (e, q), f"{at}mlp.down_proj": (e, f)}
        shapes |= {f"{at}mlp.{p}_proj": (f, e) for p in ("gate", "up")}
        shapes |= {f"{at}{p}_layernorm": (e,) for p in ("input", "post_attention")}
    return Tensors({f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def test_every_leaf_is_placed_where_the_map_says(tensors):
    backend = NumpyBackend()
    weights = load_weights(MODEL, tensors, backend)
    assert backend.num_placed == len(leaves(MODEL.weights))
    layer, at = weights["layers"][1], "model.layers.1."
    q, k, v = (tensors[f"{at}self_attn.{p}_proj.weight"] for p in "qkv")
    np.testing.assert_array_equal(weights["unembed"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(layer["gate_up"][:, 1], tensors[f"{at}mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(layer["qkv"][:, 1, 0], q[16:24].T)
    np.testing.assert_array_equal(layer["qkv"][:, 1, 2], k[8:].T)
    np.testing.assert_array_equal(layer["qkv"][:, 0, 3], v[:8].T)
    np.testing.assert_array_equal(weights["ropes"]["rope"], MODEL.checkpoint["ropes"]["rope"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_leaf_without_a_dtype_takes_the_backends(tensors, dtype):
    weights = load_weights(MODEL, tensors, NumpyBackend(dtype))
    assert weights["embed"].dtype.name == weights["layers"][0]["attn_norm"].dtype.name == dtype
    assert weights["ropes"]["rope"].dtype.name == "float32"


def test_missing_and_unexpected_tensors_are_all_listed(tensors):
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["extra"] = np.zeros(3)
    with pytest.raises(ValueError) as error:
        load_weights(MODEL, tensors, NumpyBackend())
    assert (
        "missing tensors: model.layers.0.mlp.up_proj.weight, model.norm.weight; "
        "unexpected tensors: extra, model.layers.0.self_attn.q_proj.bias"
    ) in str(error.value)


def test_tables_that_older_checkpoints_hold_are_passed_over_and_logged(tensors, caplog):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4)
    with caplog.at_level(logging.INFO, "octavo"):
        load_weights(MODEL, tensors, NumpyBackend())
    assert "does not need: model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text


def test_a_tensor_of_another_shape_is_named(tensors):
    tensors["model.layers.2.mlp.down_proj.weight"] = np.zeros((32, 65))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.down_proj\.weight gives \(65, 32\)"):
        load_weights(MODEL, tensors, NumpyBackend())


@pytest.mark.parametrize("make", [dummy_weights, random_weights])
def test_a_seed_gives_the_same_weights_and_another_seed_others(make):
    a, b, c = (make(MODEL, NumpyBackend(), seed) for seed in (3, 3, 4))
    for x, y in zip(leaves(a), leaves(b)):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(a["layers"][0]["qkv"], c["layers"][0]["qkv"])
    assert not np.array_equal(a["layers"][0]["qkv"], a["layers"][1]["qkv"])
    for x, spec, source in zip(leaves(a), leaves(MODEL.weights), leaves(MODEL.checkpoint)):
        assert x.shape == spec.shape
        if not isinstance(source, Fuse):
            np.testing.assert_array_equal(x, source)
    np.testing.assert_array_equal(a["final_norm"], np.ones(32))


def test_a_random_leaf_depends_on_seed_and_path_alone():
    rng = np.random.default_rng((5, zlib.crc32(b"layers.2.down")))
    expected = rng.standard_normal((64, 32), np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(random_weights(MODEL, NumpyBackend(), 5, 0.3)["layers"][2]["down"], expected)


def test_deviations_are_those_promised():
    assert np.std(random_weights(MODEL, NumpyBackend())["embed"]) == pytest.approx(0.2, rel=0.05)
    embed = dummy_weights(MODEL, NumpyBackend("bfloat16"))["embed"]
    assert embed.dtype.name == "bfloat16"
    assert np.std(embed.astype(np.float32)) == pytest.approx(0.02, rel=0.05)


def test_a_stage_has_what_the_whole_has_and_reads_no_more(tensors):
    whole, layers = load_weights(MODEL, tensors, NumpyBackend()), range(2, 4)
    read: list[str] = []

    class Noted(Tensors):
        def get(self, name: str) -> np.ndarray:
            read.append(name)
            return self[name]

    backend = NumpyBackend()
    stage = load_weights(MODEL, Noted(tensors), backend, layers)
    assert set(stage) == {"layers", "final_norm", "unembed", "ropes"} and len(stage["layers"]) == 2
    assert not [name for name in read if "embed" in name or "layers.0." in name or "layers.1." in name]
    assert backend.num_placed == len(leaves(stage))
    for name, tree in stage.items():
        for mine, x in zip(leaves(tree), leaves(whole[name][2:] if name == "layers" else whole[name]), strict=True):
            np.testing.assert_array_equal(mine, x)
    first = dummy_weights(MODEL, NumpyBackend(), 3, range(2))
    want = dummy_weights(MODEL, NumpyBackend(), 3)
    assert set(first) == {"embed", "layers", "ropes"}
    np.testing.assert_array_equal(first["layers"][1]["qkv"], want["layers"][1]["qkv"])
