"""Experts shared out over replicas whose tokens are others: ops.moe on each device against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from meshes import on_every_rank
from tolerances import tolerance

from octavo.kernels_pallas.ops import JaxOps
from octavo.kernels_triton.ops import TorchOps
from octavo.models.fit import deal
from octavo.models.interface import ArraySpec
from octavo.sharding.mesh_jax import make_mesh, partition_spec
from octavo.sharding.mesh_torch import TorchMesh
from octavo.sharding.rules import ShardingRules, shard_of, with_replicas

AXES = (("experts", None, None, "expert_mlp"), ("experts", "expert_mlp", None))
TOKENS, CHOSEN, EMBED, INSIDE = 9, 3, 16, 12
# mesh, rules, number of experts (6 are padded to 8), whether they are dealt in turn
CASES = {
    "over dp": ({"dp": 2, "tp": 1}, {"experts": ("dp",)}, 8, False),
    "over dp and tp": ({"dp": 2, "tp": 2}, {"experts": ("dp", "tp")}, 8, False),
    "in turn": ({"dp": 2, "tp": 2}, {"experts": ("dp", "tp")}, 8, True),
    "uneven": ({"dp": 2, "tp": 2}, {"experts": ("dp", "tp")}, 6, False),
    "uneven in turn": ({"dp": 4, "tp": 1}, {"experts": ("dp",)}, 6, True),
    "insides over tp": ({"dp": 2, "tp": 2}, {"experts": "dp", "expert_mlp": "tp"}, 6, False),
    "insides over dp": ({"dp": 2, "tp": 2}, {"experts": "tp", "expert_mlp": "dp"}, 8, False),
}


def case_of(num_replicas: int, num_experts: int, in_turn: int):
    """x, weights, ids with a leading axis of replicas; gate_up and down as they lie; the outputs in float64.

    One replica's tokens are padding alone, another's last ones; some experts nobody chose.
    """
    rng = np.random.default_rng(3)
    x, weights = (rng.standard_normal((num_replicas, TOKENS, n)).astype(np.float32) for n in (EMBED, CHOSEN))
    up = (rng.standard_normal((num_experts, EMBED, 2, INSIDE)) / 4).astype(np.float32)
    down = (rng.standard_normal((num_experts, INSIDE, EMBED)) / 4).astype(np.float32)
    every = np.tile(np.arange(num_experts - 1), (num_replicas, TOKENS, 1))
    ids = rng.permuted(every, axis=2)[:, :, :CHOSEN].astype(np.int32)
    ids[0, -4:], ids[-1] = num_experts, num_experts
    want = np.zeros(x.shape)
    for d, t, c in np.ndindex(ids.shape):
        if (expert := ids[d, t, c]) < num_experts:
            one = {"gate_up": up[expert].astype(np.float64), "down": down[expert].astype(np.float64)}
            want[d, t] += weights[d, t, c] * oracle.mlp(one, x[d, t : t + 1].astype(np.float64))[0]
    padding = 8 - num_experts
    places = deal(8, in_turn)
    up, down = (np.concatenate([w, np.zeros((padding, *w.shape[1:]), w.dtype)])[places] for w in (up, down))
    return x, weights, ids, up, down, want


def parts(case: str):
    shape, table, num_experts, in_turn = CASES[case]
    rules = with_replicas(ShardingRules(table), shape)
    names = (table["experts"],) if isinstance(table["experts"], str) else table["experts"]
    dealt = int(np.prod([shape[name] for name in names])) if in_turn else 1
    return shape, rules, in_turn, case_of(shape["dp"], num_experts, dealt)


@pytest.mark.parametrize("case", CASES)
def test_virtual_devices_equal_float64(case: str) -> None:
    shape, rules, in_turn, (x, weights, ids, up, down, want) = parts(case)
    mesh = make_mesh(shape)
    ops = JaxOps("shard_map", rules, mesh, experts_in_turn=in_turn)
    specs = (*(jax.P("dp"),) * 3, *(partition_spec(axes, rules) for axes in AXES))

    def program(x, weights, ids, up, down):
        return ops.moe(x[0], weights[0], ids[0], up, down, add=jnp.ones_like(x[0]))[None]

    program = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=jax.P("dp"), check_vma=False))
    got = np.asarray(program(x, weights, ids, up, down)) - 1
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "op"))
    assert not got[-1].any()


@pytest.mark.parametrize("case", CASES)
def test_gloo_ranks_equal_float64(case: str) -> None:
    shape, rules, in_turn, (x, weights, ids, up, down, want) = parts(case)

    def own(mesh: TorchMesh) -> tuple[np.ndarray, set]:
        ops, at = TorchOps(rules=rules, mesh=mesh, experts_in_turn=in_turn), mesh.place["dp"]
        held = (
            torch.tensor(w[shard_of(ArraySpec(w.shape, a).shape, a, rules, mesh)])
            for w, a in zip((up, down), AXES, strict=True)
        )
        mine = (torch.tensor(a[at]) for a in (x, weights, ids))
        return ops.moe(*mine, *held, add=torch.ones(x[at].shape)).numpy() - 1, {key[:2] for key in mesh.counts}

    found = on_every_rank(own, shape)
    for rank, (got, counts) in enumerate(found):
        np.testing.assert_allclose(got, want[rank // shape["tp"]], rtol=0, atol=tolerance("float32", "op"))
        rest = {("all-reduce", ("tp",))} if shape["tp"] > 1 else set()
        assert counts == {("all-gather", ("dp",)), ("reduce-scatter", ("dp",))} | rest


def test_replicas_are_an_axis_where_they_share_experts() -> None:
    assert dict(with_replicas(ShardingRules({"experts": "tp"}), {"dp": 2, "tp": 2})) == {"experts": "tp"}
    assert dict(with_replicas(ShardingRules({"experts": ("dp",)}), {"dp": 1})) == {"experts": ("dp",)}
    shared = with_replicas(ShardingRules({"expert_mlp": "dp"}), {"dp": 2})
    assert dict(shared) == {"expert_mlp": "dp", "replicas": "dp"}
