"""Experts over virtual devices: whole ones shared out, the inside of each split, and both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

from octavo.kernels_pallas.ops import JaxOps
from octavo.models.interface import ArraySpec
from octavo.sharding.mesh_jax import make_mesh
from octavo.sharding.rules import TENSOR, ShardingRules, misfit

AXES = (("experts", None, None, "expert_mlp"), ("experts", "expert_mlp", None))
SHARED = {
    "tensor parallel": ({"tp": 4}, {"expert_mlp": "tp"}),
    "expert parallel": ({"tp": 4}, {"experts": "tp", "mlp": "tp"}),
    "both": ({"ep": 2, "tp": 2}, {"experts": "ep", "expert_mlp": "tp"}),
    "experts over two axes": ({"dp": 2, "tp": 4}, {"experts": ("dp", "tp")}),
}


@pytest.mark.parametrize("mode", ["shard_map", "auto"])
@pytest.mark.parametrize("how", SHARED)
def test_moe_does_not_depend_on_where_experts_lie(how, mode):
    shape, table = SHARED[how]
    mesh, rules = make_mesh(shape), ShardingRules(table)
    rng = np.random.default_rng(0)
    x, weights, up, down = (
        rng.standard_normal(s).astype(np.float32) for s in ((21, 16), (21, 3), (8, 16, 2, 12), (8, 12, 16))
    )
    # the last one goes to no expert
    ids = rng.permuted(np.tile(np.arange(8), (21, 1)), axis=1)[:, :3].astype(np.int32)
    ids[-1] = 8
    want = JaxOps().moe(*map(jnp.asarray, (x, weights, ids, up, down)))
    ops = JaxOps(mode, rules, mesh)
    specs = (jax.P(), jax.P(), jax.P(), *(jax.P(*(rules.get(a) if a else None for a in axes)) for axes in AXES))
    program = ops.moe
    if mode == "shard_map":
        program = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))
    else:
        program = jax.jit(program, in_shardings=tuple(jax.NamedSharding(mesh, spec) for spec in specs))
    got = program(x, weights, ids, up, down)
    np.testing.assert_allclose(got, want, rtol=0, atol=20 * tolerance("float32", "op"))
    assert not np.asarray(got)[-1].any()


def test_an_inside_that_does_not_divide_is_named():
    found = misfit([ArraySpec((8, 12, 16), AXES[1])], ShardingRules(TENSOR), {"tp": 8})
    assert found == ("expert_mlp", "expert_dim 12 is not divisible by tensor_parallel_size 8")
