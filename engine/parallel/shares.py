"""How a configuration shares a model out over devices."""

from __future__ import annotations

import math
from dataclasses import replace

from ...models.fit import fit
from ...models.interface import ModelSpec
from ...sharding.rules import SIZE_NAMES, as_tuple, misfit
from ..config import EngineConfig

MOST = 129  # sizes that are tried for those that would do


def divisors_of(config: EngineConfig) -> dict[str, int]:
    """How many devices share each logical axis."""
    shape = config.mesh_shape
    return {axis: math.prod(shape[name] for name in as_tuple(names)) for axis, names in config.rules.items()}


def sizes_of(config: EngineConfig) -> str:
    """The sizes that ask for several devices, in words."""
    return " x ".join(f"{SIZE_NAMES[name]} {size}" for name, size in config.mesh_shape.items() if size > 1)


def fit_model(config: EngineConfig, model: ModelSpec) -> ModelSpec:
    """The model for the devices of a configuration. Raises ValueError where it does not split so."""
    if config.enable_expert_parallel and model.mixture is None:
        raise ValueError(f"enable_expert_parallel: the model {model.name!r} has no experts")
    if config.num_shards == 1:
        return model
    fitted = _fit(config, model)
    if found := misfit(fitted.weights, config.rules, config.mesh_shape):
        would = [n for n in range(1, MOST) if _fits(replace(config, tensor_parallel_size=n), model)]
        raise ValueError(f"{found[1]}: {', '.join(map(str, would)) or 'no tensor_parallel_size'} would")
    if (size := config.pipeline_parallel_size) > (layers := len(model.attention)):
        raise ValueError(f"pipeline_parallel_size {size} is more than the model's {layers} layers")
    return fitted


def _fit(config: EngineConfig, model: ModelSpec) -> ModelSpec:
    return fit(model, divisors_of(config), config.deals_experts)


def _fits(config: EngineConfig, model: ModelSpec) -> bool:
    return misfit(_fit(config, model).weights, config.rules, config.mesh_shape) is None


def refuse_unbuilt(config: EngineConfig) -> None:
    """Raises NotImplementedError for what can be planned and not be run."""
    if config.backend == "jax" and config.distributed_executor_backend not in (None, "uni"):
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(config, name)) > 1:
                raise NotImplementedError(f"{name}={size} with several processes of JAX: leave out "
                                          "distributed_executor_backend")  # fmt: skip
    if config.num_joint > 1 and config.step_log:
        raise NotImplementedError("step_log with experts shared out over replicas: what one of them computes "
                                  "could not be replayed alone")  # fmt: skip
    apart = config.num_joint == 1 and config.data_parallel_size > 1
    if config.backend == "torch" and apart and config.expert_load_metrics:
        raise NotImplementedError(f"expert_load_metrics with data_parallel_size={config.data_parallel_size} on torch: "
                                  "rank 0 counts those of its own replica alone")  # fmt: skip
