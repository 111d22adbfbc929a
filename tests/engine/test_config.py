"""Engine arguments: the table, its defaults, and how arguments are checked against each other and the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from octavo.engine import backend as backends
from octavo.engine.arguments import ALIASES, BLOCK_SIZES, HINTS, LATER, WORKING
from octavo.engine.arguments_parallel import PARALLELISM
from octavo.engine.build import build
from octavo.engine.checks import UnknownArgumentError
from octavo.engine.config import EngineConfig, engine_config
from octavo.engine.config_docs import markdown
from octavo.models import llama
from octavo.models.layouts.paged import HeadMajor, TokenMajor
from octavo.sharding.rules import ShardingRules

SPEC = llama.spec(llama.LlamaConfig(97, 32, 64, 4, 4, 2, 8, 2048, windows=(None, 8, None, 8)))


@pytest.fixture
def installed(monkeypatch):
    """Makes it look as if only these backends were installed."""
    return lambda *names: monkeypatch.setattr(backends, "installed_backends", lambda: list(names))


def test_the_table_and_the_config_have_the_same_arguments():
    names = [f.name for f in dataclasses.fields(EngineConfig)]
    assert names == [a.name for a in WORKING] + ["given", "fit_model_len"]


def test_no_name_means_two_things():
    tables = [[a.name for a in WORKING], [a.name for a in LATER], list(ALIASES), list(HINTS)]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert set(ALIASES.values()) <= {a.name for a in WORKING}


def test_the_page_of_arguments_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "engine_arguments.md"
    assert page.read_text() == markdown(), "python -m octavo.engine.config_docs > docs/engine_arguments.md"


def test_defaults_pass_their_own_checks():
    for a in WORKING:
        if a.default is not None:
            assert a.check(a.name, a.default) == a.default


def test_defaults():
    c = engine_config("m")
    assert (c.model, c.dtype, c.block_size, c.max_num_seqs, c.max_num_batched_tokens) == ("m", "auto", 16, 32, 512)
    assert (c.enable_prefix_caching, c.enable_chunked_prefill, c.async_scheduling) == (True, True, True)
    assert (c.max_model_len, c.kv_cache_memory_bytes, c.given, c.fit_model_len) == (None, None, frozenset(), False)


def test_none_means_the_default():
    assert engine_config("m", **{a.name: None for a in (*WORKING[1:], *LATER)}) == engine_config("m")


# the constructor forms of the tuning guides, semantics.md 7
ACCEPTED = [
    {"enable_prefix_caching": True},
    {"enable_chunked_prefill": True},
    {"max_num_batched_tokens": 16384},
    {"block_size": 16, "max_model_len": 4096, "max_num_seqs": 256},
    {"block_size": 8},
    {"block_size": 32},
    {"dtype": "half", "max_model_len": 4096},
    {"gpu_memory_utilization": 0.92},
    {"max_model_len": 2048},
    {"disable_log_stats": True},
    {"load_format": "dummy"},
    {"max_num_seqs": 200, "max_num_batched_tokens": 4096, "enforce_eager": False},
    {"max_batch_size": 1024},
    {"tokenizer_pool_size": 4},
    {"renderer_num_workers": 4},
    {"preemption_mode": "recompute"},
    {"preemption_mode": "RECOMPUTE"},
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=str)
def test_forms_of_the_guides_are_accepted(arguments):
    config = engine_config("m", **arguments)
    for name, value in arguments.items():
        name = ALIASES.get(name, name)
        if hasattr(config, name):
            assert getattr(config, name) == {"half": "float16"}.get(value, value)


def test_enforce_eager_is_what_torch_always_does(installed):
    installed("torch", "jax")
    assert engine_config("m", enforce_eager=True).backend == "torch"


# those and others, of what is not built yet
REFUSED = {
    "distributed_executor_backend": "ray",
    "speculative_model": "[ngram]",
    "num_speculative_tokens": 5,
    "ngram_prompt_lookup_max": 4,
    "speculative_config": {"method": "ngram"},
    "quantization": "gptq_marlin",
    "cpu_offload_gb": 4,
    "swap_space": 4,
    "kv_offloading_size": 1,
    "preemption_mode": "swap",
    "limit_mm_per_prompt": {"image": 2},
    "enable_lora": True,
    "trust_remote_code": True,
    "kv_cache_dtype": "nvfp4",
    "calculate_kv_scales": True,
    "load_format": "tensorizer",
    "host": "0.0.0.0",
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"data_parallel_size": 2, "backend": "jax", "distributed_executor_backend": "mp"},
            "data_parallel_size=2 with several processes of JAX: leave out",
        ),
        (
            {"pipeline_parallel_size": 2, "backend": "jax", "distributed_executor_backend": "mp"},
            "pipeline_parallel_size=2 with several processes of JAX: leave out",
        ),
    ],
    ids=str,
)
def test_what_can_only_be_planned_is_refused_by_name(arguments, words):
    with pytest.raises(NotImplementedError, match=words):
        build(engine_config("m", **arguments))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        engine_config("m", **{name: REFUSED[name]})


@pytest.mark.parametrize("later", LATER, ids=lambda a: a.name)
def test_what_is_not_built_is_acceptedinstalled_where_it_asks_for_nothing(later):
    for value in (later.default, *later.harmless):
        assert engine_config("m", **{later.name: value}) == engine_config("m")
    with pytest.raises(NotImplementedError, match=later.name):
        engine_config("m", **{later.name: "something else"})


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("fp8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("fp8_per_token_head", "fp8_per_token_head"),
        ("int8", "int8"),
        ("int8_per_token_head", "int8"),
        ("bfloat16", 'token_major:dtype="bfloat16"'),
        ("half", 'token_major:dtype="float16"'),
    ],
)
def test_a_cache_dtype_names_a_layout(dtype, layout):
    found = engine_config("m", kv_cache_dtype=dtype, block_size=32)
    assert found.layout == engine_config("m", layout=layout, block_size=32).layout
    assert found == dataclasses.replace(
        engine_config("m", kv_cache_dtype=dtype, layout=found.layout), given=found.given
    )
    assert engine_config("m", kv_cache_dtype="auto", layout=layout).layout != engine_config("m").layout


def test_a_cache_dtype_that_is_not_the_layouts_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype 'int8' asks for layout Int8.*, not HeadMajor"):
        engine_config("m", kv_cache_dtype="int8", layout="head_major")
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype='fp8_e5m2' is not supported yet: use one of auto"):
        engine_config("m", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp9'"):
        engine_config("m", kv_cache_dtype="fp9")


@pytest.mark.parametrize(
    "name, advice",
    [
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization"),
        ("max_seqs", "did you mean max_num_seqs"),
        ("page_size", "block_size"),
        ("use_v2_block_manager", "gone"),
        ("zzz", "unknown engine argument 'zzz'"),
    ],
)
def test_an_unknown_name_is_refused_with_advice(name, advice):
    with pytest.raises(UnknownArgumentError, match=advice):
        engine_config("m", **{name: 1})


def test_an_alias_is_the_argument():
    assert engine_config("m", max_batch_size=64) == engine_config("m", max_num_batched_tokens=64)
    assert engine_config("m", overlap=False).async_scheduling is False
    assert engine_config("m", max_batch_size=64, max_num_batched_tokens=64).max_num_batched_tokens == 64
    with pytest.raises(ValueError, match="max_batch_size 64 and max_num_batched_tokens 128"):
        engine_config("m", max_batch_size=64, max_num_batched_tokens=128)


@pytest.mark.parametrize(
    "value, tokens", [(4096, 4096), ("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1Ki", 1024)]
)
def test_lengths_may_have_a_unit(value, tokens):
    assert engine_config("m", max_model_len=value).max_model_len == tokens


@pytest.mark.parametrize("value", ["2GiB", "2G", 2**31])
def test_sizes_may_have_a_unit(value):
    assert engine_config("m", kv_cache_memory_bytes=value).kv_cache_memory_bytes == 2**31


@pytest.mark.parametrize("value", ["auto", -1, "-1"])
def test_an_automatic_length_is_left_to_the_memory_plan(value):
    c = engine_config("m", max_model_len=value).for_model(SPEC)
    assert (c.max_model_len, c.fit_model_len) == (2048, True)


WRONG = {
    "max_model_len": [0, -2, "long", "1.0001k", 1.5, True],
    "max_num_seqs": [0, -1, 2.5, "8"],
    "max_num_batched_tokens": [0, "many"],
    "gpu_memory_utilization": [0, 1.1, -0.5, "0.9", float("nan")],
    "kv_cache_memory_bytes": [0, -1, "2 apples"],
    "num_gpu_blocks_override": [1, 0, [8, 1], "8"],
    "watermark": [-0.1, 1],
    "scheduling_policy": ["lifo"],
    "scheduler_order": ["both"],
    "dtype": ["fp32", "int8"],
    "load_format": ["zip"],
    "warmup": ["some"],
    "mode": ["impure"],
    "seed": [1.5, 2**63],
    "tensor_parallel_size": [0],
    "max_logprobs": [-2],
    "enable_prefix_caching": [1, "yes"],
    "enable_chunked_prefill": ["False"],
    "hf_overrides": ["{}"],
    "tokenizer": ["", 5],
    "layout": ["diagonal", 3],
    "backend": ["tpu"],
    "threads": [0],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, values in WRONG.items() for v in values])
def test_a_wrong_value_is_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError, match=name) as error:
        engine_config("m", **{name: value})
    shown = value[-1] if isinstance(value, list) else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize("value", [None, "", 5])
def test_a_model_is_a_name_a_path_or_a_spec(value):
    with pytest.raises(ValueError, match="model"):
        engine_config(value)


@pytest.mark.parametrize("size", [12, 0, 3, 512, 16.5, True, "16"])
def test_an_illegal_block_size_is_refused_with_the_legal_ones(size):
    with pytest.raises(ValueError, match=", ".join(map(str, BLOCK_SIZES))):
        engine_config("m", block_size=size)


def test_the_block_size_is_the_layouts():
    assert engine_config("m", block_size=8).layout == TokenMajor(8)
    assert engine_config("m", layout="head_major").layout == HeadMajor(16)
    assert engine_config("m", layout=HeadMajor(32)).block_size == 32
    with pytest.raises(ValueError, match="block_size 8 is not the 32"):
        engine_config("m", layout=HeadMajor(32), block_size=8)
    with pytest.raises(ValueError, match="block_size 12"):
        engine_config("m", layout=TokenMajor(12))
    with pytest.raises(ValueError, match="token_major, head_major"):
        engine_config("m", layout="diagonal")


def test_the_budget_covers_the_sequences():
    assert engine_config("m", max_num_seqs=600).max_num_batched_tokens == 600
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 16 is less than max_num_seqs 32.*at least 32"):
        engine_config("m", max_num_batched_tokens=16)


def test_without_chunked_prefill_the_budget_covers_a_prompt():
    c = engine_config("m", enable_chunked_prefill=False, max_model_len=1024)
    assert c.max_num_batched_tokens == 1024
    assert engine_config("m", enable_chunked_prefill=False).for_model(SPEC).max_num_batched_tokens == 2048
    with pytest.raises(ValueError, match="max_num_batched_tokens 512 is less than max_model_len 1024"):
        engine_config("m", enable_chunked_prefill=False, max_model_len=1024, max_num_batched_tokens=512)
    late = engine_config("m", enable_chunked_prefill=False, max_num_batched_tokens=512)
    with pytest.raises(ValueError, match="max_num_batched_tokens 512 is less than max_model_len 2048"):
        late.for_model(SPEC)


def test_the_default_budget_is_no_more_than_can_be_used():
    assert engine_config("m", max_num_seqs=2, max_model_len=64).max_num_batched_tokens == 128


def test_the_model_bounds_the_length():
    assert engine_config("m").for_model(SPEC).max_model_len == 2048
    assert engine_config("m", max_model_len=2048).for_model(SPEC).max_model_len == 2048
    with pytest.raises(ValueError, match=r"max_model_len 2049 is more than the 2048.*hf_overrides"):
        engine_config("m", max_model_len=2049).for_model(SPEC)


def test_block_counts_are_one_or_one_a_group():
    assert engine_config("m", num_gpu_blocks_override=[30, 20]).for_model(SPEC).num_gpu_blocks_override == (30, 20)
    with pytest.raises(ValueError, match=r"3 numbers.*2 cache groups"):
        engine_config("m", num_gpu_blocks_override=[3, 4, 5]).for_model(SPEC)


@pytest.mark.parametrize("given, dtype", [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")])
def test_dtypes_have_other_names(given, dtype):
    assert engine_config("m", dtype=given).dtype == dtype


@pytest.mark.parametrize(
    "platform, stored, dtype",
    [("cpu", "bfloat16", "float32"), ("cuda", "bfloat16", "bfloat16"), ("cuda", None, "bfloat16"),
     ("cuda", "float32", "float16")],
)  # fmt: skip
def test_dtype_auto_follows_platform_and_checkpoint(platform, stored, dtype):
    assert engine_config("m").for_model(SPEC, platform, stored).dtype == dtype
    assert engine_config("m", dtype="float32").for_model(SPEC, platform, stored).dtype == "float32"


def test_auto_takes_torch_if_it_is_there(installed):
    installed("torch", "jax")
    assert engine_config("m").backend == "torch"
    installed("jax")
    assert engine_config("m").backend == "jax"
    with pytest.raises(ValueError, match=r"octavo\[torch\]"):
        engine_config("m", backend="torch")
    installed()
    with pytest.raises(ValueError, match=r"pip install 'octavo\[torch\]' or 'octavo\[jax\]'"):
        engine_config("m")


@pytest.mark.parametrize(
    "backend, name, value",
    [
        ("torch", "compile_cache_dir", "/tmp/x"),
        ("jax", "threads", 2),
    ],
)
def test_what_one_backend_lacks_is_refused_there(installed, backend, name, value):
    installed("torch", "jax")
    with pytest.raises(NotImplementedError, match=f"{name}.*{backend}"):
        engine_config("m", backend=backend, **{name: value})
    other = {"torch": "jax", "jax": "torch"}[backend]
    assert getattr(engine_config("m", backend=other, **{name: value}), name) == value


@pytest.mark.parametrize(
    "name, value",
    [("revision", "main"), ("download_dir", "/tmp"), ("hf_overrides", {"rope_theta": 1e4}), ("load_format", "pt")],
)
def test_what_opens_a_checkpoint_is_refused_beside_a_spec(name, value):
    with pytest.raises(ValueError, match=f"{name}.* ModelSpec"):
        engine_config(SPEC, **{name: value})


@pytest.mark.parametrize(
    "memory, given, seqs, tokens",
    [(141 << 30, {}, 1024, 16384), (24 << 30, {}, 256, 8192), (None, {}, 256, 8192),
     (141 << 30, {"max_num_seqs": 7}, 7, 7 * 2048), (141 << 30, {"max_num_batched_tokens": 100}, 100, 100)],
)  # fmt: skip
def test_a_gpu_takes_more_at_a_time(memory, given, seqs, tokens):
    """vLLM's defaults by the size of the card; what is given stays."""
    config = engine_config("m", **given).for_model(SPEC, "cuda", "bfloat16", memory)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)
    assert engine_config("m", **given).for_model(SPEC).max_num_seqs == given.get("max_num_seqs", 32)


