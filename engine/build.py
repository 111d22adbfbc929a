"""Puts an engine together from its configuration: checkpoint, model, backend, memory plan, weights, programs."""

from __future__ import annotations

import logging
import math
import os
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..models.interface import CacheLayout, ModelSpec, leaves
from ..models.keeps import keeps_of
from ..models.prompt_embeds import with_prompt_embeds
from ..models.registry import spec_from_hf
from .backend import Backend, device_memory, find_platform
from .block_manager import BlockManager
from .checks import integer
from .config import EngineConfig
from .grammar_worker import grammar_library
from .json_file import read_json
from .layout_names import layout_text
from .limits import SchedulerConfig
from .loading.cache_dir import cache_dir
from .loading.checkpoint import Checkpoint, open_model
from .memory_plan import MemoryPlan, available_memory, memory_plan
from .parallel.devices import stage_layers
from .parallel.follower import follow
from .parallel.remote_runner import RemoteRunner
from .parallel.shares import divisors_of, fit_model, refuse_unbuilt
from .parallel.team import Team
from .parallel.world import World, join
from .recorded_scheduler import RecordedScheduler
from .replica import Replica
from .routed_experts import RoutedExperts
from .runner import Runner
from .runners import backends_of, runner_on
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .step_log import StepLog
from .tokenizer import Tokenizer, load_tokenizer
from .weights_source import WeightsSource

log = logging.getLogger("octavo")


@dataclass(frozen=True)
class Parts:
    """What an LLM is made of."""

    config: EngineConfig
    model: ModelSpec
    backend: Backend
    layout: CacheLayout
    memory_plan: MemoryPlan
    replicas: list[Replica]
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    default_params: dict[str, Any]
    team: Team | None  # the other processes that run the model

    @property
    def runner(self) -> Runner:
        """That of the first replica, like the two below."""
        return self.replicas[0].own_runner

    @property
    def scheduler(self) -> Scheduler:
        return self.replicas[0].scheduler

    @property
    def step_log(self) -> StepLog | None:
        return self.replicas[0].step_log


@dataclass(frozen=True)
class Device:
    """The part of an engine that every process of it has."""

    config: EngineConfig
    checkpoint: Checkpoint | None
    model: ModelSpec
    backend: Backend
    memory_plan: MemoryPlan
    runners: list[Runner | RemoteRunner]  # one a replica that this process knows of, its own first

    @property
    def own(self) -> Runner:
        """This process's own, the first."""
        assert isinstance(self.runners[0], Runner)
        return self.runners[0]


def build(config: EngineConfig, weights: Any = None, backend: Backend | None = None) -> Parts:
    """The parts of an engine. `weights` is a tree of arrays for a ModelSpec; None: from the checkpoint, or dummy.

    `backend` takes the place of the one that the config names. In a launched process other than rank 0 this does what
    rank 0 does until that ends, and then leaves the process (SystemExit).
    """
    refuse_unbuilt(config)
    if backend and config.pipeline_parallel_size > 1:
        raise NotImplementedError("pipeline_parallel_size on a backend of one's own: each stage needs one")
    world = None if backend else join(config, weights)
    try:
        device = build_device(config, weights, backend, world)
        if world and world.leader:
            follow(world.leader, device.own, world.reports(config))
        return _parts(device, world)
    except BaseException as error:
        if world and world.team:
            failed = world.team.mail.cause
            world.team.close()
            if failed is not None and isinstance(error, RuntimeError):
                # this one was broken off when that rank ended
                raise failed from error
        raise


