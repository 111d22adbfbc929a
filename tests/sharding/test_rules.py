"""Logical axes to mesh axes: names, divisibility, and one mesh axis once an array."""

from __future__ import annotations

import pytest

from octavo.models.interface import ArraySpec
from octavo.sharding.rules import TENSOR, ShardingRules, check_known, misfit, preset

RULES = ShardingRules(TENSOR)
SPECS = {
    "layers": [
        {"qkv": ArraySpec((24, 8, 4, 8), (None, "kv_heads", None, None)), "down": ArraySpec((48, 24), ("mlp", None))}
    ],
    "embed": ArraySpec((104, 24), ("vocab", None)),
}


def test_axes_without_a_rule_are_replicated():
    assert RULES.mesh_axes(("kv_heads", None, "blocks")) == (("tp",), (), ())


def test_several_mesh_axes_may_share_one_axis():
    rules = ShardingRules({"vocab": ("dp", "tp"), "mlp": None})
    assert rules.mesh_axes(("vocab", "mlp")) == (("dp", "tp"), ())


def test_a_mesh_axis_shares_an_array_once():
    with pytest.raises(ValueError, match="'tp' would share kv_heads and mlp"):
        RULES.mesh_axes(("kv_heads", "mlp"))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_divides_fits(size):
    assert misfit(SPECS, RULES, {"tp": size}) is None


@pytest.mark.parametrize("size", [3, 16])
def test_what_does_not_divide_is_named(size):
    words = f"num_kv_heads 8 is not divisible by tensor_parallel_size {size}"
    assert misfit(SPECS, RULES, {"tp": size}) == ("kv_heads", words)


def test_smollm2_splits_in_three():
    specs = [
        ArraySpec((576, 3, 5, 64), (None, "kv_heads", None, None)),
        ArraySpec((1536, 576), ("mlp", None)),
        ArraySpec((49152, 576), ("vocab", None)),
    ]
    assert misfit(specs, RULES, {"tp": 3}) is None
    assert misfit(specs, RULES, {"tp": 2}) == ("kv_heads", "num_kv_heads 3 is not divisible by tensor_parallel_size 2")


@pytest.mark.parametrize(
    ("shape", "experts", "want"),
    [
        ({"dp": 1, "pp": 1, "tp": 1}, True, {}),
        ({"dp": 1, "pp": 1, "tp": 4}, False, {"kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp", "vocab": "tp"}),
        ({"dp": 1, "pp": 1, "tp": 4}, True, {"kv_heads": "tp", "mlp": "tp", "vocab": "tp", "experts": ("tp",)}),
        ({"dp": 2, "pp": 1, "tp": 2}, True, {"kv_heads": "tp", "mlp": "tp", "vocab": "tp", "experts": ("dp", "tp")}),
        ({"dp": 2, "pp": 2, "tp": 1}, True, {"experts": ("dp",), "layers": "pp"}),
    ],
    ids=str,
)
def test_presets_are_products_of_their_sizes(shape, experts, want):
    assert dict(preset(shape, experts)) == want


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"heads": "tp"}, "no array has an axis 'heads': vocab, kv_heads"),
        ({"blocks": "tp"}, "'blocks' cannot be shared out, each device holds all: vocab, kv_heads"),
        ({"layers": "pp"}, "'layers' cannot be shared out, pipeline_parallel_size shares them: vocab"),
        ({"mlp": "ep"}, "'mlp' goes to 'ep': mesh axes"),
    ],
    ids=str,
)
def test_rules_of_ones_own_name_what_there_is(table, words):
    with pytest.raises(ValueError, match=words):
        check_known(ShardingRules(table), {"dp": 1, "pp": 1, "tp": 2})
