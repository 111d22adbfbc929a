"""The memory plan, against sizes worked out by hand, the arrays that are really made, and the block manager."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from backends import BACKENDS

from octavo.engine.backend import get_backend
from octavo.engine.block_manager import BlockManager
from octavo.engine.config import engine_config
from octavo.engine.memory_plan import DEFAULT_CACHE_BYTES, USEFUL, available_memory, memory_plan
from octavo.engine.runner import cache_specs
from octavo.models import llama
from octavo.models.interface import leaves

FULL = llama.spec(llama.LlamaConfig(97, 32, 64, 4, 4, 2, 8, 2048))
# 4 layers of 2 heads of 8, k and v, fp32: a block of 16 tokens is
BLOCK = 4 * 2 * 2 * 8 * 4 * 16
MIXED = llama.spec(llama.LlamaConfig(97, 32, 64, 4, 4, 2, 8, 2048, windows=(None, 8, 8, 8)))


def _plan(model=FULL, *, divisors=None, available=None, **arguments):
    defaults = {"backend": BACKENDS[0], "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = engine_config("m", **(defaults | arguments)).for_model(model)
    return memory_plan(config, model, divisors=divisors, available=available)


def _float32_bytes(spec):
    return 4 * math.prod(spec.shape)


def test_a_pool_is_the_bytes_asked_for_rounded_down_to_a_block():
    plan = _plan(kv_cache_memory_bytes=200 * BLOCK + BLOCK - 1)
    assert (plan.num_blocks, plan.cache_bytes) == ((200,), 200 * BLOCK)
    assert plan.groups[0].block_bytes == BLOCK


@pytest.mark.parametrize("dtype, factor", [("float32", 1), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_dtype(dtype, factor):
    plan = _plan(kv_cache_memory_bytes=300 * BLOCK, dtype=dtype)
    assert plan.num_blocks == (300 * factor,)


def test_an_override_is_the_exact_number_of_blocks():
    assert _plan(num_gpu_blocks_override=129).num_blocks == (129,)
    assert _plan(MIXED, num_gpu_blocks_override=129).num_blocks == (129, 129)
    assert _plan(MIXED, num_gpu_blocks_override=[140, 20]).num_blocks == (140, 20)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("model", [FULL, MIXED], ids=["full", "mixed"])
def test_the_plan_is_what_the_arrays_take(name, model):
    plan = _plan(model, num_gpu_blocks_override=150, backend=name)
    backend = get_backend(name)
    specs = cache_specs(model, engine_config("m").layout, plan.num_blocks, 4, plan.max_model_len)
    arrays = [backend.zeros(s) for s in leaves(specs.groups)]
    assert sum(a.nbytes for a in arrays) == plan.cache_bytes
    assert sum(backend.zeros(s).nbytes for s in leaves(specs.rows)) == plan.rows_bytes
    weights = sum(backend.zeros(s).nbytes for s in leaves(model.weights))
    assert weights == plan.weights_bytes
    assert plan.total_bytes == weights + plan.cache_bytes + plan.rows_bytes + plan.activations_bytes


def test_a_tied_table_is_kept_twice_on_torch():
    tied = llama.spec(llama.LlamaConfig(97, 32, 64, 4, 4, 2, 8, 2048, tied=True))
    once = _plan(tied, num_gpu_blocks_override=150, backend=BACKENDS[-1]).weights_bytes
    expected = sum(_float32_bytes(s) for s in leaves(tied.weights)) + (BACKENDS[-1] == "torch") * 97 * 32 * 4
    assert once == expected


def test_one_request_must_fit():
    # 2048 tokens are 128 blocks, and the null block is one more
    assert _plan(num_gpu_blocks_override=129).max_model_len == 2048
    with pytest.raises(ValueError, match=r"needs 128 blocks of 16 tokens, and 127 are there; .*fits is 2032") as error:
        _plan(num_gpu_blocks_override=128)
    assert f"kv_cache_memory_bytes (to {129 * BLOCK} or more)" in str(error.value)
    assert _plan(kv_cache_memory_bytes=129 * BLOCK).num_blocks == (129,)
    with pytest.raises(ValueError, match="127 are there"):
        _plan(kv_cache_memory_bytes=129 * BLOCK - 1)
    with pytest.raises(ValueError, match="no request fits"):
        _plan(kv_cache_memory_bytes=BLOCK)


@pytest.mark.parametrize("model", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("size", [9, 20, 77, 128, 10**5])
def test_an_automatic_length_is_the_longest_that_fits(model, size):
    plan = _plan(model, kv_cache_memory_bytes=size * BLOCK, max_model_len="auto")
    again = _plan(model, kv_cache_memory_bytes=size * BLOCK, max_model_len=plan.max_model_len)
    assert again.num_blocks == plan.num_blocks
    assert plan.max_model_len == plan.largest_max_model_len
    if plan.max_model_len < 2048:
        with pytest.raises(ValueError, match=f"fits is {plan.max_model_len}"):
            _plan(model, kv_cache_memory_bytes=size * BLOCK, max_model_len=plan.max_model_len + 1)


def test_a_length_that_fits_is_not_lowered():
    assert _plan(num_gpu_blocks_override=129, max_model_len=100).max_model_len == 100
    assert _plan(num_gpu_blocks_override=1000, max_model_len="auto").max_model_len == 2048


@pytest.mark.parametrize("length", [1, 16, 17, 100, 2048])
@pytest.mark.parametrize("budget", [4, 64, 500])
def test_a_request_holds_what_the_block_manager_says(length, budget):
    plan = _plan(MIXED, num_gpu_blocks_override=200, max_model_len=length, max_num_batched_tokens=budget)
    manager = BlockManager([None, 8], list(plan.num_blocks), 16, True, budget)
    assert [g.blocks_a_request for g in plan.groups] == [manager.peak(g, length, length) for g in (0, 1)]
    assert manager.too_small(length, length) is None


@pytest.mark.parametrize("size", [38, 50, 333, 10**4])
def test_groups_share_as_they_need(size):
    # full: one layer, 128 blocks a request; window: three layers, ceil((8 + 64) / 16) + 1 = 6
    plan = _plan(MIXED, kv_cache_memory_bytes=size * BLOCK)
    full, window = plan.groups
    assert (full.blocks_a_request, window.blocks_a_request) == (128, 6)
    assert (full.block_bytes, window.block_bytes) == (BLOCK // 4, 3 * BLOCK // 4)
    assert (full.num_blocks - 1) / 128 == pytest.approx((window.num_blocks - 1) / 6, abs=1 / 6)
    assert plan.cache_bytes <= size * BLOCK
    assert size * BLOCK - plan.cache_bytes < full.block_bytes + window.block_bytes


def test_a_default_cache_is_bounded_by_use_and_by_size():
    plan = _plan()
    assert plan.num_blocks == (1 + USEFUL * 4 * 128,)
    big = llama.spec(llama.LlamaConfig(97, 32, 64, 64, 64, 64, 128, 2**17))
    plan = _plan(big, max_num_seqs=8, max_model_len=256)
    assert DEFAULT_CACHE_BYTES - plan.groups[0].block_bytes < plan.cache_bytes <= DEFAULT_CACHE_BYTES


def test_weights_cache_and_activations_stay_under_the_fraction():
    plan = _plan()
    others = plan.total_bytes - plan.cache_bytes
    free = (others + 300 * BLOCK) / 0.9
    assert _plan(available=int(free) + 2).num_blocks == (300,)
    assert _plan(available=int(free) + 2, gpu_memory_utilization=1.0).num_blocks > (300,)
    assert _plan(available=10**12).num_blocks == plan.num_blocks
    with pytest.raises(ValueError, match=r"127 are there.*gpu_memory_utilization"):
        _plan(available=others + 128 * BLOCK, gpu_memory_utilization=1.0)
    # what is asked for exactly is not bounded
    assert _plan(available=1, kv_cache_memory_bytes=140 * BLOCK).num_blocks == (140,)


@pytest.mark.skipif("jax" not in BACKENDS, reason="of JAX")
def test_a_little_less_free_memory_gives_the_same_pools_on_a_gpu():
    """JAX's programs are compiled for their shapes, and kept for the next start."""
    arguments = {"backend": "jax", "max_num_seqs": 64, "max_num_batched_tokens": 64, "dtype": "float32"}
    arguments["gpu_memory_utilization"] = 1.0
    config = engine_config("m", **arguments).for_model(FULL, "cuda", "float32")
    others = (plan := memory_plan(config, FULL, available=10**9)).total_bytes - plan.cache_bytes

    def pool(blocks: int, **more) -> int:
        given = dataclasses.replace(config, **more)
        return memory_plan(given, FULL, available=others + blocks * BLOCK).num_blocks[0]

    assert [pool(n) for n in (200, 511, 512, 1200, 4099)] == [200, 511, 512, 1200, 4096]
    assert pool(4096 + 15) == pool(4096)
    # asked for exactly
    assert pool(4096, kv_cache_memory_bytes=4099 * BLOCK) == 4099


