"""Paged attention in Pallas, lowered through Triton: for GPUs that Mosaic GPU does not serve, until JAX drops Triton.

Two kernels and a merge. Decode: a program takes one sequence, one kv head (all its query heads are rows of one product)
and one part of the keys. Prefill: a program takes a tile of queries of one sequence, again with all heads of a kv head.
Letters as in triton_tiles.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from . import shared_prefix
from .ragged import FILL, Plan, Prefixes, Rows, Several, Tiles, split_count
from .reference import FAR, HIDDEN
from .triton_tiles import (
    CACHES,
    Keys,
    Sizes,
    attend_tile,
    clear_padding,
    decode_sizes,
    load,
    mask_of,
    over_last,
    power_of_two,
    prefill_sizes,
    put_row,
    start,
)

FEW = 8  # rows of a step up to which it counts how many there really are


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
    several = None
    if not plan.decode:
        sizes = prefill_sizes(spec, k.dtype.itemsize)
        tiles = plan.tiles(sizes.rows // spec.group_size)
        out = prefill(q_TKGD, k, v, table, tiles, sinks_KG, order=order, spec=spec, interpret=interpret)
        several = Several(out, plan.end_1)
    return decode(
        q_TKGD, k, v, table, plan.rows, sinks_KG, plan.prefixes, several, order=order, spec=spec, interpret=interpret
    )


def prepare(plan: Plan, spec: Any, itemsize: int) -> None:
    """Has the plan make what layers of this spec will ask of it."""
    if not plan.decode:
        plan.tiles(prefill_sizes(spec, itemsize).rows // spec.group_size)


class Inputs(NamedTuple):
    """What decode_kernel reads: arrays, or references to them; None where a step has no such thing."""

    q_TKGD: Any
    k: Any
    v: Any
    table_SB: Any
    rows: Rows
    prefix_I: Any  # keys that a row shares with others: shared_prefix.py attends to those
    work: Any  # which row and part each program has, and each row's share: the first three of a Work
    sinks_KG: Any
    placed: Any  # (tokens that are real, outputs of others among which these are put)


def decode_kernel(read: Inputs, *outs: Any, spec: Any, order: str, sizes: Sizes, parts: int) -> None:
    """One row, one kv head, one part of the keys: an output, or a partial one with its maximum and sum to be joined."""
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    if read.work is not None:
        row, part = read.work[0][row], read.work[1][row]
    length = read.rows.length_I[row]
    group_M, (d_D, dv_D) = jnp.arange(sizes.rows), (jnp.arange(power_of_two(d)) for d in (spec.k_dim, spec.v_dim))
    grouped_M = group_M < spec.group_size

    def put(at: jax.Array, out_MD: jax.Array) -> None:
        ref = outs[0].at[at, head, group_M[:, None], dv_D[None, :]]
        plt.store(ref, out_MD.astype(outs[0].dtype), mask=mask_of(grouped_M, dv_D, spec.v_dim, sizes.rows))

    def attend_row() -> None:
        token = read.rows.token_I[row]
        keys = Keys(read.k, read.v, read.table_SB, order, read.rows.seq_I[row], head)
        low, share, oldest = share_of(read, row, part, length, spec.window, sizes.keys, parts)
        real_M = grouped_M if read.work is None else grouped_M & (low < length)
        q_MD = load(read.q_TKGD.at[token, head, group_M[:, None], d_D[None, :]], real_M, d_D, spec.k_dim, sizes.rows)
        high = jnp.minimum(low + share, length)
        sinks = read.sinks_KG
        sink_M = None if sinks is None else plt.load(sinks.at[head, group_M], mask=real_M, other=0.0)
        carry = start_part(part, sizes.rows, spec.v_dim, sink_M)
        top_M, sum_M, out_MD = attend_keys(carry, q_MD, keys, spec, low, high, oldest, sizes.keys)
        if len(outs) == 1:
            put(token, out_MD / jnp.where(sum_M > 0, sum_M, 1.0)[:, None])
            return
        mask_MD = mask_of(real_M, dv_D, spec.v_dim, sizes.rows)
        plt.store(outs[0].at[row, head, part, group_M[:, None], dv_D[None, :]], out_MD, mask=mask_MD)
        plt.store(outs[1].at[row, head, part, group_M], top_M, mask=real_M)
        plt.store(outs[2].at[row, head, part, group_M], sum_M, mask=real_M)

    if read.placed is None:
        attend_row()
        return
    zeros_MD = jnp.zeros((sizes.rows, dv_D.shape[0]), jnp.float32)
    clear_padding(read.placed[0], outs[0].shape[0], row, pl.num_programs(0), lambda token: put(token, zeros_MD))
    pl.when(length > 0)(attend_row)


def share_of(
    read: Inputs, row: jax.Array, part: jax.Array, length: jax.Array, window: int | None, n: int, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first key of a part, how many keys a part of that row has, the first key that the row sees)."""
    oldest = jnp.maximum(length - window, 0) if window else jnp.int32(0)
    # parts begin at whole tiles, so that only the first and the last tile of a row need masks
    base = oldest // n * n
    if read.prefix_I is not None:
        base = oldest = read.prefix_I[row]
    share = pl.cdiv(pl.cdiv(length - base, parts), n) * n if read.work is None else read.work[2][row]
    # what is alone begins without knowing how long it is
    return base if parts == 1 else base + part * share, share, oldest


