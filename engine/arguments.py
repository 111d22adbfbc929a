"""The table of engine arguments: what works, what is an alias, what is known and not built yet. Data only."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..models.logprobs import MODES
from . import checks
from .argument import Argument, Later, choices, integers, sizes
from .arguments_parallel import PARALLELISM
from .checks import mapping
from .layout_names import kv_cache_dtype
from .loading.checkpoint import LOAD_FORMATS
from .logits_processors import checked_processors
from .policy import checked_policy
from .structured_output_config import STRUCTURED_OUTPUTS, structured_outputs_config

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LATER_LOAD_FORMATS = (
    "npcache",
    "sharded_state",
    "tensorizer",
    "runai_streamer",
    "fastsafetensors",
    "bitsandbytes",
    "mistral",
)
GIB = 2**30


def text(name: str, value: Any) -> str:
    """A string or a path, not empty."""
    if not str(value) or not (isinstance(value, str) or hasattr(value, "__fspath__")):
        raise ValueError(f"{name} {value!r} is not a name or a path")
    return str(value)


def anything(name: str, value: Any) -> Any:
    return value


def model_length(name: str, value: Any) -> int:
    """A length, or -1 for the longest that fits."""
    return -1 if value in (-1, "auto", "-1") else checks.size(name, value, 1)


def load_format(name: str, value: Any) -> str:
    if value in LATER_LOAD_FORMATS:
        raise NotImplementedError(f"load_format={value!r} is not supported yet: use one of {', '.join(LOAD_FORMATS)}")
    return checks.choice(name, value, LOAD_FORMATS)


def legal_block_size(name: str, value: Any) -> int:
    if isinstance(value, bool) or value not in BLOCK_SIZES:
        raise ValueError(
            f"block_size {value!r} is not a power of two: choose one of {', '.join(map(str, BLOCK_SIZES))}"
        )
    return int(value)


def block_counts(name: str, value: Any) -> int | tuple[int, ...]:
    """One number for every cache group, or one a group. Block 0 is taken, so a pool has at least two."""
    if isinstance(value, list | tuple):
        return tuple(checks.integer(name, n, 2) for n in value)
    return checks.integer(name, value, 2)


WORKING = (
    # what is run
    Argument(
        "model", "str, path or ModelSpec", "smollm2", "alias, directory, .gguf file, hub id, or a ModelSpec", anything
    ),
    Argument("tokenizer", "str", None, "where the tokenizer comes from; None: from the model", text),
    Argument("skip_tokenizer_init", "bool", False, "ids in, ids out: no text, no stop strings", checks.flag),
    Argument(
        "tokenizer_pool_size",
        "int",
        1,
        "processes that tokenise prompts and render chats; 0 and 1: none, it is done in the caller's",
        integers(0),
    ),
    Argument("revision", "str", None, "branch, tag or commit of a hub id", text),
    Argument("download_dir", "str", None, "where hub files are kept; None: the hub's own cache", text),
    Argument(
        "load_format",
        "str",
        "auto",
        "auto, safetensors, pt, gguf, or dummy (random weights from `seed`, no weight files)",
        load_format,
    ),
    Argument("hf_overrides", "dict", {}, "changes to config.json before the model is built", mapping),
    Argument(
        "generation_config",
        "str",
        "auto",
        "default sampling parameters: auto (the checkpoint's generation_config.json), vllm (none), or a directory",
        text,
    ),
    Argument("override_generation_config", "dict", {}, "changes to those defaults", mapping),
    Argument("seed", "int", 0, "of requests without a seed, and of dummy weights", integers(-(2**63), 2**63 - 1)),
    # where it runs
    Argument("backend", "str", "auto", "torch or jax; auto: torch if it is installed, else jax", text),
    Argument(
        "device", "str", "auto", "cpu or cuda; auto: a GPU if the backend finds one", choices("auto", "cpu", "cuda")
    ),
    Argument(
        "dtype",
        "str",
        "auto",
        "of weights, activations and cache: half, float16, bfloat16, float, float32; auto: float32 on a CPU, "
        "on a GPU bfloat16 or float16 as the checkpoint has it",
        choices("auto", "half", "float16", "bfloat16", "float", "float32"),
    ),
    Argument("attention", "str", "auto", "an implementation of the backend; a wrong name lists them", text),
    Argument(
        "layout",
        "str or CacheLayout",
        "token_major",
        "how keys and values lie in the cache: a name of the table, NAME:field=value,..., FILE.py:NAME, or a layout of "
        "your own",
        anything,
    ),
    Argument("mode", "str", "in_place", "in_place, or pure: each step copies the cache", choices("in_place", "pure")),
    *PARALLELISM,
    Argument(
        "threads",
        "int",
        None,
        "CPU threads (torch only); None: one a physical core, or as few as OMP_NUM_THREADS says",
        integers(1),
    ),
    Argument(
        "enforce_eager",
        "bool",
        False,
        "compile and capture nothing, run op by op; on jax on one device; on torch also without its kernels for CPUs",
        checks.flag,
    ),
    Argument(
        "warmup", "str", "lazy", "lazy: compile on first use; all: compile everything first", choices("lazy", "all")
    ),
    Argument(
        "compile_cache_dir",
        "str",
        None,
        "where compiled programs are kept for the next start (jax only); None: in octavo's cache folder",
        text,
    ),
    Argument(
        "enable_sleep_mode",
        "bool",
        False,
        "allows LLM.sleep(), which gives the device's memory back until wake_up()",
        checks.flag,
    ),
    # how much at a time
    Argument(
        "max_model_len",
        "int or str",
        None,
        "tokens of prompt and output of one request; '8k' is 8000, '8K' 8192; auto or -1: the longest that fits; "
        "None: what the model promises",
        model_length,
    ),
    Argument(
        "allow_auto_truncate",
        "bool",
        False,
        "a prompt that is too long loses its end (and a warning says so) instead of being refused",
        checks.flag,
    ),
    Argument(
        "max_num_queued_reqs",
        "int",
        None,
        "requests of add_request and AsyncLLM that may wait beside those that run; more raise QueueFullError. "
        "None: any number",
        integers(0),
    ),
    Argument(
        "enable_prompt_embeds",
        "bool",
        False,
        'prompts may be {"prompt_embeds": array [tokens, hidden size]}; not with step_log, which could not replay them',
        checks.flag,
    ),
    Argument(
        "max_num_seqs", "int", 32, "requests that run at a time; on a GPU 256, of 70 GiB or more 1024", integers(1)
    ),
    Argument(
        "max_num_batched_tokens",
        "int or str",
        512,
        "tokens of a step; at least max_num_seqs, and max_model_len without chunked prefill; on a GPU 8192, of 70 GiB "
        "or more 16384",
        sizes(1),
    ),
    Argument("enable_chunked_prefill", "bool", True, "split prompts over steps", checks.flag),
    Argument("long_prefill_token_threshold", "int", 0, "most tokens of one prompt in a step; 0: off", integers(0)),
    Argument(
        "scheduling_policy",
        "str or policy",
        "fcfs",
        "fcfs, priority (smaller numbers first), FILE.py:NAME, or an object with rank(request), evict(pool) or both: "
        "docs/try_a_scheduling_policy.md",
        checked_policy,
    ),
    Argument(
        "scheduler_order",
        "str",
        "decode_first",
        "who is served first in a step: decode_first (running requests) or prefill_first (waiting ones)",
        choices("decode_first", "prefill_first"),
    ),
    Argument(
        "watermark",
        "float",
        0.0,
        "part of the blocks that admission leaves free, 0 to below 1",
        partial(checks.number, low=0, high=1, open_high=True),
    ),
    Argument("async_scheduling", "bool", True, "plan step k + 1 before the tokens of k are known", checks.flag),
    # the cache
    Argument("block_size", "int", 16, f"tokens of a block: {', '.join(map(str, BLOCK_SIZES))}", legal_block_size),
    Argument(
        "kv_cache_dtype",
        "str",
        "auto",
        "auto: the model's; float16, bfloat16 or float32; fp8 or fp8_e4m3, fp8_per_token_head, int8 or "
        "int8_per_token_head: it names a layout",
        kv_cache_dtype,
    ),
    Argument("enable_prefix_caching", "bool", True, "reuse the blocks of equal prompt beginnings", checks.flag),
    Argument(
        "disable_cascade_attn",
        "bool",
        False,
        "read a prefix that sequences of a step share for each of them, instead of once for all",
        checks.flag,
    ),
    Argument(
        "num_gpu_blocks_override",
        "int or list",
        None,
        "exact number of blocks of each cache group, the null block included; a list has one number a group",
        block_counts,
    ),
    Argument(
        "kv_cache_memory_bytes",
        "int or str",
        None,
        "size of the cache on each device, to the block; overrides gpu_memory_utilization. None: on a CPU 2 GiB, on a "
        "GPU what gpu_memory_utilization leaves, or less where that is of no use",
        sizes(1),
    ),
    Argument(
        "gpu_memory_utilization",
        "float",
        0.9,
        "part of the memory, of a GPU the whole and on a CPU what is free, that weights, activations and cache may "
        "take together; what others hold of a GPU is taken off",
        partial(checks.number, low=0, high=1, open_low=True),
    ),
    # what comes out
    Argument("stream_interval", "int", 1, "tokens of a request from one output to the next", integers(1)),
    Argument("max_logprobs", "int", 20, "most logprobs that a request may ask for; -1: any number", integers(-1)),
    Argument(
        "logits_processors",
        "list of LogitsProcessor",
        (),
        "steps of one's own in the sampler, which requests select by extra_args",
        checked_processors,
    ),
    Argument(
        "logprobs_mode",
        "str",
        "raw_logprobs",
        "raw_logprobs (before everything, a grammar too), processed_logprobs (of the distribution sampled from), "
        "raw_logits or processed_logits",
        choices(*MODES),
    ),
    Argument(
        "structured_outputs_config",
        "dict",
        STRUCTURED_OUTPUTS,
        "how outputs are held to a form (docs/structured_output.md): whitespace and additional properties in JSON; "
        "seconds, GB and processes that compiling may take, and how many compiled grammars are kept",
        structured_outputs_config,
    ),
    Argument(
        "disable_log_stats",
        "bool",
        True,
        "False keeps metrics (docs/metrics.md) and logs a line now and then",
        checks.flag,
    ),
    Argument(
        "enable_return_routed_experts",
        "bool",
        False,
        "outputs say which experts each token went through, in each layer: docs/beyond_generate.md",
        checks.flag,
    ),
    Argument(
        "expert_load_metrics",
        "bool",
        False,
        "True counts the tokens of each expert among the metrics (docs/metrics.md); steps take a little longer",
        checks.flag,
    ),
    Argument("step_log", "str", None, "file that takes a line a step, for replay", text),
)

# other names of the same: old vLLM, SGLang, and what the tuning guides say
ALIASES = {
    "max_batch_size": "max_num_batched_tokens",
    "overlap": "async_scheduling",
    "num_blocks": "num_gpu_blocks_override",
    "policy": "scheduling_policy",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "renderer_num_workers": "tokenizer_pool_size",
}

SPECULATIVE, LORA, MULTIMODAL = "speculative decoding", "LoRA", "multimodal input"
OFFLOAD, PARALLEL, SERVER = "swapping and offloading", "this kind of parallelism", "an option of the server"
HOSTS = "an engine on several hosts"

LATER = (
    Later("quantization", None, "quantization"),
    Later("calculate_kv_scales", False, "a scale of the whole cache (int8 and fp8_per_token_head have one a token)"),
    Later("speculative_config", None, SPECULATIVE),
    Later("speculative_model", None, SPECULATIVE),
    Later("num_speculative_tokens", None, SPECULATIVE, (0,)),
    Later("ngram_prompt_lookup_max", None, SPECULATIVE),
    Later("ngram_prompt_lookup_min", None, SPECULATIVE),
    Later("prompt_lookup_max", None, SPECULATIVE),
    Later("prompt_lookup_min", None, SPECULATIVE),
    Later("spec_method", None, SPECULATIVE),
    Later("spec_model", None, SPECULATIVE),
    Later("spec_tokens", None, SPECULATIVE),
    Later("enable_lora", False, LORA),
    Later("max_loras", 1, LORA),
    Later("max_lora_rank", 16, LORA),
    Later("max_cpu_loras", None, LORA),
    Later("fully_sharded_loras", False, LORA),
    Later("lora_modules", None, LORA),
    Later("limit_mm_per_prompt", None, MULTIMODAL, ({},)),
    Later("mm_processor_kwargs", None, MULTIMODAL, ({},)),
    Later("mm_processor_cache_gb", None, MULTIMODAL),
    Later("swap_space", 0, OFFLOAD),
    Later("cpu_offload_gb", 0, OFFLOAD),
    Later("kv_offloading_size", None, OFFLOAD, (0,)),
    Later("kv_offloading_backend", None, OFFLOAD),
    Later("preemption_mode", "recompute", "preemption by swapping", ("RECOMPUTE",)),
    Later("kv_transfer_config", None, "moving the cache between engines"),
    Later("kv_events_config", None, "cache events"),
    Later("decode_context_parallel_size", 1, PARALLEL),
    Later("prefill_context_parallel_size", 1, PARALLEL),
    Later("enable_eplb", False, PARALLEL),
    Later("data_parallel_backend", "mp", HOSTS),
    Later("data_parallel_size_local", None, HOSTS),
    Later("data_parallel_rank", None, HOSTS),
    Later("data_parallel_address", None, HOSTS),
    Later("nnodes", 1, HOSTS),
    Later("node_rank", 0, HOSTS),
    Later("master_addr", None, HOSTS),
    Later("tokenizer_mode", "auto", "a second kind of tokenizer"),
    Later("tokenizer_revision", None, "a revision for the tokenizer alone"),
    Later("code_revision", None, "code from a checkpoint"),
    Later("trust_remote_code", False, "code from a checkpoint"),
    Later("model_impl", "auto", "modelling code of transformers"),
    Later("config_format", "auto", "a config that is not config.json"),
    Later("runner", "auto", "pooling models", ("generate",)),
    Later("task", "auto", "pooling models", ("generate",)),
    Later("convert", "auto", "pooling models", ("none",)),
    Later("compilation_config", None, "compile levels", ({},)),
    Later("prefix_caching_hash_algo", "sha256", "another prefix hash"),
    Later("scheduler_cls", None, "a whole scheduler of one's own (scheduling_policy takes rules of one's own)"),
    Later("guided_decoding_backend", None, "another grammar library", ("auto", "guidance")),
    Later("use_tqdm_on_load", False, "a progress bar while loading"),
    Later("num_scheduler_steps", 1, "several steps at a time"),
    Later("additional_config", None, "options of a plugin", ({},)),
    Later("host", None, SERVER),
    Later("port", None, SERVER),
    Later("api_key", None, SERVER),
    Later("served_model_name", None, SERVER),
    Later("chat_template", None, SERVER),
    Later("max_log_len", None, SERVER),
)

HINTS = {
    "model_path": "it is called model",
    "context_length": "it is called max_model_len",
    "max_running_requests": "it is called max_num_seqs",
    "chunked_prefill_size": "it is called max_num_batched_tokens",
    "mem_fraction_static": "it is called gpu_memory_utilization",
    "page_size": "it is called block_size",
    "rope_scaling": "use hf_overrides={'rope_scaling': ...}",
    "rope_theta": "use hf_overrides={'rope_theta': ...}",
    "use_v2_block_manager": "it is gone: there is one block manager",
    "max_seq_len_to_capture": "it is gone: programs are kept by shape",
    "max_context_len_to_capture": "it is gone: programs are kept by shape",
    "num_lookahead_slots": "it is gone: it follows from speculative decoding",
    "worker_use_ray": "it is gone: use distributed_executor_backend",
    "use_tqdm": "it belongs to generate()",
}
