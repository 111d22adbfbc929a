"""The Pallas attention kernels by themselves: in interpreters against float64, and lowered for CUDA without a GPU.

Pallas' interpreter fills what a kernel does not write with nan, and unwritten slots of the cache hold nan.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_batches import ORDERS, backend_of, expected, make_batch, make_step
from shapes import DECODE, MIXED, SHARED, Ragged
from tolerances import tolerance

from octavo.kernels_pallas import attention, mosaic_gpu, mosaic_prefill, mosaic_tpu, shared_prefix, triton_lowered
from octavo.kernels_pallas.ragged import Plan, Prefixes, Rows, Several, Tiles, longest_first, split_count
from octavo.models.interface import AttentionSpec, Step

# few sequences, so that the interpreters, which run one program after the other, are done soon
RAGGED = replace(MIXED, computed=(40, 0, 9, 130), counts=(1, 70, 1, 17))
DIMS, GROUPS, BLOCKS = (64, 80, 96, 128, 256), (1, 2, 3, 4, 5, 7, 8), (8, 16, 32)
EXTRAS: tuple[dict[str, Any], ...] = ({}, {"window": 24}, {"softcap": 2.0}, {"sinks": True})


def wide(dim: int, group_size: int, block_size: int, case: Ragged = RAGGED, **more: Any) -> Ragged:
    name = f"{dim}-{group_size}-{block_size}" + "".join(f"-{name}" for name in more)
    sizes = {"k_dim": dim, "v_dim": dim, "group_size": group_size, "block_size": block_size, "kv_heads": 1}
    return replace(case, name=name, **sizes, **more)


# every head dim, group size, block size and extra at least twice
WIDE = [wide(DIMS[i % 5], GROUPS[i % 7], BLOCKS[i % 3], **EXTRAS[i % 4]) for i in range(14)]
HALF = [wide(DIMS[i % 2 * 3], GROUPS[i % 7], BLOCKS[i % 3], **EXTRAS[i % 4]) for i in range(7)]


def rounded(batch: Any) -> Any:
    """The batch with numbers that bfloat16 has."""
    q, k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (batch.q, batch.k, batch.v))
    return replace(batch, q=q, k=k, v=v)


def run(implementation: Any, batch: Any, order: str, dtype: Any) -> np.ndarray:
    """The implementation's output, in float32."""
    q, k, v = (jnp.asarray(x, dtype) for x in (batch.q, batch.k, batch.v))
    if order == ORDERS[1]:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    step = make_step(batch, backend_of("jax", "reference"))
    sinks = None if batch.sinks is None else jnp.asarray(batch.sinks)
    out = implementation.attend(q, k, v, order, step, batch.spec, sinks, Plan(step))
    return np.asarray(out.astype(jnp.float32))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (i > 0), id=c.name) for i, c in enumerate(WIDE)]
)
def test_triton_lowered_equals_float64(case):
    batch = make_batch(case)
    out, want = run(triton_lowered, batch, ORDERS[len(case.name) % 2], jnp.float32), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    assert not out[len(want) :].any()


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 4), (4, 16)], ids=str)
def test_a_shared_prefix_is_joined_from_any_parts(parts, monkeypatch):
    """More parts than tiles of keys, and one of each, which are powers of two as well."""
    case = next(c for c in SHARED if c.name == "shared-by-groups")
    for module, count in zip((triton_lowered, shared_prefix), parts, strict=True):
        monkeypatch.setattr(module, "split_count", lambda *args, count=count: count)
    triton_lowered.decode.clear_cache()
    batch = make_batch(case)
    out = run(triton_lowered, batch, ORDERS[0], jnp.float32)
    triton_lowered.decode.clear_cache()
    np.testing.assert_allclose(out, expected(batch), rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF[1:4], ids=lambda c: c.name)
def test_mosaic_gpu_equals_float64(case):
    batch = rounded(make_batch(case))
    out, want = run(mosaic_gpu, batch, ORDERS[len(case.name) % 2], jnp.bfloat16), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("bfloat16", "attention"))
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (i > 0), id=c.name) for i, c in enumerate(WIDE)]
)
def test_mosaic_tpu_equals_float64(case):
    """Blocks arrive when they are waited for, and not before: a missing wait shows as nan."""
    batch = make_batch(case)
    out, want = run(mosaic_tpu, batch, ORDERS[len(case.name) % 2], jnp.float32), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    assert np.isfinite(out).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", [wide(64, 3, 16), wide(64, 2, 8, DECODE)], ids=lambda c: c.name)
