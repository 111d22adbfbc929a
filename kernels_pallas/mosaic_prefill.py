"""Paged prefill attention in Pallas Mosaic GPU, for Hopper: TMA fetches blocks, two warpgroups with wgmma take turns.

After JAX's own dense kernel (jax.experimental.pallas.ops.gpu.attention_mgpu) and FlashAttention-3 (arXiv 2407.08608):
one warpgroup fetches, two compute, and while one of them is at its softmax the other has the tensor cores. A block of
the grid stays and takes work until there is none. Work is a *pair*: two units of one sequence and kv head, a unit being
64 tokens of one query head, so that both read the same keys.
Letters: M rows of a unit, N keys of a tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .ragged import LOG2_E, Plan
from .reference import HIDDEN

ROWS = 64  # of a unit
ALIGNED = 8  # TMA moves tiles of 8 rows: where one starts is a multiple of that
STAGES = 2  # tiles of keys and values in shared memory


class Pairs(NamedTuple):
    """Work: the sequence of each pair and its first unit, heaviest of a sequence first; the first `count` are real."""

    seq_W: jax.Array
    unit_W: jax.Array
    starts_S: jax.Array  # first token of a sequence
    counts_S: jax.Array  # its tokens in this step
    lengths_S: jax.Array  # and in the cache after it
    count_1: jax.Array


def pairs_of(plan: Plan, group_size: int) -> Pairs:
    """The pairs of the sequences with several tokens. Their number is fixed by the step's shapes."""
    counts_S, num_seqs = plan.counts_S, plan.counts_S.shape[0]
    tiles_S = -(-(counts_S + plan.starts_S % ALIGNED) // ROWS)
    pairs_S = jnp.where(counts_S > 1, (tiles_S * group_size + 1) // 2, 0)
    last_S = jnp.cumsum(pairs_S, dtype=jnp.int32)
    many = min(num_seqs, plan.num_tokens // 2)
    # c tokens are in at most (c + 7 + 63) / 64 tiles; of an odd number of units one is wasted
    most = (((plan.num_tokens + (ROWS + ALIGNED - 2) * many) // ROWS + 1) * group_size + many) // 2 + 1
    pair_W = jnp.arange(most, dtype=jnp.int32)
    seq_W = jnp.minimum(jnp.sum(pair_W[:, None] >= last_S[None], axis=-1, dtype=jnp.int32), num_seqs - 1)
    unit_W = jnp.maximum(2 * (last_S[seq_W] - 1 - pair_W), 0)
    starts_S, counts_S, lengths_S = (x.astype(jnp.int32) for x in (plan.starts_S, counts_S, plan.lengths_S))
    return Pairs(seq_W, unit_W, starts_S, counts_S, lengths_S, last_S[-1:])


def interpreter(**options: Any) -> Any:
    """What makes Pallas interpret a Mosaic GPU kernel on a CPU: JAX keeps it in a private module so far."""
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams(**options)


def tile_keys(dim: int) -> int:
    """N: as many as shared memory has room for."""
    return 128 if dim <= 128 else 64


class Unit(NamedTuple):
    """What a warpgroup computes: rows of one query head, and which of them are the tile's own."""

    group: jax.Array
    token: jax.Array  # of the first row
    position: jax.Array  # of the first row
    low: jax.Array  # own rows
    high: jax.Array
    tiles: jax.Array  # of keys, from the sequence's first on; 0: there is no such unit


def unit_of(unit: jax.Array, start: Any, count: Any, length: Any, groups: int, n: int, num_tokens: int) -> Unit:
    """A unit of a sequence. Its rows begin at a multiple of 8, so that some may be of the sequence before or behind."""
    group, tile = lax.rem(unit, jnp.int32(groups)), lax.div(unit, jnp.int32(groups))
    first, end = start - lax.rem(start, jnp.int32(ALIGNED)) + tile * ROWS, start + count
    token = jnp.minimum(first, num_tokens - ROWS)
    position = length - count + token - start
    low, high = jnp.maximum(start, first) - token, jnp.minimum(end, first + ROWS) - token
    tiles = jnp.where(first < end, lax.div(position + high + (n - 1), jnp.int32(n)), 0)
    return Unit(group, token, position, low, high, tiles)


# a program of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret", "num_programs"))
def prefill(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_SB: jax.Array,
    pairs: Pairs,
    sinks_KG: jax.Array | None,
    *,
    order: str,
    spec: Any,
    interpret: Any = None,
    num_programs: int = 132,
) -> jax.Array:
    """Outputs of the sequences with several tokens, [T, K, G, Dv]. What belongs to none is not written.

    `num_programs` is the number of multiprocessors; `interpret` an InterpretGPUParams.
    """
    num_tokens, dim = q_TKGD.shape[0], spec.k_dim
    # a unit's rows have to exist, and TMA counts rows in eights
    if padding := max(ROWS - num_tokens, -num_tokens % ALIGNED):
        q_TKGD = jnp.pad(q_TKGD, ((0, padding), (0, 0), (0, 0), (0, 0)))
    n, size = tile_keys(dim), k.shape[order.split().index("p")]
    body = functools.partial(
        kernel,
        order=order,
        spec=spec,
        n=n,
        size=size,
        num_tokens=q_TKGD.shape[0],
        sinks=sinks_KG is not None,
        interpret=interpret is not None,
        num_programs=num_programs,
    )
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((STAGES, n, dim), k.dtype, transforms=tiled)
    full = plgpu.Barrier(num_arrivals=max(1, n // size), num_barriers=STAGES)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    scratch = {
        "qo": plgpu.SMEM((2, ROWS, dim), q_TKGD.dtype, transforms=tiled),
        "rows": plgpu.SMEM((2, ROWS, dim), q_TKGD.dtype),
        "ks": tile,
        "vs": tile,
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
        "q_full": plgpu.Barrier(num_barriers=2),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q_TKGD.shape, q_TKGD.dtype),
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(*([q_TKGD, k, v, table_SB, *pairs] + ([] if sinks_KG is None else [sinks_KG.astype(jnp.float32)])))
    return out[:num_tokens]


class Loop(NamedTuple):
    """What one pair's work is in: the pair, and how many tiles this program has seen before it."""

    head: jax.Array
    units: tuple[Unit, Unit]
    first: jax.Array  # tile of keys
    tiles: jax.Array  # of the longer unit
    seen: jax.Array
    seq: jax.Array
    length: jax.Array


def kernel(*refs: Any, order: str, spec: Any, n: int, size: int, num_tokens: int, sinks: bool, interpret: bool,
           num_programs: int, qo: Any, rows: Any, ks: Any, vs: Any, k_full: Any, v_full: Any, k_free: Any, v_free: Any,
           q_full: Any, turn: Any) -> None:  # fmt: skip
    """The program: takes pair after pair, in turn with the others."""
    q_ref, k_ref, v_ref, table_ref, seq_ref, unit_ref, start_ref, count_ref, length_ref, total_ref = refs[:10]
    sinks_ref, out_ref = (refs[10], refs[11]) if sinks else (None, refs[10])
    num_heads, program, wg = q_ref.shape[1], lax.axis_index("program"), lax.axis_index("wg")
    work = total_ref[0] * num_heads
    mine = lax.div(jnp.maximum(work - program + (num_programs - 1), 0), jnp.int32(num_programs))

    def pair(i: jax.Array, seen: jax.Array) -> Loop:
        at = program + i * num_programs
        w, head = lax.div(at, jnp.int32(num_heads)), lax.rem(at, jnp.int32(num_heads))
        seq = seq_ref[w]
        start, count, length = start_ref[seq], count_ref[seq], length_ref[seq]
        one, two = (unit_of(unit_ref[w] + j, start, count, length, spec.group_size, n, num_tokens) for j in (0, 1))
        first = jnp.int32(0)
        if spec.window:
            first = lax.div(jnp.maximum(one.position + one.low + 1 - spec.window, 0), jnp.int32(n))
        return Loop(head, (one, two), first, jnp.maximum(one.tiles, two.tiles), seen, seq, length)

    def fetch(i: jax.Array, seen: jax.Array) -> jax.Array:
        work = pair(i, seen)
        blocks = max(1, n // size)

        def tile(j: jax.Array, _: None) -> None:
            ahead = seen + j - work.first
            slot = lax.rem(ahead, jnp.int32(STAGES))
            last = lax.div(work.length - 1, jnp.int32(size))
            ids = [table_ref[work.seq, jnp.minimum(j * blocks + b, last)] for b in range(blocks)]
            for ref, smem, is_full, is_free in ((k_ref, ks, k_full, k_free), (v_ref, vs, v_full, v_free)):
                pl.when(ahead >= STAGES)(functools.partial(plgpu.barrier_wait, is_free.at[slot]))
                for b, block in enumerate(ids):
                    at = {"n": block, "p": pl.ds(0, size), "k": work.head, "d": pl.ds(0, spec.k_dim)}
                    source = ref.at[tuple(at[a] for a in order.split())]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(b * size, size)], is_full.at[slot])

        lax.fori_loop(work.first, work.tiles, tile, None)
        return seen + jnp.maximum(work.tiles - work.first, 0)

    def compute(i: jax.Array, seen: jax.Array) -> jax.Array:
        work = pair(i, seen)
        one, two = work.units
        unit = Unit(*(jnp.where(wg == 0, a, b) for a, b in zip(one, two, strict=True)))
        attend_unit(work, unit, wg, q_ref, sinks_ref, out_ref, spec, n, interpret, qo.at[wg], rows.at[wg], ks, vs,
                    k_full, v_full, k_free, v_free, q_full.at[wg], turn)  # fmt: skip
        return seen + jnp.maximum(work.tiles - work.first, 0)

    @pl.when(wg < 2)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, mine, compute, jnp.int32(0))

    @pl.when(wg == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        seen = lax.fori_loop(0, mine, fetch, jnp.int32(0))

        def drain(t: jax.Array, _: None) -> None:
            plgpu.barrier_wait(k_free.at[lax.rem(t, jnp.int32(STAGES))])
            plgpu.barrier_wait(v_free.at[lax.rem(t, jnp.int32(STAGES))])

        lax.fori_loop(jnp.maximum(seen - STAGES, 0), seen, drain, None)


def attend_unit(work: Loop, unit: Unit, wg: Any, q_ref: Any, sinks_ref: Any, out_ref: Any, spec: Any, n: int,
                interpret: bool, qo: Any, rows: Any, ks: Any, vs: Any, k_full: Any, v_full: Any, k_free: Any,
                v_free: Any, q_full: Any, turn: Any) -> None:  # fmt: skip
    """One unit: queries in, all tiles of keys, outputs out. It keeps step with the other warpgroup to the last tile."""
    dim, dtype = spec.k_dim, ks.dtype
    as_is = lambda x, layout: x  # noqa: E731
    cast = as_is if interpret else plgpu.layout_cast
    per_row, matrix = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def iota(axis: int, shape: tuple[int, int]) -> jax.Array:
        if interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=matrix)

    def take_turns() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(unit.token, ROWS), work.head, unit.group], qo, q_full)
    plgpu.barrier_wait(q_full)
    top_M, sum_M = jnp.full((ROWS,), HIDDEN, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    if sinks_ref is not None:
        top_M = jnp.full((ROWS,), sinks_ref[work.head, unit.group] * LOG2_E, jnp.float32)
        sum_M = jnp.ones((ROWS,), jnp.float32)
    carry = (cast(jnp.zeros((ROWS, dim), jnp.float32), matrix), cast(top_M, per_row), cast(sum_M, per_row))
    pl.when(wg == 1)(take_turns)

    def tile(j: jax.Array, carry: tuple, masked: bool) -> tuple:
        out_MD, top_M, sum_M = carry
        slot = lax.rem(work.seen + j - work.first, jnp.int32(STAGES))
        plgpu.barrier_wait(k_full.at[slot])

        def scores(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, qo, plgpu.transpose_ref(ks.at[slot], (1, 0)))
            take_turns()
            return acc[...]

        if interpret:
            scores_MN = jnp.dot(qo[...], ks[slot].T, preferred_element_type=jnp.float32)
            take_turns()
        else:
            scores_MN = pl.run_scoped(scores, plgpu.ACC((ROWS, n), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(k_free.at[slot])
        if spec.softcap is None:
            scores_MN = scores_MN * (spec.scale * LOG2_E)
        else:
            scores_MN = jnp.tanh(scores_MN * (spec.scale / spec.softcap)) * (spec.softcap * LOG2_E)
        if masked:
            behind_MN = (unit.position + iota(0, (ROWS, n))) - (j * n + iota(1, (ROWS, n)))
            seen_MN = behind_MN >= 0
            if spec.window:
                seen_MN = seen_MN & (behind_MN < spec.window)
            scores_MN = jnp.where(seen_MN, scores_MN, HIDDEN)
        new_M = jnp.maximum(top_M, scores_MN.max(axis=1))
        shrink_M = jnp.exp2(top_M - new_M)
        weight_MN = jnp.exp2(scores_MN - lax.broadcast_in_dim(new_M, (ROWS, n), [0]))
        out_MD = out_MD * lax.broadcast_in_dim(shrink_M, (ROWS, dim), [0])
        sum_M = sum_M * shrink_M + weight_MN.sum(axis=1)
        half_MN, top_M = weight_MN.astype(dtype), new_M
        if not interpret:
            out_MD, sum_M, top_M, half_MN = lax.optimization_barrier((out_MD, sum_M, top_M, half_MN))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_full.at[slot])
        plgpu.barrier_wait(turn)
        if masked:
            pl.when(j * n + n > work.length)(functools.partial(clear_tail, slot, work.length - j * n))

        def add(acc: Any) -> None:
            plgpu.wgmma(acc, half_MN, vs.at[slot])

        if interpret:
            out_MD = out_MD + jnp.dot(half_MN, vs[slot], preferred_element_type=jnp.float32)
        else:
            out_MD = pl.run_state(add)(plgpu.ACC.init(out_MD))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(v_free.at[slot])
        return out_MD, top_M, sum_M

    def clear_tail(slot: jax.Array, written: jax.Array) -> None:
        # weight zero times what an unwritten slot holds would still be a nan, if that is one
        v_ND = vs[slot]
        vs[slot] = jnp.where(iota(0, v_ND.shape) < written, v_ND, jnp.zeros_like(v_ND))
        plgpu.commit_smem()

    def skip(j: jax.Array, _: None) -> None:
        # this unit sees fewer keys than the other: lets the tile go and keeps taking turns
        slot = lax.rem(work.seen + j - work.first, jnp.int32(STAGES))
        plgpu.barrier_wait(k_full.at[slot])
        plgpu.barrier_arrive(k_free.at[slot])
        take_turns()
        plgpu.barrier_wait(v_full.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        take_turns()

    # tiles that every own row sees whole need no mask
    seen = unit.position + unit.low + 1
    whole = work.first if spec.window else jnp.minimum(lax.div(seen, jnp.int32(n)), unit.tiles)
    carry = lax.fori_loop(work.first, whole, functools.partial(tile, masked=False), carry)
    carry = lax.fori_loop(whole, unit.tiles, functools.partial(tile, masked=True), carry)
    lax.fori_loop(jnp.maximum(unit.tiles, work.first), work.tiles, skip, None)
    pl.when(wg == 0)(take_turns)
    out_MD, _, sum_M = carry
    out_MD = (out_MD / lax.broadcast_in_dim(sum_M, (ROWS, dim), [0])).astype(dtype)
    store(out_MD, work, unit, out_ref, qo, rows)


def store(out_MD: jax.Array, work: Loop, unit: Unit, out_ref: Any, qo: Any, rows: Any) -> None:
    """Writes a unit's own rows: as one tile where all are, else one by one."""
    is_whole = (unit.high - unit.low == ROWS) & (unit.tiles > 0)

    @pl.when(is_whole)
    def _whole() -> None:
        qo[...] = out_MD
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(qo, out_ref.at[pl.ds(unit.token, ROWS), work.head, unit.group])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(is_whole) & (unit.tiles > 0))
    def _row_by_row() -> None:
        rows[...] = out_MD
        plgpu.commit_smem()

        def one(m: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(rows.at[m], out_ref.at[unit.token + m, work.head, unit.group])

        lax.fori_loop(unit.low, unit.high, one, None)
        plgpu.wait_smem_to_gmem(0)
