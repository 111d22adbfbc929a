"""Engine arguments made into one frozen value, checked against each other."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.interface import CacheLayout, ModelSpec
from ..models.keeps import keeps_of
from ..models.logit_edits import LogitsProcessor
from ..sharding.rules import ShardingRules, as_tuple, check_known, preset, with_replicas
from .arguments import ALIASES, HINTS, LATER, WORKING, legal_block_size
from .backend import resolve_backend
from .checks import check_names
from .layout_names import layout_from, layout_of_dtype

DEFAULT_BLOCK_SIZE = 16  # tokens
LARGE_GPU = 70 * 2**30  # bytes
DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class EngineConfig:
    """Every engine argument, resolved. docs/engine_arguments.md says what each one means.

    Until `for_model` has seen the model, `max_model_len` may be None, and `dtype` and `device` "auto". `fit_model_len`
    says that the memory plan may lower max_model_len ("auto" was asked for), `given` which arguments the user set.
    """

    model: Any
    tokenizer: str | None
    skip_tokenizer_init: bool
    tokenizer_pool_size: int
    revision: str | None
    download_dir: str | None
    load_format: str
    hf_overrides: Mapping[str, Any]
    generation_config: str
    override_generation_config: Mapping[str, Any]
    seed: int
    backend: str
    device: str
    dtype: str
    attention: str
    layout: CacheLayout
    mode: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_routing: str
    enable_expert_parallel: bool
    expert_placement_strategy: str
    enable_sp: bool
    sp_min_token_num: int
    sharding_rules: ShardingRules | None
    distributed_executor_backend: str | None
    state_check_interval: int
    threads: int | None
    enforce_eager: bool
    warmup: str
    compile_cache_dir: str | None
    enable_sleep_mode: bool
    max_model_len: int | None
    allow_auto_truncate: bool
    max_num_queued_reqs: int | None
    enable_prompt_embeds: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: Any  # what policy.as_policy takes
    scheduler_order: str
    watermark: float
    async_scheduling: bool
    block_size: int
    kv_cache_dtype: str  # as asked for; the layout has it
    enable_prefix_caching: bool
    disable_cascade_attn: bool
    num_gpu_blocks_override: int | tuple[int, ...] | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    stream_interval: int
    max_logprobs: int
    logits_processors: tuple[LogitsProcessor, ...]
    logprobs_mode: str
    structured_outputs_config: dict[str, Any]
    disable_log_stats: bool
    enable_return_routed_experts: bool
    expert_load_metrics: bool
    step_log: str | None
    given: frozenset[str] = frozenset()
    fit_model_len: bool = False

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Mesh axes and their sizes."""
        return {"dp": self.data_parallel_size, "pp": self.pipeline_parallel_size, "tp": self.tensor_parallel_size}

    @property
    def num_shards(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_shape.values())

    @property
    def replica_size(self) -> int:
        """Devices of one replica."""
        return self.num_shards // self.data_parallel_size

    @property
    def rules(self) -> ShardingRules:
        """Which mesh axis shares which logical axis."""
        rules = self.sharding_rules
        if rules is None:
            rules = preset(self.mesh_shape, self.enable_expert_parallel, self.enable_sp)
        return with_replicas(rules, self.mesh_shape)

    @property
    def num_joint(self) -> int:
        """Replicas that step together, because experts are shared out over them; 1: each steps alone."""
        return self.data_parallel_size if "replicas" in self.rules else 1

    @property
    def num_dealt(self) -> int:
        """Devices that get experts in turn; 1: each gets neighbours."""
        names = as_tuple(self.rules.get("experts")) if self.expert_placement_strategy == "round_robin" else ()
        return math.prod(self.mesh_shape[name] for name in names)

    @property
    def deals_experts(self) -> bool:
        return self.num_dealt > 1

    def for_model(
        self,
        model: ModelSpec,
        platform: str = "cpu",
        stored_dtype: str | None = None,
        device_memory: int | None = None,
    ) -> EngineConfig:
        """The same with what follows from the model, the platform ("cpu" or "cuda"), the checkpoint's dtype and the
        bytes of the GPU.

        Raises ValueError where they do not fit.
        """
        if self.expert_load_metrics and (model.mixture is None or self.disable_log_stats):
            why = "the model has no experts" if model.mixture is None else "disable_log_stats=True keeps no metrics"
            raise ValueError(f"expert_load_metrics=True: {why}")
        if self.enable_return_routed_experts:
            check_routed(self, model)
        length, most = self.max_model_len, model.max_model_len
        if length is not None and length > most:
            raise ValueError(
                f"max_model_len {length} is more than the {most} tokens that the model's config promises: "
                f"use {most} or less, or change the config with hf_overrides"
            )
        counts = self.num_gpu_blocks_override
        if isinstance(counts, tuple) and len(counts) != len(model.groups):
            raise ValueError(f"num_gpu_blocks_override {counts} has {len(counts)} numbers: one for each of the "
                             f"model's {len(model.groups)} cache groups is right")  # fmt: skip
        length = most if length is None else length
        sized = _sized(self, platform, device_memory)
        return replace(
            sized,
            device=platform,
            dtype=_dtype(self.dtype, platform, stored_dtype),
            max_model_len=length,
            max_num_batched_tokens=_budget(sized, length),
        )