def test_mosaic_tpu_has_no_race(case):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu

    batch = make_batch(case)
    step = make_step(batch, backend_of("jax", "reference"))
    plan, arrays = Plan(step), (jnp.asarray(x) for x in (batch.q, batch.k, batch.v))
    out = mosaic_tpu.ragged(
        *arrays, step.block_tables_SB, plan.starts_S, plan.counts_S, plan.lengths_S, None, order=ORDERS[0],
        spec=batch.spec, interpret=tpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )  # fmt: skip
    want = expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda x: next(iter(x), "plain"))
def test_mosaic_tpu_lowers_for_a_tpu(extra, dtype):
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    spec = AttentionSpec(8, 3 + len(extra), 128, 128, 0.1, extra.get("window"), extra.get("softcap"))
    order = ORDERS[len(extra)]

    def of(*shape: int, kind: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    def program(*args: Any) -> Any:
        return mosaic_tpu.ragged(*args, order=order, spec=spec)

    cache = of(64, *((16, 8) if order == ORDERS[0] else (8, 16)), 128, kind=dtype)
    q, sinks = of(32, 8, spec.group_size, 128, kind=dtype), of(8, spec.group_size, kind="float32")
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(program).trace(
            q, cache, cache, of(4, 8), *[of(4)] * 3, sinks if "sinks" in extra else None
        )  # fmt: skip
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


# what no interpreter shows: TMA moves tiles of 8 rows, so sequences begin anywhere here
ON_GPU = [
    wide(128, 4, 16, replace(MIXED, computed=(300, 0, 2000, 5, 0, 1, 130), counts=(1, 200, 1, 150, 64, 40, 0))),
    wide(64, 3, 8, replace(MIXED, computed=(0, 7, 500), counts=(2, 67, 129)), window=100, softcap=5.0, sinks=True),
    wide(128, 8, 32, replace(DECODE, computed=(0, 15, 130, 3000), counts=(1, 1, 1, 1)), sinks=True),
]


# each case in one order for every run, the orders taking turns, and in the other for long ones
IN_TURN = [
    pytest.param(
        case, ORDERS[(i + turn) % 2], marks=[pytest.mark.slow] * turn, id=f"{case.name}-{ORDERS[(i + turn) % 2]}"
    )
    for turn in range(2)
    for i, case in enumerate((*ON_GPU, *HALF))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "order"), IN_TURN)
@pytest.mark.parametrize("implementation", [mosaic_gpu, triton_lowered], ids=lambda m: m.__name__.split(".")[-1])
def test_kernels_equal_float64_on_a_gpu(implementation, case, order):
    batch = rounded(make_batch(case))
    out, want = run(implementation, batch, order, jnp.bfloat16), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("bfloat16", "attention"))
    assert not out[len(want) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [False, True])
def test_many_rows_of_all_lengths_equal_float64_on_a_gpu(decode):
    """As in a busy engine: rows that are taken by length, beside prompts that are not multiples of anything."""
    computed = tuple(17 * i % 701 for i in range(100))
    counts = tuple(37 + i if i in (40, 99) and not decode else int(i != 7) for i in range(100))
    case = wide(128, 4, 16, replace(MIXED, computed=computed, counts=counts, padding=99))
    test_kernels_equal_float64_on_a_gpu(mosaic_gpu, replace(case, name=f"busy-{decode}"), ORDERS[0])


@pytest.mark.parametrize(
    "implementation",
    [triton_lowered, pytest.param(mosaic_gpu, marks=pytest.mark.slow)],
    ids=lambda m: m.__name__.split(".")[-1],
)
def test_a_mixed_step_of_padding_alone_ends_and_is_zeros(implementation):
    """A warm-up on a GPU runs such steps."""
    batch = rounded(make_batch(wide(128, 2, 16, replace(MIXED, computed=(0, 0), counts=(1, 70), padding=60))))
    step = make_step(batch, backend_of("jax", "reference"))
    nothing = {name: getattr(step, name) * 0 for name in ("query_starts_S1", "lengths_S", "positions_T", "seq_ids_T")}
    step = replace(step, **nothing, is_real_T=step.is_real_T & False)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (batch.q, batch.k, batch.v))
    assert not np.asarray(implementation.attend(q, k, v, ORDERS[0], step, batch.spec, None, Plan(step))).any()


@pytest.mark.gpu
def test_a_mixed_step_of_padding_alone_ends_and_is_zeros_on_a_gpu():
    test_a_mixed_step_of_padding_alone_ends_and_is_zeros(mosaic_gpu)