def test_a_placement_of_experts_that_nobody_shares_is_refused():
    turns = {"expert_placement_strategy": "round_robin"}
    with pytest.raises(ValueError, match="places nothing without enable_expert_parallel"):
        engine_config("m", **turns)
    assert engine_config("m", enable_expert_parallel=True, **turns).expert_placement_strategy == "round_robin"
    rules = {"experts": "tp"}
    assert engine_config("m", tensor_parallel_size=2, sharding_rules=rules, **turns).deals_experts


def test_sharding_rules_may_be_a_mapping_and_nothing_else():
    found = engine_config("m", tensor_parallel_size=2, sharding_rules={"mlp": ["tp"], "vocab": None}).rules
    assert isinstance(found, ShardingRules) and dict(found) == {"mlp": ("tp",), "vocab": None}
    with pytest.raises(ValueError, match="sharding_rules 'mlp' is not a ShardingRules, nor a dict"):
        engine_config("m", sharding_rules="mlp")
    with pytest.raises(ValueError, match="sharding_rules: 'mlp' goes to 2: a mesh axis, several or None is right"):
        engine_config("m", sharding_rules={"mlp": 2})


def test_rules_that_share_nothing_are_rules_too():
    assert dict(engine_config("m", tensor_parallel_size=2, sharding_rules={}).rules) == {}
    assert engine_config("m", tensor_parallel_size=2).rules["mlp"] == "tp"


@pytest.mark.parametrize("name", [a.name for a in PARALLELISM if a.kind == "int"])
def test_sizes_and_intervals_have_a_least_value(name):
    least = 0 if name == "state_check_interval" else 1
    assert getattr(engine_config("m", **{name: least}), name) == least
    with pytest.raises(ValueError, match=f"{name} {least - 1} "):
        engine_config("m", **{name: least - 1})