def start_part(part: jax.Array, rows: int, v_dim: int, sink_M: jax.Array | None) -> tuple:
    """Maximum, sum and output before the first key of a part; a sink counts once, in the first part."""
    if sink_M is None:
        return start(rows, v_dim, None)
    top_M, sum_M, out_MD = start(rows, v_dim, jnp.where(part == 0, sink_M.astype(jnp.float32), HIDDEN))
    return top_M, jnp.where(part == 0, sum_M, 0.0), out_MD


def attend_keys(
    carry: tuple, q_MD: jax.Array, keys: Keys, spec: Any, low: jax.Array, high: jax.Array, oldest: jax.Array, n: int
) -> tuple:
    """Folds in the keys from `low` to `high`, in tiles of n; of those, the ones before `oldest` are not seen."""

    def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
        key_N = low + j * n + jnp.arange(n)
        if not masked:
            return attend_tile(carry, q_MD, keys, spec, key_N, None)
        seen_N = (key_N < high) & (key_N >= oldest)
        seen_MN = jnp.broadcast_to(seen_N[None, :], (q_MD.shape[0], n))
        return attend_tile(carry, q_MD, keys, spec, key_N, (seen_N, seen_MN))

    count = jnp.maximum(high - low, 0)
    whole = 0 if spec.window else count // n
    carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    return lax.fori_loop(whole, pl.cdiv(count, n), functools.partial(step, masked=True), carry)


def merge_kernel(partial: Any, used_ref: Any, token_ref: Any, others: Any, out_ref: Any, *, v_dim: int) -> None:
    """The parts of one row, kv head and query head made one, by their maxima and sums. `used_ref`: how many of a row's
    parts there are, None if all; `others`: as put_row takes them."""
    part_ref, top_ref, sum_ref = partial
    row, head, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    part_C, dv_D = jnp.arange(top_ref.shape[2]), jnp.arange(power_of_two(v_dim))

    def merged() -> jax.Array:
        used_C = None if used_ref is None else part_C < used_ref[row]
        top_C, sum_C = (
            plt.load(ref.at[row, head, part_C, group], mask=used_C, other=None if used_C is None else other)
            for ref, other in ((top_ref, HIDDEN), (sum_ref, 0.0))
        )
        weight_C = jnp.exp2(top_C - jnp.max(top_C, axis=0))
        total = jnp.sum(sum_C * weight_C, axis=0)
        at = part_ref.at[row, head, part_C[:, None], group, dv_D[None, :]]
        out_CD = load(at, used_C, dv_D, v_dim, part_C.shape[0])
        return jnp.sum(out_CD * weight_C[:, None], axis=0) / jnp.where(total > 0, total, 1.0)

    put_row(out_ref, token_ref, others, merged, v_dim)


class Work(NamedTuple):
    """What the programs of a step of few rows do: as many parts as the rows that are there need to fill the device."""

    row_W: jax.Array
    part_W: jax.Array  # one past the last that there can be, where a program has nothing to do
    share_I: jax.Array  # keys of a part of that row: whole tiles
    used_I: jax.Array  # parts of that row, none of them empty


