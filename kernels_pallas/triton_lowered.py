"""Paged attention in Pallas, lowered through Triton: for GPUs that Mosaic GPU does not serve, until JAX drops Triton.

Two kernels and a merge. Decode: a program takes one sequence, one kv head (all its query heads are rows of one product)
and one part of the keys. Prefill: a program takes a tile of queries of one sequence, again with all heads of a kv head.
Letters: M rows of a product (query x head), N keys of a tile, D padded to a power of two in registers only.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .ragged import HIDDEN, LOG2_E, Plan, Rows, Tiles, split_count

ORDERS = ("n p k d", "n k p d")
FAR = 1 << 30  # a window that hides nothing
CACHES = ("float32", "bfloat16", "float16")


class Sizes(NamedTuple):
    """How a kernel is cut and launched."""

    rows: int  # M
    keys: int  # N
    warps: int
    stages: int


def supports(spec: Any, dtype: str, platform: str, mode: str, block_size: int) -> str | None:
    """Why it cannot serve, or None. On a CPU it runs in Pallas' interpreter, when named."""
    if platform not in ("gpu", "cpu"):
        return f"it is for GPUs, not for {platform}"
    if dtype not in CACHES:
        return f"it wants a cache of {', '.join(CACHES)}, not {dtype}"
    if mode == "auto":
        return "the compiler cannot shard a kernel"
    if max(spec.k_dim, spec.v_dim) > 256:
        return f"a head dim of {max(spec.k_dim, spec.v_dim)} does not fit a tile; 256 does"
    return None