def test_shards_are_smaller():
    whole = _plan(num_gpu_blocks_override=129)
    divisors = {"kv_heads": 2, "mlp": 2, "vocab": 2}
    half = _plan(num_gpu_blocks_override=129, divisors=divisors)
    assert half.cache_bytes == whole.cache_bytes // 2
    assert half.weights_bytes < whole.weights_bytes
    assert half.rows_bytes == whole.rows_bytes


def test_worst_case_and_actual_are_both_there():
    plan = _plan(num_gpu_blocks_override=129)
    assert plan.worst_case_cache_bytes == 4 * 128 * BLOCK
    assert plan.full_length_requests == 1.0
    assert _plan(num_gpu_blocks_override=1 + 3 * 64).full_length_requests == 1.5


def test_activations_grow_with_budget_and_sequences():
    small = _plan(num_gpu_blocks_override=129).activations_bytes
    assert _plan(num_gpu_blocks_override=129, max_num_batched_tokens=4096).activations_bytes > small
    wide = llama.spec(llama.LlamaConfig(200_000, 32, 64, 4, 4, 2, 8, 2048))
    assert _plan(wide, num_gpu_blocks_override=129, max_num_seqs=64).activations_bytes >= 64 * 200_000 * 4


def test_a_plan_is_json():
    plan = _plan(MIXED, num_gpu_blocks_override=129)
    value = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert value["groups"][1]["window"] == 8
    assert value["max_model_len"] == 2048