def work_of(length_I: jax.Array, window: int | None, num_heads: int, n: int, most: int) -> Work:
    """The work of rows with so many keys, in at most `most` parts each."""
    oldest_I = jnp.maximum(length_I - (window or FAR), 0)
    keys_I = length_I - oldest_I // n * n
    rows = jnp.maximum((length_I > 0).sum(dtype=jnp.int32), 1)
    parts = jnp.clip(FILL // (rows * num_heads), 1, most)
    share_I = jnp.maximum(pl.cdiv(pl.cdiv(keys_I, parts), n), 1) * n
    used_I = pl.cdiv(keys_I, share_I)
    row_I = jnp.arange(length_I.shape[0], dtype=jnp.int32)
    end_I = jnp.where(row_I[None] <= row_I[:, None], used_I[None], 0).sum(-1, dtype=jnp.int32)
    work_W = jnp.arange(max(FILL // num_heads, len(row_I)), dtype=jnp.int32)
    row_W = jnp.minimum((work_W[:, None] >= end_I[None]).sum(-1, dtype=jnp.int32), len(row_I) - 1)
    part_W = jnp.where(work_W < end_I[-1], work_W - (end_I - used_I)[row_W], most)
    return Work(row_W, *(x.astype(jnp.int32) for x in (part_W, share_I, used_I)))


# programs of their own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret", "parts"))
def decode(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_SB: jax.Array,
    rows: Rows,
    sinks_KG: jax.Array | None,
    prefixes: Prefixes | None = None,
    several: Several | None = None,
    *,
    order: str,
    spec: Any,
    interpret: bool = False,
    parts: int | None = None,
) -> jax.Array:
    """Outputs of the rows at their tokens, [T, K, G, Dv]; zeros where a row is none. `prefixes` are read once for all.

    Without `several` every token is a row's. With it, which is consumed, padding is zeros.
    """
    num_rows, num_heads = rows.seq_I.shape[0], q_TKGD.shape[1]
    sizes = decode_sizes(spec, k.dtype.itemsize)
    # a step of few rows may have one alone, whose keys are to keep the whole device busy
    few = parts is None and prefixes is None and num_rows <= FEW
    parts = parts or split_count(1 if few else num_rows, num_heads)
    work = work_of(rows.length_I, spec.window, num_heads, sizes.keys, parts) if few and parts > 1 else None
    joined = parts > 1 or prefixes is not None
    read = Inputs(
        q_TKGD, k, v, table_SB, rows, None if prefixes is None else prefixes.length_I,
        None if work is None else work[:3], sinks_KG,
        None if joined or several is None else (several.end_1, several.out_TKGD),
    )  # fmt: skip
    out = launch_decode(read, joined, spec=spec, order=order, sizes=sizes, parts=parts, interpret=interpret)
    if not joined:
        return out
    final = jax.ShapeDtypeStruct((*q_TKGD.shape[:3], spec.v_dim), q_TKGD.dtype)
    others = None if several is None else (rows.length_I, several.end_1, several.out_TKGD)
    if prefixes is not None:
        once = shared_prefix.attend(q_TKGD, k, v, table_SB, prefixes, order=order, spec=spec, interpret=interpret)
        shared = rows.seq_I, prefixes.length_I
        return shared_prefix.join(out, once, shared, rows.token_I, others, final, interpret=interpret)
    return merge(out, None if work is None else work.used_I, rows.token_I, others, final, interpret=interpret)


def launch_decode(
    read: Inputs, joined: bool, *, spec: Any, order: str, sizes: Sizes, parts: int, interpret: bool
) -> Any:
    """Outputs of the rows; if they are to be `joined`, those of C parts each, [I, K, C, G, Dv], not yet divided, and
    maxima and sums, [I, K, C, G]."""
    num_rows, num_heads, groups = read.rows.seq_I.shape[0], *read.q_TKGD.shape[1:3]
    out: Any = jax.ShapeDtypeStruct((*read.q_TKGD.shape[:3], spec.v_dim), read.q_TKGD.dtype)
    if joined:
        some = (num_rows, num_heads, parts, groups)
        out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*some, spec.v_dim), some, some)]
    return pl.pallas_call(
        functools.partial(decode_kernel, spec=spec, order=order, sizes=sizes, parts=parts),
        grid=(num_rows, num_heads, parts) if read.work is None else (read.work[0].shape[0], num_heads, 1),
        out_shape=out,
        input_output_aliases={} if read.placed is None else over_last(read),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="paged_decode",
    )(read)


def merge(
    partial: list[jax.Array], used_I: jax.Array | None, token_I: jax.Array, others: Any, out: jax.ShapeDtypeStruct,
    *, interpret: bool,
) -> jax.Array:  # fmt: skip
    """The parts of each row made one; `out` at their tokens, among the last of `others` if there are."""
    arguments = (partial, used_I, token_I, others)
    num_rows, num_heads, _, groups = partial[1].shape
    return pl.pallas_call(
        functools.partial(merge_kernel, v_dim=out.shape[-1]),
        grid=(num_rows, num_heads, groups),
        out_shape=out,
        input_output_aliases={} if others is None else over_last(arguments),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="paged_decode_merge",
    )(*arguments)


def prefill_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, tiles: Any, sinks_ref: Any, out_ref: Any,
    *, spec: Any, order: str, sizes: Sizes, queries: int,
) -> None:  # fmt: skip
    """One tile of queries and one kv head. `tiles`: of a Tiles all but their count; `sinks_ref`: None without sinks."""
    seq_ref, start_ref, end_ref, position_ref = tiles
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


@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret"))
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
) -> jax.Array:
    """Outputs of the tiles' queries, [T, K, G, Dv]. What belongs to no tile is not written. Tiles: of M / G queries."""
    sizes = prefill_sizes(spec, k.dtype.itemsize)
    queries = sizes.rows // spec.group_size
    return pl.pallas_call(
        functools.partial(prefill_kernel, spec=spec, order=order, sizes=sizes, queries=queries),
        grid=(tiles.seq_W.shape[0], q_TKGD.shape[1]),
        out_shape=jax.ShapeDtypeStruct((*q_TKGD.shape[:3], spec.v_dim), q_TKGD.dtype),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="paged_prefill",
    )(q_TKGD, k, v, table_SB, tiles[:4], sinks_KG)