def engine_config(model: Any = "smollm2", **arguments: Any) -> EngineConfig:
    """The configuration that these arguments ask for.

    None means the default. Raises ValueError for a wrong value, UnknownArgumentError for an unknown name,
    NotImplementedError for what is known and not built yet.
    """
    values = _named(arguments)
    _refuse_later(values)
    given = {a.name: a.check(a.name, values[a.name]) for a in WORKING if a.name in values}
    resolved = {a.name: a.default for a in WORKING} | given | {"model": _model(model)}
    resolved |= {
        "backend": resolve_backend(resolved["backend"]),
        "dtype": DTYPES.get(resolved["dtype"], resolved["dtype"]),
    }
    resolved |= _layout(resolved["layout"], given.get("block_size"), resolved["kv_cache_dtype"], "layout" in given)
    resolved |= _for_layout(resolved["layout"], given)
    fit = resolved["max_model_len"] == -1
    resolved |= {"max_model_len": None} if fit else {}
    config = EngineConfig(**resolved, given=frozenset(given), fit_model_len=fit)
    _check_model(config)
    _check_backend(config)
    shares_experts = config.enable_expert_parallel or config.rules.get("experts") is not None
    if config.expert_placement_strategy != "linear" and not shares_experts:
        raise ValueError(
            f"expert_placement_strategy={config.expert_placement_strategy!r} places nothing without "
            "enable_expert_parallel=True, or sharding_rules for experts"
        )
    _check_routing(config)
    if config.sharding_rules is not None:
        check_known(config.sharding_rules, config.mesh_shape)
    _check_sequence(config)
    return replace(config, max_num_batched_tokens=_budget(config, config.max_model_len))


def _check_routing(c: EngineConfig) -> None:
    """Refuses a rule for replicas where it could choose nothing."""
    if c.data_parallel_routing == "least_loaded":
        return
    if c.data_parallel_size == 1:
        raise ValueError(f"data_parallel_routing={c.data_parallel_routing!r} with data_parallel_size 1 chooses nothing")
    if not c.enable_prefix_caching:
        raise ValueError("data_parallel_routing='prefix' needs enable_prefix_caching: without, no replica has prefixes")


def _check_sequence(c: EngineConfig) -> None:
    """Refuses what asks for hidden rows shared out by tokens, and shares out none."""
    if c.enable_sp and c.tensor_parallel_size == 1:
        raise ValueError("enable_sp=True with tensor_parallel_size 1: there is nobody to share hidden rows with")
    if c.enable_sp and c.rules.get("tokens") is None:
        raise ValueError("enable_sp=True with sharding_rules that leave 'tokens' out: add {'tokens': 'tp'} to them")
    if c.sp_min_token_num > 1 and c.rules.get("tokens") is None:
        raise ValueError(f"sp_min_token_num={c.sp_min_token_num} limits nothing without enable_sp=True")


def check_routed(c: EngineConfig, model: ModelSpec) -> None:
    """Refuses to return routed experts where there are none, or nobody keeps them."""
    name = "enable_return_routed_experts=True"
    if model.mixture is None:
        raise ValueError(f"{name}: the model {model.name!r} has no experts")
    forgets = keeps_of(c.layout).window is not None or keeps_of(c.layout).budget is not None
    if forgets or all(group.window is not None for group in model.groups):
        raise NotImplementedError(
            f"{name} where every layer forgets tokens: their experts would be forgotten with them"
        )