def attend(
    q_TKGD: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks_KG: Any, plan: Plan
) -> jax.Array:
    """softmax(scale q k^T + mask) v, each query over its sequence's keys up to itself; [T, K, G, Dv].

    Reference: reference.py. Tolerance: 1e-5 absolute in float32, 2e-2 in bfloat16, for inputs of unit variance.
    """
    interpret = jax.default_backend() == "cpu"
    table = step.block_tables_SB
    single = decode(q_TKGD, k, v, table, plan.rows, sinks_KG, order=order, spec=spec, interpret=interpret)
    if plan.decode:
        return plan.join(single, None)
    sizes = prefill_sizes(spec, k.dtype.itemsize)
    tiles = plan.tiles(sizes.rows // spec.group_size)
    several = prefill(q_TKGD, k, v, table, tiles, sinks_KG, order=order, spec=spec, interpret=interpret)
    return plan.join(single, several)


def prepare(plan: Plan, spec: Any, itemsize: int) -> None:
    """Has the plan make what layers of this spec will ask of it."""
    if not plan.decode:
        plan.tiles(prefill_sizes(spec, itemsize).rows // spec.group_size)


def decode_sizes(spec: Any, itemsize: int) -> Sizes:
    """Of the decode kernel: bound by memory, so what counts is how many loads are in flight."""
    wide = power_of_two(spec.k_dim) * itemsize
    rows = max(16, power_of_two(spec.group_size))
    # measured on an H200 at 256 bytes a key; wider keys want fewer at a time for the same loads in flight
    return Sizes(rows, 64, 2, 3) if wide <= 256 else Sizes(rows, 32 if wide <= 512 else 16, 4, 3)


def prefill_sizes(spec: Any, itemsize: int) -> Sizes:
    """Of the prefill kernel: bound by products, so tiles are as large as registers and shared memory allow."""
    wide = power_of_two(max(spec.k_dim, spec.v_dim)) * itemsize
    if itemsize == 4:
        return Sizes(max(32, power_of_two(spec.group_size)), 32 if wide <= 512 else 16, 4, 2)
    rows = max(128, power_of_two(spec.group_size))
    return Sizes(rows, 128 if wide <= 256 else 32, 8, 2)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16: the least side of a product."""
    return max(16, 1 << (n - 1).bit_length())


class Keys(NamedTuple):
    """Where a program's keys and values are."""

    k_ref: Any
    v_ref: Any
    table_ref: Any
    order: str
    seq: jax.Array
    head: jax.Array

    def load(self, ref: Any, dim: int, key_N: jax.Array, seen_N: jax.Array | None) -> jax.Array:
        """[N, D] rows of the cache, zeros where not seen (None: all are) and beyond `dim`."""
        size = self.k_ref.shape[self.order.split().index("p")]
        other = None if seen_N is None else 0
        block_N = plt.load(self.table_ref.at[self.seq, key_N // size], mask=seen_N, other=other)
        d_D = jnp.arange(power_of_two(dim))
        at = {"n": block_N[:, None], "p": (key_N % size)[:, None], "k": self.head, "d": d_D[None, :]}
        return load(ref.at[tuple(at[a] for a in self.order.split())], seen_N, d_D, dim, key_N.shape[0])


def load(ref: Any, seen_N: jax.Array | None, d_D: jax.Array, dim: int, rows: int) -> jax.Array:
    """[N, D], zeros where a row is not seen or a column is none; without a mask where none is needed."""
    if seen_N is None and d_D.shape[0] == dim:
        return plt.load(ref)
    return plt.load(ref, mask=mask_of(seen_N, d_D, dim, rows), other=0.0)


def mask_of(seen_N: jax.Array | None, d_D: jax.Array, dim: int, rows: int) -> jax.Array:
    column_ND = jnp.broadcast_to((d_D < dim)[None, :], (rows, d_D.shape[0]))
    return column_ND if seen_N is None else jnp.broadcast_to(seen_N[:, None], column_ND.shape) & column_ND


def product(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """a @ b in float32; float32 operands are not rounded on the way."""
    return plt.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def attend_tile(carry: tuple, q_MD: jax.Array, keys: Keys, spec: Any, key_N: jax.Array, seen: Any) -> tuple:
    """One step of the running maximum and sum (arXiv:2205.14135). `seen` is None or (of keys [N], of scores [M, N])."""
    top_M, sum_M, out_MD = carry
    seen_N, seen_MN = seen or (None, None)
    k_ND = keys.load(keys.k_ref, spec.k_dim, key_N, seen_N)
    v_ND = keys.load(keys.v_ref, spec.v_dim, key_N, seen_N)
    scores_MN = product(q_MD, k_ND, trans_b=True)
    if spec.softcap is None:
        scores_MN = scores_MN * (spec.scale * LOG2_E)
    else:
        scores_MN = jnp.tanh(scores_MN * (spec.scale / spec.softcap)) * (spec.softcap * LOG2_E)
    if seen_MN is not None:
        scores_MN = jnp.where(seen_MN, scores_MN, HIDDEN)
    new_M = jnp.maximum(top_M, scores_MN.max(axis=1))
    shrink_M, weight_MN = jnp.exp2(top_M - new_M), jnp.exp2(scores_MN - new_M[:, None])
    added_MD = product(weight_MN.astype(v_ND.dtype), v_ND)
    return new_M, sum_M * shrink_M + weight_MN.sum(axis=1), out_MD * shrink_M[:, None] + added_MD


def start(rows: int, v_dim: int, sink_M: jax.Array | None) -> tuple:
    """Maximum, sum and output before the first key; a sink is a key without a value."""
    out_MD = jnp.zeros((rows, power_of_two(v_dim)), jnp.float32)
    if sink_M is None:
        return jnp.full((rows,), HIDDEN, jnp.float32), jnp.zeros((rows,), jnp.float32), out_MD
    return sink_M.astype(jnp.float32) * LOG2_E, jnp.ones((rows,), jnp.float32), out_MD


def decode_kernel(*refs: Any, spec: Any, order: str, sizes: Sizes, parts: int, sinks: bool) -> None:
    """One row, one kv head, one part of the keys: a partial output, with its maximum and sum if there are parts."""
    q_ref, k_ref, v_ref, table_ref, seq_ref, token_ref, length_ref = refs[:7]
    sinks_ref, outs = (refs[7], refs[8:]) if sinks else (None, refs[7:])
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    token, length, n = token_ref[row], length_ref[row], sizes.keys
    group_M, d_D = jnp.arange(sizes.rows), jnp.arange(power_of_two(spec.k_dim))
    real_M = group_M < spec.group_size
    q_MD = load(q_ref.at[token, head, group_M[:, None], d_D[None, :]], real_M, d_D, spec.k_dim, sizes.rows)
    keys = Keys(k_ref, v_ref, table_ref, order, seq_ref[row], head)
    oldest = jnp.maximum(length - (spec.window or FAR), 0)
    # parts begin at whole tiles, so that only the first and the last tile of a row need masks
    base = oldest // n * n
    share = pl.cdiv(pl.cdiv(length - base, parts), n) * n
    low = base + part * share
    high = jnp.minimum(low + share, length)

    def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
        key_N = low + j * n + jnp.arange(n)
        seen_N = (key_N < high) & (key_N >= oldest)
        seen = (seen_N, jnp.broadcast_to(seen_N[None, :], (sizes.rows, n))) if masked else None
        return attend_tile(carry, q_MD, keys, spec, key_N, seen)

    sink_M = None
    if sinks_ref is not None:
        sink_M = plt.load(sinks_ref.at[head, group_M], mask=real_M, other=0.0)
        # the sink counts once: in the first part
        sink_M = jnp.where(part == 0, sink_M.astype(jnp.float32), HIDDEN)
    carry = start(sizes.rows, spec.v_dim, sink_M)
    if sinks_ref is not None:
        carry = carry[0], jnp.where(part == 0, carry[1], 0.0), carry[2]
    whole = 0 if spec.window else jnp.maximum(high - low, 0) // n
    carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(whole, pl.cdiv(jnp.maximum(high - low, 0), n), functools.partial(step, masked=True), carry)
    top_M, sum_M, out_MD = carry
    dv_D = jnp.arange(power_of_two(spec.v_dim))
    mask_MD = mask_of(real_M, dv_D, spec.v_dim, sizes.rows)
    if parts == 1:
        out_MD = out_MD / jnp.where(sum_M > 0, sum_M, 1.0)[:, None]
        out_ref = outs[0].at[row, head, group_M[:, None], dv_D[None, :]]
        plt.store(out_ref, out_MD.astype(outs[0].dtype), mask=mask_MD)
        return
    plt.store(outs[0].at[row, head, part, group_M[:, None], dv_D[None, :]], out_MD, mask=mask_MD)
    plt.store(outs[1].at[row, head, part, group_M], top_M, mask=real_M)
    plt.store(outs[2].at[row, head, part, group_M], sum_M, mask=real_M)


def merge_kernel(part_ref: Any, top_ref: Any, sum_ref: Any, out_ref: Any, *, v_dim: int) -> None:
    """The parts of one row, kv head and query head made one, by their maxima and sums."""
    row, head, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    part_C, dv_D = jnp.arange(top_ref.shape[2]), jnp.arange(power_of_two(v_dim))
    top_C = plt.load(top_ref.at[row, head, part_C, group])
    weight_C = jnp.exp2(top_C - jnp.max(top_C, axis=0))
    total = jnp.sum(plt.load(sum_ref.at[row, head, part_C, group]) * weight_C, axis=0)
    at = part_ref.at[row, head, part_C[:, None], group, dv_D[None, :]]
    out_CD = load(at, None, dv_D, v_dim, part_C.shape[0])
    out_D = jnp.sum(out_CD * weight_C[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    plt.store(out_ref.at[row, head, group, dv_D], out_D.astype(out_ref.dtype), mask=dv_D < v_dim)


# programs of their own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret", "sizes", "parts"))
def decode(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_SB: jax.Array,
    rows: Rows,
    sinks_KG: jax.Array | None,
    *,
    order: str,
    spec: Any,
    interpret: bool = False,
    sizes: Sizes | None = None,
    parts: int | None = None,
) -> jax.Array:
    """Outputs of the rows, [I, K, G, Dv]; zeros where a row is none."""
    num_rows, (num_heads, groups) = rows.seq_I.shape[0], q_TKGD.shape[1:3]
    sizes = sizes or decode_sizes(spec, k.dtype.itemsize)
    parts = parts or split_count(num_rows, num_heads)
    shape = (num_rows, num_heads, groups, spec.v_dim)
    out: Any = jax.ShapeDtypeStruct(shape, q_TKGD.dtype)
    if parts > 1:
        some = (num_rows, num_heads, parts, groups)
        out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*some, spec.v_dim), some, some)]
    kernel = functools.partial(
        decode_kernel, spec=spec, order=order, sizes=sizes, parts=parts, sinks=sinks_KG is not None
    )
    arguments = [q_TKGD, k, v, table_SB, *rows] + ([] if sinks_KG is None else [sinks_KG])
    out = pl.pallas_call(
        kernel,
        grid=(num_rows, num_heads, parts),
        out_shape=out,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="paged_decode",
    )(*arguments)
    if parts == 1:
        return out
    return pl.pallas_call(
        functools.partial(merge_kernel, v_dim=spec.v_dim),
        grid=(num_rows, num_heads, groups),
        out_shape=jax.ShapeDtypeStruct(shape, q_TKGD.dtype),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="paged_decode_merge",
    )(*out)


def prefill_kernel(*refs: Any, spec: Any, order: str, sizes: Sizes, queries: int, sinks: bool) -> None:
    """One tile of queries and one kv head."""
    q_ref, k_ref, v_ref, table_ref, seq_ref, start_ref, end_ref, position_ref = refs[:8]
    sinks_ref, out_ref = (refs[8], refs[9]) if sinks else (None, refs[8])
    tile, head, groups, n = pl.program_id(0), pl.program_id(1), spec.group_size, sizes.keys
    first, count, position = start_ref[tile], end_ref[tile] - start_ref[tile], position_ref[tile]
    row_M, d_D = jnp.arange(sizes.rows), jnp.arange(power_of_two(spec.k_dim))
    query_M, group_M = row_M // groups, row_M % groups
    real_M = (query_M < count) & (query_M < queries)
    # where masked, past the end: the interpreter writes a masked element back, which must not meet a real one
    token_M = jnp.where(real_M, first + query_M, q_ref.shape[0])
    position_M = position + query_M
    at = q_ref.at[token_M[:, None], head, group_M[:, None], d_D[None, :]]
    q_MD = load(at, real_M, d_D, spec.k_dim, sizes.rows)
    keys = Keys(k_ref, v_ref, table_ref, order, seq_ref[tile], head)
    last = jnp.where(count > 0, position + jnp.minimum(count, queries), 0)
    oldest = jnp.maximum(position + 1 - (spec.window or FAR), 0)

    def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
        key_N = j * n + jnp.arange(n)
        if not masked:
            return attend_tile(carry, q_MD, keys, spec, key_N, None)
        seen_N = (key_N < last) & (key_N >= oldest)
        behind_MN = position_M[:, None] - key_N[None, :]
        seen_MN = (behind_MN >= 0) & (behind_MN < (spec.window or FAR)) & seen_N[None, :]
        return attend_tile(carry, q_MD, keys, spec, key_N, (seen_N, seen_MN))

    sink_M = None if sinks_ref is None else plt.load(sinks_ref.at[head, group_M])
    carry = start(sizes.rows, spec.v_dim, sink_M)
    # tiles that every query sees whole need no mask
    whole = oldest // n if spec.window else jnp.minimum(position + 1, last) // n
    if not spec.window:
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    _, sum_M, out_MD = lax.fori_loop(whole, pl.cdiv(last, n), functools.partial(step, masked=True), carry)
    dv_D = jnp.arange(power_of_two(spec.v_dim))
    out_MD = (out_MD / jnp.where(sum_M > 0, sum_M, 1.0)[:, None]).astype(out_ref.dtype)
    at = out_ref.at[token_M[:, None], head, group_M[:, None], dv_D[None, :]]
    plt.store(at, out_MD, mask=mask_of(real_M, dv_D, spec.v_dim, sizes.rows))


@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret", "sizes"))
def prefill(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_SB: jax.Array,
    tiles: Tiles,
    sinks_KG: jax.Array | None,
    *,
    order: str,
    spec: Any,
    interpret: bool = False,
    sizes: Sizes | None = None,
) -> jax.Array:
    """Outputs of the tiles' queries, [T, K, G, Dv]. What belongs to no tile is not written. Tiles: of M / G queries."""
    sizes = sizes or prefill_sizes(spec, k.dtype.itemsize)
    kernel = functools.partial(
        prefill_kernel,
        spec=spec,
        order=order,
        sizes=sizes,
        queries=sizes.rows // spec.group_size,
        sinks=sinks_KG is not None,
    )
    arguments = [q_TKGD, k, v, table_SB, *tiles[:4]] + ([] if sinks_KG is None else [sinks_KG])
    return pl.pallas_call(
        kernel,
        grid=(tiles.seq_W.shape[0], q_TKGD.shape[1]),
        out_shape=jax.ShapeDtypeStruct((*q_TKGD.shape[:3], spec.v_dim), q_TKGD.dtype),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="paged_prefill",
    )(*arguments)