@pytest.mark.slow
def test_mosaic_prefill_has_no_race():
    batch = rounded(make_batch(wide(64, 2, 16)))
    step = make_step(batch, backend_of("jax", "reference"))
    plan = Plan(step)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (batch.q, batch.k, batch.v))
    mosaic_prefill.prefill(
        q, k, v, step.block_tables_SB, mosaic_prefill.pairs_of(plan, 2), None, order=ORDERS[0], spec=batch.spec,
        interpret=mosaic_prefill.interpreter(detect_races=True), num_programs=2,
    ).block_until_ready()  # fmt: skip
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_parts_of_a_row_are_merged(parts):
    """More parts than tiles, too: the rest are empty."""
    batch = make_batch(wide(64, 3, 16, replace(DECODE, computed=(0, 15, 130), counts=(1, 1, 1)), window=100))
    step = make_step(batch, backend_of("jax", "reference"))
    arrays = (jnp.asarray(x) for x in (batch.q, batch.k, batch.v))
    out = triton_lowered.decode(
        *arrays, step.block_tables_SB, Plan(step).rows, None, order=ORDERS[0], spec=batch.spec, interpret=True,
        parts=parts,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected(batch), rtol=0, atol=tolerance("float32", "attention"))


def test_longer_rows_begin_first_and_equal_ones_stay():
    lengths = np.array([3, 0, 9, 3, 7, 0, 9], np.int32)
    rows = longest_first(Rows(*(jnp.asarray(x, jnp.int32) for x in (range(7), range(10, 17), lengths))))
    assert list(rows.seq_I) == [2, 6, 4, 0, 3, 1, 5]
    assert list(rows.token_I - 10) == list(rows.seq_I)
    assert list(rows.length_I) == [9, 9, 7, 3, 3, 0, 0]


@pytest.mark.parametrize("num_rows", [4, 64])
def test_rows_are_put_among_other_tokens_without_a_copy(num_rows):
    """Lowered for CUDA: the last kernel writes into what the prefill left. Few rows are merged from parts."""
    spec = AttentionSpec(8, 4, 128, 128, 0.1)

    def of(*shape: int, kind: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    q, cache, table, ids = (
        of(512, 8, 4, 128, kind="bfloat16"), of(256, 16, 8, 128, kind="bfloat16"), of(num_rows, 32), of(num_rows)
    )  # fmt: skip
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(partial(triton_lowered.decode, order=ORDERS[0], spec=spec)).trace(
            q, cache, cache, table, Rows(ids, ids, ids), None, None, Several(q, of(1))
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 1


def shared_decode(q: Any, k: Any, v: Any, table: Any, work: Any, sinks: Any, **more: Any) -> jax.Array:
    """The rows of a step in which sequences share prefixes."""
    rows, prefixes = work
    return triton_lowered.decode(q, k, v, table, rows, sinks, prefixes, **more)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[1], [4000, 0, 0, 7], [300] * 8, [0, 0]], ids=str)
def test_work_covers_the_keys_of_each_row_once(lengths, window):
    """By brute force. As many parts as fill the device with the rows that are there."""
    heads, tile, most = 8, 64, 64
    work = triton_lowered.Work(
        *map(np.asarray, triton_lowered.work_of(jnp.asarray(lengths), window, heads, tile, most))
    )
    seen = [np.zeros(n, int) for n in lengths]
    for row, part in zip(work.row_W, work.part_W, strict=True):
        low = max(lengths[row] - (window or 9999), 0) // tile * tile + part * work.share_I[row]
        assert (low >= lengths[row]) == (part == most)
        seen[row][low : low + work.share_I[row]] += 1
    for length, count, used in zip(lengths, seen, work.used_I, strict=True):
        assert (count[-min(length, window or length) :] == 1).all()
        assert used <= 512 / heads / max(np.count_nonzero(lengths), 1)
    assert (work.share_I % tile == 0).all()


def lower(dim: int, group_size: int, order: str, dtype: str, extra: dict[str, Any], kernel: str) -> str:
    """The program of one kernel, lowered for CUDA."""
    spec = AttentionSpec(8, group_size, dim, dim, dim**-0.5, extra.get("window"), extra.get("softcap"))

    def of(*shape: int, kind: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    cache = of(256, *((16, 8) if order == ORDERS[0] else (8, 16)), dim, kind=dtype)
    sinks = of(8, group_size, kind="float32") if "sinks" in extra else None
    q, table, ids = of(512, 8, group_size, dim, kind=dtype), of(64, 32), of(64)
    work, function = {
        "decode": (Rows(*[ids] * 3), triton_lowered.decode),
        "shared": ((Rows(*[ids] * 3), Prefixes(of(10, 32), of(10), ids, ids)), shared_decode),
        "prefill": (Tiles(*[ids] * 4, of(1)), triton_lowered.prefill),
        "mosaic": (mosaic_prefill.Pairs(*[ids] * 5, of(1)), mosaic_prefill.prefill),
    }[kernel]

    def program(*args: Any) -> Any:
        return function(*args, order=order, spec=spec)

    # a newer JAX asks which card it lowers for
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(program).trace(q, cache, cache, table, work, sinks)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda x: next(iter(x), "plain"))
@pytest.mark.parametrize("dim", DIMS)
def test_kernels_lower_for_cuda(dim, extra):
    """What an interpreter lets pass and a lowering does not: sides that are no power of two, layouts, ops."""
    order, group_size = ORDERS[len(extra)], GROUPS[dim % 7]
    assert "triton" in lower(dim, group_size, order, "bfloat16", extra, "decode")
    assert "triton" in lower(dim, group_size, order, "float32", extra, "prefill")
    if "window" not in extra:
        assert "shared_prefix_join" in lower(dim, group_size, order, "bfloat16", extra, "shared")
    if dim in mosaic_gpu.DIMS and mosaic_gpu.LOWERS:
        assert "mosaic_gpu" in lower(dim, group_size, order, "bfloat16", extra, "mosaic")