def build_device(
    config: EngineConfig, weights: Any = None, backend: Backend | None = None, world: World | None = None
) -> Device:
    """The model on its device, or this process's part of it on this process's device."""
    checkpoint = None if isinstance(config.model, ModelSpec) else open_checkpoint(config)
    model = spec_from_hf(checkpoint.hf_config) if checkpoint else config.model
    if config.enable_prompt_embeds:
        if config.step_log:
            raise ValueError("enable_prompt_embeds=True and step_log: a log holds token ids, and could not be replayed")
        model = with_prompt_embeds(model)
    given, model = model, fit_model(config, model)
    # the mesh first: it may ask for virtual devices, which JAX grants only before it starts
    options = backend_options(config, world)
    device = find_platform(config.backend, config.device, first_gpu=world is None)
    config = config.for_model(model, device, stored_dtype(checkpoint), device_memory(config.backend, device))
    backends: list[Any] = [backend] if backend else backends_of(config, options)
    on: Backend = backends[-1]
    available = host_memory(config) if device == "cpu" else on.free_memory()
    available = world.least(available) if world else available
    sizes = {"available": available, "total": on.total_memory(), "beside": on.bytes_beside}
    plan = memory_plan(config, model, divisors=divisors_of(config), **sizes)
    stage = stage_layers(config, model, world and world.rank)
    source = WeightsSource(config, given, model, checkpoint, on, world, stage)
    masks = _has_tokenizer(config, checkpoint) and grammar_library() is not None
    runners: list[Any] = [runner_on(backends, source, weights, plan, masks)]
    if world and world.team and config.num_joint == 1:
        parts = [world.team.part(replica) for replica in range(1, config.data_parallel_size)]
        runners += [RemoteRunner(part, config.state_check_interval) for part in parts]
    if config.backend == "jax" and world is None:
        for replica in range(1, config.data_parallel_size // config.num_joint):
            others = backends_of(config, backend_options(config, world, replica))
            runners.append(runner_on(others, source, weights, plan, masks))
    return Device(config, checkpoint, model, on, plan, runners)


def _parts(device: Device, world: World | None) -> Parts:
    """The rest of an engine, which plans and talks to users."""
    config, checkpoint, plan = device.config, device.checkpoint, device.memory_plan
    tokenizer = _tokenizer(config, checkpoint)
    if config.warmup == "all":
        # those elsewhere first: they are told, and go on side by side
        log.info("compiled %d programs", sum(runner.warm_up() for runner in reversed(device.runners)))
    # those that step together have one runner
    runners = device.runners * config.num_joint
    full = device.own.shapes.full
    replicas = [Replica(i, _scheduler(config, plan, device.model, full), runner) for i, runner in enumerate(runners)]
    if config.enable_return_routed_experts:
        for replica in replicas:
            sizes = config.block_size, config.max_num_seqs, plan.max_model_len
            replica.routed = RoutedExperts(device.model, plan.num_blocks, *sizes)
    _open_logs(config, plan, replicas)
    return Parts(
        config=config,
        model=device.model,
        backend=device.backend,
        layout=config.layout,
        memory_plan=plan,
        replicas=replicas,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(config, checkpoint, tokenizer),
        default_params=_default_params(config, checkpoint),
        team=world.team if world else None,
    )


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that an engine of this configuration has. Reads no weights and starts no backend."""
    needed = not config.skip_tokenizer_init and not isinstance(config.model, ModelSpec)
    return _tokenizer(config, open_checkpoint(config) if needed else None)


def open_checkpoint(config: EngineConfig) -> Checkpoint:
    """The checkpoint that the config names; its tensors are not read yet."""
    return open_model(
        config.model,
        load_format=config.load_format,
        revision=config.revision,
        tokenizer=config.tokenizer,
        hf_overrides=config.hf_overrides,
        download_dir=config.download_dir,
    )


def stored_dtype(checkpoint: Checkpoint | None) -> str | None:
    """The dtype that the checkpoint's config names; None: it names none, or there is no checkpoint."""
    hf = checkpoint.hf_config if checkpoint else {}
    return hf.get("dtype") or hf.get("torch_dtype")


def host_memory(config: EngineConfig) -> int | None:
    """Free bytes of one device on a CPU: virtual devices, and processes, share the host's. None if nobody says."""
    host = available_memory()
    return host and host // config.num_shards


def backend_options(config: EngineConfig, world: World | None, replica: int = 0) -> dict[str, Any]:
    """What the backend of a replica is made with, but for the dtype. Starts JAX where several devices are asked for."""
    options: dict[str, Any] = {"attention": config.attention, "pure": config.mode == "pure"}
    options |= {"experts_in_turn": config.deals_experts, "least_tokens": config.sp_min_token_num}
    folder = config.compile_cache_dir or str(cache_dir() / "compiled")
    if config.backend == "torch":
        device = find_platform("torch", config.device)
        options |= {"threads": config.threads, "device": device, "eager": config.enforce_eager, "compiled": folder}
        if world is None:
            return options
        from .parallel.world_torch import make_mesh

        return options | {"rules": config.rules, "mesh": make_mesh(config.mesh_shape, world, device)}
    options |= {"cache_dir": folder, "eager": config.enforce_eager}
    if config.num_shards == 1:
        return options
    from ..sharding.mesh_jax import ensure_devices, make_mesh
    from .backend_jax import before_start

    before_start(config.device)
    shape = config.mesh_shape if config.num_joint > 1 else {**config.mesh_shape, "dp": 1}
    size = math.prod(shape.values())
    ensure_devices(config.num_shards)
    if size == 1:
        return options | {"device": replica}
    return options | {"mode": "shard_map", "rules": config.rules, "mesh": make_mesh(shape, replica * size)}


def _has_tokenizer(config: EngineConfig, checkpoint: Checkpoint | None) -> bool:
    return not config.skip_tokenizer_init and (checkpoint is not None or config.tokenizer is not None)


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint | None) -> Tokenizer | None:
    if not _has_tokenizer(config, checkpoint):
        return None
    return checkpoint.tokenizer() if checkpoint else load_tokenizer(Path(str(config.tokenizer)))


