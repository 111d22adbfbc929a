"""Meshes of JAX devices, and logical axes as shardings on them.

Imported only where something is sharded: flax takes a second or two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import jax
from flax.linen.spmd import logical_to_mesh_axes

from .rules import ShardingRules


def ensure_devices(count: int) -> None:
    """Sees to `count` devices: on a CPU virtual ones, if JAX has not started. Raises ValueError if there are fewer."""
    alone = not jax.distributed.is_initialized()
    if alone and jax.config.jax_num_cpu_devices < count:  # pyright: ignore[reportAttributeAccessIssue]
        # refused once JAX has started: what it has must do then
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    if (there := jax.device_count()) < count:
        raise ValueError(
            f"{count} devices are needed and JAX started with {there}: before JAX is first used, set "
            f"JAX_NUM_CPU_DEVICES={count}, or XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )


def make_mesh(shape: Mapping[str, int], first: int = 0) -> jax.sharding.Mesh:
    """A mesh of devices in turn, from that one on, its axes named and sized by `shape`."""
    count = first + math.prod(shape.values())
    ensure_devices(count)
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=jax.devices()[first:count])


def stage_mesh(mesh: jax.sharding.Mesh, stage: int) -> jax.sharding.Mesh:
    """The devices of one stage of a pipeline, as a mesh with the same axes."""
    at = mesh.axis_names.index("pp")
    devices = mesh.devices.take([stage], at)
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def partition_spec(axes: tuple[str | None, ...], rules: ShardingRules) -> jax.P:
    """The mesh axes of an array with these logical axes."""
    # flax would quietly leave the second use of a mesh axis out
    rules.mesh_axes(axes)
    spec = logical_to_mesh_axes(axes, list(rules.items()))
    # None only for axes that are None themselves
    assert spec is not None
    return spec


def named_sharding(axes: tuple[str | None, ...], rules: ShardingRules, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """Where an array with these logical axes lies."""
    return jax.NamedSharding(mesh, partition_spec(axes, rules))