def _named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not None, by their names of today."""
    known = {a.name for a in WORKING} | {a.name for a in LATER} | ALIASES.keys()
    check_names("engine argument", arguments, known, HINTS)
    values = {name: value for name, value in arguments.items() if value is not None}
    for old, name in ALIASES.items():
        value = values.pop(old, None)
        if value is not None and values.setdefault(name, value) != value:
            raise ValueError(f"{old} {value!r} and {name} {values[name]!r} are the same argument: give one of them")
    return values


def _refuse_later(values: Mapping[str, Any]) -> None:
    for a in LATER:
        if a.name in values and values[a.name] not in (a.default, *a.harmless):
            raise NotImplementedError(f"{a.name}={values[a.name]!r}: {a.feature} is not supported yet")


def _model(model: Any) -> Any:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path) and str(model):
        return model
    raise ValueError(f"model {model!r} is not a name, a path or a ModelSpec")


def _layout(layout: Any, block_size: int | None, dtype: str, given: bool) -> dict[str, Any]:
    """The layout as a value, and the block size, which is a part of it."""
    if dtype != "auto" and not given:
        layout = layout_of_dtype(dtype, block_size or DEFAULT_BLOCK_SIZE)
    if isinstance(layout, str):
        layout = layout_from(layout, block_size or DEFAULT_BLOCK_SIZE)
    if not all(hasattr(layout, name) for name in ("block_size", "spec", "attention")):
        raise ValueError(f"layout {layout!r} is not a CacheLayout: it needs block_size, spec and attention")
    if block_size is not None and block_size != layout.block_size:
        raise ValueError(
            f"block_size {block_size} is not the {layout.block_size} of layout {layout!r}: give one of them"
        )
    if dtype != "auto" and layout != (asked := layout_of_dtype(dtype, layout.block_size)):
        raise ValueError(f"kv_cache_dtype {dtype!r} asks for layout {asked!r}, not {layout!r}: give one of them")
    return {"layout": layout, "block_size": legal_block_size("block_size", layout.block_size)}


def _for_layout(layout: CacheLayout, given: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a layout that keeps a budget of tokens, of which the device chooses."""
    if keeps_of(layout).budget is None:
        return {}
    if given.get("enable_prefix_caching"):
        raise ValueError(
            f"enable_prefix_caching=True: what {layout!r} keeps of a prompt depends on all of it, so no block can be "
            "another's; leave it out, or False"
        )
    if not given.get("enable_chunked_prefill", True):
        raise ValueError(f"enable_chunked_prefill=False: under {layout!r} chunks end where tokens are dropped")
    return {"enable_prefix_caching": False}


def _check_model(c: EngineConfig) -> None:
    """Refuses what says how to open a checkpoint where there is none."""
    if not isinstance(c.model, ModelSpec):
        return
    if useless := sorted(c.given & {"revision", "download_dir", "hf_overrides"}):
        raise ValueError(f"{', '.join(useless)}: of use for a checkpoint only, and model is a ModelSpec")
    if c.load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format {c.load_format!r} with a ModelSpec as model: 'dummy', or weights=, is right")


def _check_backend(c: EngineConfig) -> None:
    """Refuses what only the other backend has."""
    if c.backend == "torch":
        if c.num_shards > 1 and c.distributed_executor_backend == "uni":
            raise ValueError("distributed_executor_backend='uni' on torch, which has a process a device: 'mp' is right")
        if c.num_shards > 1 and c.mode == "pure":
            raise NotImplementedError("mode='pure' with several processes: use one device, or backend='jax'")
        if c.compile_cache_dir is not None:
            raise NotImplementedError("compile_cache_dir is not supported on torch: set OCTAVO_CACHE instead")
    if c.backend == "jax" and c.threads is not None:
        raise NotImplementedError(f"threads={c.threads} is not supported on jax: limit the process (taskset) instead")


def _dtype(asked: str, platform: str, stored: str | None) -> str:
    """What "auto" means: float32 on a CPU; on a GPU bfloat16, or float16 where the checkpoint says another dtype."""
    if asked != "auto":
        return asked
    if platform == "cpu":
        return "float32"
    return "bfloat16" if stored in (None, "bfloat16") else "float16"


def _sized(c: EngineConfig, platform: str, device_memory: int | None) -> EngineConfig:
    """On a GPU: as many sequences and tokens a step as vLLM takes by default, if none were given."""
    if platform == "cpu":
        return c
    seqs, tokens = (1024, 16384) if (device_memory or 0) >= LARGE_GPU else (256, 8192)
    if "max_num_seqs" not in c.given:
        # a given budget bounds them: each running request takes a token a step
        limit = c.max_num_batched_tokens if "max_num_batched_tokens" in c.given else seqs
        c = replace(c, max_num_seqs=min(seqs, limit))
    return c if "max_num_batched_tokens" in c.given else replace(c, max_num_batched_tokens=tokens)


def _budget(c: EngineConfig, max_model_len: int | None) -> int:
    """max_num_batched_tokens; the default one adapts, a given one is checked. The length may not be known yet."""
    budget, whole, length = c.max_num_batched_tokens, not c.enable_chunked_prefill, max_model_len or 0
    if "max_num_batched_tokens" not in c.given:
        budget = min(budget, c.max_num_seqs * length) if length else budget
        return max(budget, c.max_num_seqs, length if whole else 0)
    if budget < c.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {budget} is less than max_num_seqs {c.max_num_seqs}: each running request takes a "
            f"token a step, so use at least {c.max_num_seqs}, or fewer sequences"
        )
    if whole and budget < length:
        raise ValueError(
            f"max_num_batched_tokens {budget} is less than max_model_len {length}, and without chunked prefill a "
            f"prompt is computed in one step: use at least {length}, a shorter max_model_len, or chunked prefill"
        )
    return budget


def torchrun_world() -> tuple[int, int, int] | None:
    """Rank, number of processes and rank on this host, as torchrun tells them; None: it did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, size, local
