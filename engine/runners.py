"""The Runner that an engine needs, by how its model is shared out: on which backends, of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..models.interface import CacheLayout, ModelSpec
from ..models.stage import stage_of
from .backend import Backend, get_backend
from .batch import Shapes
from .config import EngineConfig
from .memory_plan import MemoryPlan
from .parallel.devices import stages
from .parallel.joint_runner import JointRunner, LeadJointRunner
from .parallel.joint_stages import JointEarlier, JointPipeline
from .parallel.lead_runner import LeadRunner
from .parallel.pipeline import Earlier, Pipeline
from .parallel.stage_runner import JointStageRunner, LeadJointStage, LeadStage, StageRunner
from .parallel.world import World
from .recipe import Recipe
from .runner import Runner
from .weights_source import WeightsSource


def backends_of(config: EngineConfig, options: dict[str, Any]) -> list[Any]:
    """That of this process, or of a replica in it; where that has stages, one each."""
    options = options | {"dtype": config.dtype}
    if config.pipeline_parallel_size == 1 or config.backend == "torch":
        return [get_backend(config.backend, options)]
    from ..sharding.mesh_jax import stage_mesh

    meshes = [stage_mesh(options["mesh"], n) for n in range(config.pipeline_parallel_size)]
    return [get_backend("jax", options | {"mesh": mesh}) for mesh in meshes]


def runner_on(backends: Sequence[Any], source: WeightsSource, weights: Any, plan: MemoryPlan, masks: bool) -> Runner:
    """The model with its weights on the devices of a backend, or of one a stage. `masks` as Runner's."""
    if len(backends) == 1:
        kind = runner_of(source.config, source.world)
        return _part(kind, replace(source, backend=backends[0]), weights, plan, masks)
    of_stages = stages(len(source.model.attention), len(backends))
    *earlier, last = (replace(source, backend=b, stage=s) for b, s in zip(backends, of_stages, strict=True))
    before, behind = (JointEarlier, JointPipeline) if source.config.num_joint > 1 else (Earlier, Pipeline)
    kinds = [partial(before, after.bring) for after in backends[1:]]
    made = [_part(kind, part, weights, plan, masks) for kind, part in zip(kinds, earlier, strict=True)]
    return _part(partial(behind, made), last, weights, plan, masks)


def _part(kind: Any, source: WeightsSource, weights: Any, plan: MemoryPlan, masks: bool) -> Any:
    """A Runner of the layers that a source has the weights of."""
    config, model, backend = source.config, source.model, source.backend
    own = model if source.stage is None else stage_of(model, source.stage)
    arguments = {
        "num_blocks": plan.num_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "shapes": _shapes(config, plan, model, backend),
        "digest": config.step_log is not None,
        "processors": config.logits_processors,
        "logprobs_mode": config.logprobs_mode,
        "masks": masks,
        "expert_load": config.expert_load_metrics,
        "routed": config.enable_return_routed_experts,
        # stages of several processes send on what they keep, up to the last one
        "mixture": (model if config.backend == "torch" else own).mixture,
    }
    runner = kind(backend, own, config.layout, source.first(weights), **arguments)
    runner.source = source
    if kind is Runner:
        runner.recipe = Recipe(own, config.layout, arguments)
    return runner


def runner_of(config: EngineConfig, world: World | None) -> Any:
    """The kind of Runner that this process needs."""
    kind, leading = (JointRunner, LeadJointRunner) if config.num_joint > 1 else (Runner, LeadRunner)
    if config.pipeline_parallel_size > 1:
        kind, leading = (JointStageRunner, LeadJointStage) if config.num_joint > 1 else (StageRunner, LeadStage)
    team = world and world.team
    if team and config.num_joint == 1:
        team = team.part(0)
    return partial(leading, team, config.state_check_interval) if team and team.peers else kind


def _shapes(config: EngineConfig, plan: MemoryPlan, model: ModelSpec, backend: Backend) -> Shapes:
    cache = _cache_of_ops(config.layout, model)
    return Shapes.chain(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        plan.max_model_len,
        config.block_size,
        model.vocab_size,
        max_logprobs=model.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
        exact=backend.eager,
        graph_tokens=backend.graph_tokens,
        joined_seqs=backend.joined_seqs,
        any_width=backend.any_width(model.attention, *cache) if cache else False,
        shared_prefixes=cache is not None
        and not config.disable_cascade_attn
        and config.num_joint == 1
        and backend.shares_prefixes(model.attention, *cache),
    )


def _cache_of_ops(layout: CacheLayout, model: ModelSpec) -> tuple[str | None, bool] | None:
    """The dtype of the cache that ops.attention will read, and whether it has scales; None: the layout gathers."""
    if getattr(layout, "gathers", not hasattr(layout, "order")):
        return None
    cache = layout.spec(model.attention[0], 1)
    return cache["k"].dtype, "k_scale" in cache