def test_a_plan_needs_a_config_that_has_seen_the_model():
    with pytest.raises(ValueError, match="for_model"):
        memory_plan(engine_config("m"), FULL)


def test_available_memory_is_some_of_this_machine():
    assert 2**20 < available_memory() < 2**50


def _gpu_plan(available, total, beside=None, divisors=None, **arguments):
    config = engine_config("m", backend=BACKENDS[0], max_num_seqs=4, max_num_batched_tokens=64, **arguments)
    config = config.for_model(FULL, "cuda", "bfloat16")
    return memory_plan(config, FULL, divisors=divisors, available=available, total=total, beside=beside)


def test_on_a_gpu_the_cache_fills_its_part_of_the_card():
    """What others hold is taken off; the activations of graphs lie beside the eager ones."""
    others, probe = 4 << 20, _gpu_plan(80 << 30, 80 << 30)
    room = probe.total_bytes - probe.cache_bytes + (1 << 20)
    total = 2 * (room + others)
    plan = _gpu_plan(total - others, total, gpu_memory_utilization=0.5)
    assert plan.total_bytes <= room < plan.total_bytes + BLOCK
    eager = _gpu_plan(total - others, total, gpu_memory_utilization=0.5, enforce_eager=True)
    assert plan.activations_bytes == (2 if BACKENDS[0] == "torch" else 1) * eager.activations_bytes
    # beyond what can be of use it does not grow
    assert probe.cache_bytes < USEFUL * 4 * (2048 // 16 + 1) * BLOCK


def test_a_gpu_without_room_says_how_much_is_missing():
    with pytest.raises(ValueError, match=r"\d+ bytes too few beside \d+ of weights; no request fits"):
        _gpu_plan(1 << 20, 40 << 20)


def test_what_lies_beside_weights_is_theirs():
    """Of the shards that a device keeps; the cache has that much less."""
    asked = []

    def beside(spec, shape):
        asked.append(tuple(shape))
        return 1000 if spec.product == "tf,fe->te" else 0

    probe = _gpu_plan(80 << 30, 80 << 30)
    room = probe.total_bytes - probe.cache_bytes + 40 * BLOCK
    plain = _gpu_plan(room, room, gpu_memory_utilization=1.0, max_model_len=64)
    both = _gpu_plan(room, room, beside=beside, gpu_memory_utilization=1.0, max_model_len=64)
    assert both.weights_bytes == plain.weights_bytes + 4 * 1000
    assert both.total_bytes <= room and both.cache_bytes <= plain.cache_bytes - 4 * 1000 + BLOCK
    assert asked.count((64, 32)) == 4
    asked.clear()
    _gpu_plan(80 << 30, 80 << 30, beside=beside, divisors={"mlp": 2})
    assert asked.count((32, 32)) == 4 and (64, 32) not in asked
