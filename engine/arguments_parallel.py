"""The engine arguments that share a model out over devices and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sharding.rules import ShardingRules
from . import checks
from .argument import Argument, choices, integers


def sharding_rules(name: str, value: Any) -> ShardingRules:
    """Rules, or a mapping that becomes some."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} {value!r} is not a ShardingRules, nor a dict from logical axis to mesh axis")
    if isinstance(value, ShardingRules):
        return value
    for axis, names in value.items():
        if not isinstance(names, str | list | tuple | None):
            raise ValueError(f"{name}: {axis!r} goes to {names!r}: a mesh axis, several or None is right")
    # as JSON says several
    return ShardingRules({axis: tuple(names) if isinstance(names, list) else names for axis, names in value.items()})


def executor(name: str, value: Any) -> str:
    if value == "ray":
        raise NotImplementedError(f"{name}='ray' is not supported yet: use 'mp', or 'external_launcher' under torchrun")
    return checks.choice(name, value, ("mp", "uni", "external_launcher"))


PARALLELISM = (
    Argument("tensor_parallel_size", "int", 1, "devices that share each layer: docs/parallel.md", integers(1)),
    Argument("pipeline_parallel_size", "int", 1, "stages, each with devices and layers of its own", integers(1)),
    Argument(
        "data_parallel_size",
        "int",
        1,
        "replicas of the model, each with its own cache, scheduler and `max_num_seqs` seats",
        integers(1),
    ),
    Argument(
        "data_parallel_routing",
        "str",
        "least_loaded",
        "which replica a request goes to: least_loaded (vLLM's rule), or prefix (where the least is to be computed, by "
        "what is cached there)",
        choices("least_loaded", "prefix"),
    ),
    Argument(
        "enable_expert_parallel",
        "bool",
        False,
        "devices, those of all replicas, share out whole experts, not parts of each",
        checks.flag,
    ),
    Argument(
        "expert_placement_strategy",
        "str",
        "linear",
        "which experts a device has: linear (neighbours) or round_robin (every n-th)",
        choices("linear", "round_robin"),
    ),
    Argument(
        "enable_sp",
        "bool",
        False,
        "hidden rows between products are shared out over tensor_parallel_size devices by tokens: docs/parallel.md",
        checks.flag,
    ),
    Argument(
        "sp_min_token_num",
        "int",
        1,
        "tokens that a step must have for enable_sp to act on it",
        integers(1),
    ),
    Argument(
        "sharding_rules",
        "ShardingRules",
        None,
        "logical axis to mesh axes (tp, pp, dp); None: what the sizes above ask for",
        sharding_rules,
    ),
    Argument(
        "distributed_executor_backend",
        "str",
        None,
        "mp: a process a device, started by this one (the default of torch); uni: all devices in this one (the "
        "default of jax); external_launcher: torchrun's processes, or jax.distributed's",
        executor,
    ),
    Argument(
        "state_check_interval",
        "int",
        64,
        "steps between comparisons of the state of several processes; 0: none",
        integers(0),
    ),
)
