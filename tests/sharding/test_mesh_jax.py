"""Meshes of virtual devices and specs on them."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from octavo.sharding.mesh_jax import ensure_devices, make_mesh, named_sharding, partition_spec
from octavo.sharding.rules import TENSOR, ShardingRules


def test_partition_spec_follows_the_rules():
    assert partition_spec((None, "kv_heads", "blocks"), ShardingRules(TENSOR)) == jax.P(None, "tp", None)
    assert partition_spec(("vocab",), ShardingRules({"vocab": ("dp", "tp")})) == jax.P(("dp", "tp"))


def test_a_mesh_axis_used_twice_is_refused_not_dropped():
    with pytest.raises(ValueError, match="'tp' would share"):
        partition_spec(("kv_heads", "mlp"), ShardingRules(TENSOR))


def test_named_sharding_splits_the_array():
    sharding = named_sharding((None, "mlp"), ShardingRules(TENSOR), make_mesh({"tp": 4}))
    assert sharding.shard_shape((5, 64)) == (5, 16)


def test_too_few_devices_name_the_flag():
    count = jax.device_count() + 1
    with pytest.raises(ValueError, match=f"--xla_force_host_platform_device_count={count}"):
        ensure_devices(count)


def test_a_fresh_process_gets_virtual_devices():
    source = "from octavo.sharding.mesh_jax import make_mesh; print(make_mesh({'tp': 3}).size)"
    assert subprocess.check_output([sys.executable, "-c", source], text=True).strip() == "3"


def test_flax_is_imported_only_where_something_is_sharded():
    source = (
        "import sys, numpy\nfrom octavo.engine.backend_jax import JaxBackend\n"
        "from octavo.models.interface import ArraySpec\n"
        "JaxBackend().place(numpy.ones(3), ArraySpec((3,), (None,)))\nprint('flax' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", source], text=True).strip() == "False"