@pytest.mark.parametrize("group_size", GROUPS)
def test_pairs_cover_every_token_of_every_head_once(group_size):
    """Units of 64 tokens, each beginning at a multiple of 8, by brute force."""
    counts = np.array([1, 64, 0, 65, 2, 200, 1, 63])
    starts = np.concatenate([[0], np.cumsum(counts)])
    step = Step(*[jnp.zeros(1)] * 6, *[jnp.asarray(x, jnp.int32) for x in (counts + 5, starts)], jnp.zeros(1), False,
                {}, {})  # fmt: skip
    step = replace(step, seq_ids_T=jnp.asarray(np.repeat(np.arange(8), counts)))
    pairs, num_tokens = mosaic_prefill.pairs_of(Plan(step), group_size), -(-int(starts[-1]) // 8) * 8
    assert pairs.count_1[0] <= len(pairs.seq_W)
    seen = np.zeros((num_tokens, group_size), int)
    for seq, first in zip(pairs.seq_W[: pairs.count_1[0]], pairs.unit_W, strict=False):
        start, count, length = (int(x[seq]) for x in (pairs.starts_S, pairs.counts_S, pairs.lengths_S))
        for at in (first, first + 1):
            unit = mosaic_prefill.unit_of(at, start, jnp.int32(count), length, group_size, 128, num_tokens)
            assert unit.token % 8 == 0
            rows = np.arange(int(unit.low), int(unit.high)) if unit.tiles else np.arange(0)
            assert (unit.position + rows == length - count + unit.token + rows - start).all()
            assert ((unit.token + rows >= start) & (unit.token + rows < start + count)).all()
            seen[int(unit.token) + rows, int(unit.group)] += 1
    several, seen = np.repeat(counts > 1, counts), seen[: starts[-1]]
    assert (seen[several] == 1).all()
    assert (seen[~several] == 0).all()


@pytest.mark.slow
def test_layers_as_programs_make_the_same_tokens():
    """Two cache groups, so two plans; the engine's own attention traces each layer by itself."""
    from tiny import GREEDY, PROMPTS, engine, tokens

    want = tokens(engine(backend="jax"), PROMPTS[:3], GREEDY)
    assert tokens(engine(backend="jax", attention="triton_lowered"), PROMPTS[:3], GREEDY) == want


def test_split_count_fills_the_device():
    assert [split_count(n, 8) for n in (1, 8, 16, 64, 256)] == [64, 8, 4, 1, 1]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mosaic_gpu", {"dtype": "float32"}, "16|bfloat16"),
        ("mosaic_gpu", {"k_dim": 80}, "head dims of 64 and 128"),
        ("mosaic_gpu", {"block_size": 12}, "blocks of 12"),
        ("mosaic_gpu", {"platform": "tpu"}, "not for tpu"),
        ("mosaic_tpu", {"platform": "gpu"}, "not for gpu"),
        ("mosaic_tpu", {"platform": "tpu", "k_dim": 64}, "64 and 128"),
        ("mosaic_tpu", {"block_size": 256}, "256"),
        ("triton_lowered", {"mode": "auto"}, "shard"),
        ("triton_lowered", {"dtype": "int8"}, "int8"),
        ("triton_lowered", {"k_dim": 512}, "512"),
    ],
)
def test_what_a_kernel_does_not_serve_has_a_reason(name, changes, why):
    asked = {"k_dim": 128, "dtype": "bfloat16", "platform": "cpu", "mode": "local", "block_size": 16} | changes
    spec = AttentionSpec(8, 4, asked.pop("k_dim"), 128, 1.0)
    supports = attention.IMPLEMENTATIONS[name].supports
    assert supports(spec=replace(spec, k_dim=128), **(asked | {"dtype": "bfloat16", "platform": "cpu", "mode": "local",
                                                              "block_size": 16})) is None  # fmt: skip
    import re

    assert re.search(why, supports(spec=spec, **asked))
