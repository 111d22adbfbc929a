"""Prefill attention written for Hopper, in Gluon: one warp has blocks copied, two warpgroups multiply and weigh.

The scores of a tile of keys are computed while the weights of the tile before are multiplied with its values, and the
softmax of either warpgroup runs beside the products of the other. Tiles of keys go from the last, which are masked, to
the first. Letters as in attention_kernels.py; either warpgroup has half of the M rows. No interpreter runs this:
attention_kernels.prefill does the same anywhere.

A ring is (memory, full, empty): tiles in shared memory, and for each a barrier that says that it holds one, and one
that says that it may be overwritten.
"""

# pyright: reportAssignmentType=false
# (a layout is a constant)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_prefill import ROWS

LOG2E = gl.constexpr(1.4426950408889634)
NEVER = gl.constexpr(-1.0e30)  # as in attention_kernels.py
NOWHERE = gl.constexpr(1 << 30)  # a block outside every cache: what is copied from there is zeros
HALF_ROWS = gl.constexpr(ROWS // 2)  # of a tile: those of a warpgroup
ATOM = gl.constexpr(64)  # numbers of a row that lie together in shared memory, as the matrix unit wants them


@gluon.jit
def unit_of(turn):
    """Which unit of work is a program's in a turn: forth and back, so that all get long ones and short ones."""
    p, n = gl.program_id(0), gl.num_programs(0)
    return turn * n + gl.where(turn % 2 == 0, p, n - 1 - p)


@gluon.jit
def tile_of(u, total, work, K: gl.constexpr, Q: gl.constexpr):
    """Unit u is a kv head's share of a tile of queries; late tiles, which see most keys, go first.

    (head, sequence, place of its first query in the sequence's tokens, row of the first token, number of tokens, number
    of those before them, keys that the tile sees.)
    """
    starts, lengths, tile_seqs, tile_firsts = work
    w = total - 1 - u // K
    s, first = gl.load(tile_seqs + w), gl.load(tile_firsts + w)
    start = gl.load(starts + s)
    count = gl.load(starts + s + 1) - start
    computed = gl.load(lengths + s) - count
    return u % K, s, first, start, count, computed, computed + gl.minimum(first + Q, count)


@gluon.jit
def copy_queries(q_desc, t, h, memory, full):
    to = memory._reinterpret(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    tma.async_copy_global_to_shared(q_desc, [t, h, 0, 0], full, to)


@gluon.jit
def copy_slots(desc, block, slot, h, d, memory, full, HEAD_MAJOR: gl.constexpr):
    """A block's slots from `slot` on; before the first slot there are zeros."""
    to = memory._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    if HEAD_MAJOR:
        tma.async_copy_global_to_shared(desc, [block, h, slot, d], full, to)
    else:
        tma.async_copy_global_to_shared(desc, [block, slot, h, d], full, to)


@gluon.jit
def copy_tile(
    desc, blocks, b, last, shift, h, ring, c,
    P: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HEAD_MAJOR: gl.constexpr,
):  # fmt: skip
    """Tile c: blocks b .. of one head. The last block of a sequence is shifted down, so that it ends with its keys."""
    memory, full, empty = ring
    stage = c % STAGES
    # half a row after half a row, each as an array of its own: a block's rows lie together in either
    atoms = memory.index(stage)._reinterpret(desc.dtype, [D // ATOM, N, ATOM], gl.NVMMASharedLayout(128, 16, 2))
    mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), N * D * 2)
    for r in gl.static_range(N // P):
        slot = gl.where(b + r == last, -shift, 0)
        for a in gl.static_range(D // ATOM):
            to = atoms.index(a).slice(r * P, P)
            copy_slots(desc, blocks[r], slot, h, a * ATOM, to, full.index(stage), HEAD_MAJOR)


@gluon.jit
def copy(
    q_desc, k_desc, v_desc, tables, table_s, work, num_tiles, queries, keys, values,
    K: gl.constexpr, Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEAD_MAJOR: gl.constexpr,
):  # fmt: skip
    """The part of the one warp."""
    B: gl.constexpr = N // P
    memory, full, empty = queries
    total = gl.load(num_tiles)
    c = 0
    turn = 0
    while turn * gl.num_programs(0) < total * K:
        u = unit_of(turn)
        if u < total * K:
            h, s, first, start, _count, _computed, hi = tile_of(u, total, work, K, Q)
            mbarrier.wait(empty, (turn & 1) ^ 1)
            mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
            copy_queries(q_desc, start + first, h, memory.index(0), full)
            copy_queries(q_desc, start + first + Q // 2, h, memory.index(1), full)
            table = tables + s.to(gl.int64) * table_s
            last, shift = gl.cdiv(hi, P) - 1, (P - hi % P) % P
            T = gl.cdiv(hi, N)
            for t in range(T):
                b = (T - 1 - t) * B
                blocks = ()
                for r in gl.static_range(B):
                    block = gl.load(table + gl.minimum(b + r, last))
                    blocks = blocks + (gl.where(b + r > last, NOWHERE, block),)
                copy_tile(k_desc, blocks, b, last, shift, h, keys, c, P, N, D, STAGES, HEAD_MAJOR)
                copy_tile(v_desc, blocks, b, last, shift, h, values, c, P, N, D, STAGES, HEAD_MAJOR)
                c += 1
        turn += 1


@gluon.jit
def hidden(s_MN, position_M, j, hi, P: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of tile j; -inf where a row does not see a key, or there is none."""
    at_N = j * N + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    whole, shift = hi // P * P, (P - hi % P) % P
    key_N = gl.where((at_N >= whole) & (shift > 0), at_N - shift, at_N)
    real_N = (at_N < whole) | (key_N >= whole)
    return gl.where((position_M[:, None] >= key_N[None, :]) & real_N[None, :], s_MN, float("-inf"))


@gluon.jit
def softmax(s_MN, peak_M, sum_M, factor):
    """Weights, and the running peak, sum and what the values so far are to be multiplied with."""
    new_M = gl.maximum(peak_M, gl.max(s_MN, 1) * factor)
    keep_M = gl.exp2(peak_M - new_M)
    p_MN = gl.exp2(s_MN * factor - new_M[:, None])
    return p_MN, new_M, sum_M * keep_M + gl.sum(p_MN, 1), keep_M


@gluon.jit
def score(q, memory, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins the scores of a tile of keys."""
    zero = gl.zeros([HALF_ROWS, N], gl.float32, LAYOUT)
    return warpgroup_mma(q, memory.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(
    acc_MV, p_MN, peak_M, sum_M, q, j, c, hi, position_M, factor, keys, values,
    P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Tile j of the keys, c of the ring, while the weights of the tile before in the ring meet its values."""
    k_memory, k_full, k_empty = keys
    v_memory, v_full, v_empty = values
    now, before = c % STAGES, (c - 1) % STAGES
    mbarrier.wait(k_full.index(now), (c // STAGES) & 1)
    scores = score(q, k_memory.index(now), N, SCORES)
    mbarrier.wait(v_full.index(before), ((c - 1) // STAGES) & 1)
    summing = warpgroup_mma(p_MN, v_memory.index(before), acc_MV, is_async=True)
    s_MN = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(now), count=1)
    if MASKED:
        s_MN = hidden(s_MN, position_M, j, hi, P, N, SCORES)
    w_MN, peak_M, sum_M, keep_M = softmax(s_MN, peak_M, sum_M, factor)
    next_MN = gl.convert_layout(w_MN.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
    acc_MV, p_MN, next_MN = warpgroup_mma_wait(0, deps=[summing, p_MN, next_MN])
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc_MV * gl.convert_layout(keep_M, gl.SliceLayout(1, SUMS))[:, None], next_MN, peak_M, sum_M


@gluon.jit
def attend(
    work, num_tiles, sinks, out, factor, queries, keys, values,
    HALF: gl.constexpr, K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, Q: gl.constexpr, P: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The part of a warpgroup: the first or the second HALF of each tile's rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    m = gl.arange(0, HALF_ROWS, ROW)
    q_memory, q_full, q_empty = queries
    k_memory, k_full, k_empty = keys
    v_memory, v_full, v_empty = values
    q = q_memory.index(HALF)
    total = gl.load(num_tiles)
    c = 0
    turn = 0
    while turn * gl.num_programs(0) < total * K:
        u = unit_of(turn)
        if u < total * K:
            h, _s, first, start, count, computed, hi = tile_of(u, total, work, K, Q)
            first += HALF * (Q // 2)
            T, position_M = gl.cdiv(hi, N), computed + first + m // GP
            peak_M, sum_M = gl.full([HALF_ROWS], NEVER, gl.float32, ROW), gl.zeros([HALF_ROWS], gl.float32, ROW)
            if SINKS:
                peak_M = gl.load(sinks + h * G + m % GP, mask=m % GP < G, other=0.0).to(gl.float32) * LOG2E
                sum_M += 1.0
            mbarrier.wait(q_full, turn & 1)
            mbarrier.wait(k_full.index(c % STAGES), (c // STAGES) & 1)
            s_MN = warpgroup_mma_wait(0, deps=[score(q, k_memory.index(c % STAGES), N, SCORES)])
            mbarrier.arrive(k_empty.index(c % STAGES), count=1)
            s_MN = hidden(s_MN, position_M, T - 1, hi, P, N, SCORES)
            w_MN, peak_M, sum_M, _keep = softmax(s_MN, peak_M, sum_M, factor)
            p_MN = gl.convert_layout(w_MN.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
            acc_MV = gl.zeros([HALF_ROWS, D], gl.float32, SUMS)
            # keys up to the first query's own are seen by all rows
            partly = gl.maximum(T - (computed + first + 1) // N, 1)
            for t in range(1, partly):
                acc_MV, p_MN, peak_M, sum_M = step(
                    acc_MV, p_MN, peak_M, sum_M, q, T - 1 - t, c + t, hi, position_M, factor, keys, values,
                    P, N, STAGES, True, SCORES, SUMS,
                )  # fmt: skip
            for t in range(partly, T):
                acc_MV, p_MN, peak_M, sum_M = step(
                    acc_MV, p_MN, peak_M, sum_M, q, T - 1 - t, c + t, hi, position_M, factor, keys, values,
                    P, N, STAGES, False, SCORES, SUMS,
                )  # fmt: skip
            mbarrier.arrive(q_empty, count=1)
            c += T
            stage = (c - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((c - 1) // STAGES) & 1)
            summing = warpgroup_mma(p_MN, v_memory.index(stage), acc_MV, is_async=True)
            acc_MV, p_MN = warpgroup_mma_wait(0, deps=[summing, p_MN])
            mbarrier.arrive(v_empty.index(stage), count=1)
            o_MV = acc_MV / gl.convert_layout(sum_M, gl.SliceLayout(1, SUMS))[:, None]
            store(o_MV.to(out.dtype.element_ty), out, start, first, count, h, K, G, GP, D)
        turn += 1


@gluon.jit
def store(
    o_MV, out, start, first, count, h, K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Rows of queries that there are."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m, e = gl.arange(0, HALF_ROWS, gl.SliceLayout(1, WIDE)), gl.arange(0, D, gl.SliceLayout(0, WIDE))
    i_M = first + m // GP
    at_MV = out + (((start + i_M).to(gl.int64) * K + h) * G + m % GP)[:, None] * D + e[None, :]
    gl.store(at_MV, gl.convert_layout(o_MV, WIDE), mask=((i_M < count) & (m % GP < G))[:, None])


@gluon.jit(do_not_specialize=["table_s"], do_not_specialize_on_alignment=["num_tiles"])
def prefill(
    q_desc, k_desc, v_desc, tables, lengths, starts, tile_seqs, tile_firsts, num_tiles, sinks, out, factor, table_s,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, P: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr, HEAD_MAJOR: gl.constexpr,
):  # fmt: skip
    """Sequences of several tokens, in tiles of queries: tile w is of sequence tile_seqs[w]. A program, many tiles."""
    Q: gl.constexpr = 2 * HALF_ROWS // GP
    like: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_memory = gl.allocate_shared_memory(like, [2, HALF_ROWS, D], layout)
    k_memory = gl.allocate_shared_memory(like, [STAGES, N, D], layout)
    v_memory = gl.allocate_shared_memory(like, [STAGES, N, D], layout)
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], one), gl.allocate_shared_memory(gl.int64, [1], one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    work = (starts, lengths, tile_seqs, tile_firsts)
    queries, keys, values = (q_memory, q_full, q_empty), (k_memory, k_full, k_empty), (v_memory, v_full, v_empty)
    gl.warp_specialize(
        [
            (attend, (work, num_tiles, sinks, out, factor, queries, keys, values,
                      0, K, G, GP, Q, P, N, D, STAGES, SINKS)),
            (attend, (work, num_tiles, sinks, out, factor, queries, keys, values,
                      1, K, G, GP, Q, P, N, D, STAGES, SINKS)),
            (copy, (q_desc, k_desc, v_desc, tables, table_s, work, num_tiles, queries, keys, values,
                    K, Q, P, N, D, STAGES, HEAD_MAJOR)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