def _scheduler(config: EngineConfig, plan: MemoryPlan, model: ModelSpec, full: tuple[int, ...]) -> Scheduler:
    blocks = BlockManager(
        [g.window for g in model.groups],
        list(plan.num_blocks),
        config.block_size,
        config.enable_prefix_caching,
        config.max_num_batched_tokens,
        keeps_of(config.layout),
    )
    kind = RecordedScheduler if config.step_log else Scheduler
    policy = config.scheduling_policy
    # an object's name alone gets into a dump: whoever loads it gives the object again
    named = policy if isinstance(policy, str) else "fcfs"
    return kind(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=named,
            order=config.scheduler_order,
            watermark=config.watermark,
            batches=config.pipeline_parallel_size,
            full=full,
        ),
        blocks,
        policy,
    )


def _generation_config(config: EngineConfig, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What generation_config.json says, the checkpoint's or that of a folder, with the engine's own changes."""
    if config.generation_config in ("auto", "vllm"):
        found = dict(checkpoint.generation_config) if checkpoint else {}
    else:
        found = read_json(Path(config.generation_config) / "generation_config.json")
    return {**found, **config.override_generation_config}


def _eos_ids(config: EngineConfig, checkpoint: Checkpoint | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a text: the tokenizer's, and those that generation_config.json lists, or else config.json.

    As in vLLM, generation_config="vllm" switches off defaults and not these; ignore_eos does.
    """
    listed = _generation_config(config, checkpoint).get("eos_token_id")
    if listed is None and checkpoint:
        listed = checkpoint.hf_config.get("eos_token_id")
    found: set[int] = set()
    for value in (tokenizer.eos_token_id if tokenizer else None, listed):
        found |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    return frozenset(integer("eos_token_id", i) for i in found)


def _default_params(config: EngineConfig, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Sampling defaults that the checkpoint's generation_config.json asks for, as vLLM takes them."""
    switched_off = config.generation_config == "vllm"
    source = config.override_generation_config if switched_off else _generation_config(config, checkpoint)
    renamed = {"max_new_tokens": "max_tokens"}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    params = {renamed.get(n, n): source[n] for n in names if source.get(n) is not None}
    # checks them now: a wrong file should fail here and not at the first request
    SamplingParams(**params)
    return params


def _open_logs(config: EngineConfig, plan: MemoryPlan, replicas: Sequence[Replica]) -> None:
    """Has each replica write a step log, if that is asked for: to be replayed alone, by an engine of one replica."""
    if config.step_log is None:
        return
    header = _log_header(config, plan, replicas[0].own_runner)
    for replica in replicas:
        assert isinstance(replica.scheduler, RecordedScheduler)
        path = log_path(config.step_log, replica.index)
        replica.step_log = StepLog(path, header | {"scheduler": replica.scheduler.dump()})
        replica.scheduler.log = replica.step_log


def log_path(path: str, replica: int) -> str:
    """Where a replica logs: FILE.jsonl, FILE.1.jsonl, FILE.2.jsonl ..."""
    if replica == 0 or path == os.devnull:
        return path
    base, extension = os.path.splitext(path)
    return f"{base}.{replica}{extension}"


def _log_header(config: EngineConfig, plan: MemoryPlan, runner: Runner) -> dict[str, Any]:
    """What must be equal for a bit-equal replay, and the arguments to build such an engine with."""
    names = config.given - {"model", "step_log", "layout", "data_parallel_size", "data_parallel_routing"}
    if not isinstance(config.scheduling_policy, str):
        names -= {"scheduling_policy"}
    # a layout by value brings its block size
    of_layout = {"layout": layout_text(config.layout), "block_size": config.block_size}
    return {
        "arguments": {name: getattr(config, name) for name in sorted(names)} | of_layout,
        "versions": {name: version(name) for name in (config.backend, "numpy")},
        "machine": f"{platform.machine()} {platform.processor()} {platform.python_version()}",
        "threads": runner.backend.threads,
        "model": config.model.name if isinstance(config.model, ModelSpec) else str(config.model),
        "is_spec": isinstance(config.model, ModelSpec),
        "weights_crc32": _checksum(runner),
        "backend": config.backend,
        "dtype": config.dtype,
        "layout": repr(config.layout),
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "num_blocks": list(plan.num_blocks),
        "shapes": {name: list(sizes) for name, sizes in vars(runner.shapes).items()},
    }


def _checksum(runner: Runner) -> int:
    """CRC-32 of all weights as placed, one leaf at a time: of another checkpoint, or dtype, it is another."""
    crc = 0
    for leaf in (leaf for stage in runner.stages for leaf in leaves(stage.weights)):
        crc = zlib.crc32(runner.backend.read(leaf).tobytes(), crc)
    return crc
