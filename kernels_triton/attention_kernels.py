"""Paged attention in Triton: decode with split keys, put together by the last, and prefill in blocks of queries.

Peaks are in units of log2, so that weights are powers of two. Strides are arguments: any order of block, slot and head
will do. Keys that no query of a program sees are not read, so they may hold anything.

Letters: S sequences, T tokens, M rows of a tile (queries x heads of a group), N keys of a tile, Z splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .apart_kernels import attend_apart, capped
from .arrivals import is_last
from .early import take_turn
from .narrow_kernels import attend_pairs

LOG2E = tl.constexpr(1.4426950408889634)
# a peak before any key. Finite, so that a hidden score, which is -inf, weighs 0 beside it: where both were large
# numbers, a fused multiply-add left their rounding error (1e23) as an exponent
NEVER = tl.constexpr(-1.0e30)
# a split has a multiple of so many keys: whole tiles of any kernel's
WHOLE = tl.constexpr(64)
# steps of putting splits together whose parts are on their way or being added
ON_THEIR_WAY = tl.constexpr(5)


@triton.jit
def rows_at(
    pool, table, at_N, seen_N, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    OF_N: tl.constexpr, OF_P: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """[N, DP]: the keys or values of one head at places at_N of a sequence. Not MASKED: all of them are there."""
    block_N = tl.load(table + at_N // P, mask=seen_N, other=0) if MASKED else tl.load(table + at_N // P)
    # an offset that may not fit in 32 bits
    block_N = block_N.to(tl.int64) if FAR else block_N
    d = tl.arange(0, DP)
    place_ND = pool + (block_N * OF_N + at_N % P * OF_P)[:, None] + d[None, :]
    if D != DP:
        mask_ND = seen_N[:, None] & (d < D)[None, :] if MASKED else (d < D)[None, :]
        x_ND = tl.load(place_ND, mask=mask_ND, other=0.0)
    elif MASKED:
        x_ND = tl.load(place_ND, mask=seen_N[:, None], other=0.0)
    else:
        x_ND = tl.load(place_ND)
    return x_ND


@triton.jit
def scales_at(
    pool, table, at_N, seen_N, P: tl.constexpr, OF_N: tl.constexpr, OF_P: tl.constexpr,
    MASKED: tl.constexpr, FAR: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """[N]: the scales of one head at places at_N of a sequence; ones where the cache has none."""
    scale_N = tl.full(at_N.shape, 1.0, tl.float32)
    if SCALED:
        block_N = tl.load(table + at_N // P, mask=seen_N, other=0) if MASKED else tl.load(table + at_N // P)
        block_N = block_N.to(tl.int64) if FAR else block_N
        place_N = pool + block_N * OF_N + at_N % P * OF_P
        scale_N = tl.load(place_N, mask=seen_N, other=0.0) if MASKED else tl.load(place_N)
    return scale_N


@triton.jit
def widened(x, like: tl.constexpr):
    """What the cache holds, in the dtype of the queries.

    To bfloat16 four at a time, by bits: conversions run at a quarter of the speed of other instructions. Not pure, so
    that it is done where rows lie as they were loaded: in the matrix units' order, bytes are read one by one.
    """
    if x.dtype == tl.int8 and like == tl.bfloat16:
        # a byte in the bits of 2^23 is 2^23 and that byte
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, a, b, c, d;
            xor.b32 x, $2, 0x80808080;
            prmt.b32 a, x, 0x4B000000, 0x7440;
            prmt.b32 b, x, 0x4B000000, 0x7441;
            prmt.b32 c, x, 0x4B000000, 0x7442;
            prmt.b32 d, x, 0x4B000000, 0x7443;
            add.f32 a, a, 0fCB000080;
            add.f32 b, b, 0fCB000080;
            add.f32 c, c, 0fCB000080;
            add.f32 d, d, 0fCB000080;
            cvt.rn.bf16x2.f32 $0, b, a;
            cvt.rn.bf16x2.f32 $1, d, c;
            }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    elif x.dtype == tl.float8e4nv and like == tl.bfloat16:
        # the same bits with a longer exponent, which begins 120 further down
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, up;
            mov.b32 up, 0x7B807B80;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000;
            and.b32 t, a, 0x7F007F00;
            shr.u32 t, t, 4;
            or.b32 a, s, t;
            and.b32 s, b, 0x80008000;
            and.b32 t, b, 0x7F007F00;
            shr.u32 t, t, 4;
            or.b32 b, s, t;
            mul.rn.bf16x2 $0, a, up;
            mul.rn.bf16x2 $1, b, up;
            }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        wide = x.to(like)
    return wide


@triton.jit
def score(q_MD, k_ND, of_N, scale, CAP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """[M, N] products, times the keys' scales of_N; with a cap they are scaled, capped and in log2 already."""
    s = tl.dot(q_MD, tl.trans(widened(k_ND, q_MD.dtype)), input_precision=PRECISION)
    if SCALED:
        s *= of_N[None, :]
    return capped(s, scale, CAP)


@triton.jit
def fold(
    acc_MV, peak_M, sum_M, s_MN, v_NV, of_N, factor, like: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One tile of keys folded into a running softmax of s * factor, factor being positive; values are times of_N."""
    new_M = tl.maximum(peak_M, tl.max(s_MN, 1) * factor)
    keep_M = tl.exp2(peak_M - new_M)
    p_MN = tl.exp2(s_MN * factor - new_M[:, None])
    sum_M = sum_M * keep_M + tl.sum(p_MN, 1)
    if SCALED:
        p_MN *= of_N[None, :]
    acc_MV = acc_MV * keep_M[:, None] + tl.dot(p_MN.to(like), widened(v_NV, like), input_precision=PRECISION)
    return acc_MV, new_M, sum_M


@triton.jit
def share(length, low, splits, N: tl.constexpr, LEAST: tl.constexpr):
    """Where the first split of a sequence begins, and how many keys each has: whole tiles, and not too few."""
    first = low // N * N
    return first, tl.maximum(tl.cdiv(tl.cdiv(length - first, splits), N) * N, LEAST)


@triton.jit
def put_together(
    parts, peaks, sums, row_G, own_G, count, VP: tl.constexpr, GP: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """[GP, VP]: the values of `count` splits, whose parts lie behind one another from row_G on; C in a step.

    Those of later steps are on their way to shared memory meanwhile. No axis of splits: Triton 3.6 lays it across
    warps, so that every sum is a trip through shared memory. Loads in flight to registers would take programs' room.
    """
    # rows of nobody divide by one
    peak_G, sum_G = tl.full([GP], NEVER, tl.float32), tl.where(own_G, 0.0, 1.0)
    acc_GV, e = tl.zeros([GP, VP], tl.float32), tl.arange(0, VP)
    for z0 in tl.range(0, count, C, num_stages=ON_THEIR_WAY):
        for i in tl.static_range(C):
            there_G, at_G = own_G & (z0 + i < count), row_G + z0 + i
            of_G = tl.load(peaks + at_G, mask=there_G, other=NEVER, cache_modifier=".cg")
            more_G = tl.load(sums + at_G, mask=there_G, other=0.0, cache_modifier=".cg")
            at_GV = parts + at_G[:, None] * VP + e[None, :]
            part_GV = tl.load(at_GV, mask=there_G[:, None], other=0.0, cache_modifier=".cg")
            new_G = tl.maximum(peak_G, of_G)
            keep_G, weight_G = tl.exp2(peak_G - new_G), tl.exp2(of_G - new_G)
            sum_G = sum_G * keep_G + more_G * weight_G
            acc_GV = acc_GV * keep_G[:, None] + part_GV * weight_G[:, None]
            peak_G = new_G
    return acc_GV / sum_G[:, None]


# sizes that change from step to step make no variants of their own, each of which takes seconds to compile
@triton.jit(do_not_specialize=["table_s", "num_seqs", "num_tokens", "num_parts"])
def decode(
    q, k, v, tables, lengths, starts, prefixes, sinks, out, parts, peaks, sums, turns, order, scale, factor, table_s,
    num_seqs, num_tokens, num_parts, k_scale, v_scale,
    Q_T: tl.constexpr, Q_K: tl.constexpr, Q_G: tl.constexpr, K_N: tl.constexpr, K_P: tl.constexpr, K_K: tl.constexpr,
    V_N: tl.constexpr, V_P: tl.constexpr, V_K: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, ORDERED: tl.constexpr, WITHIN: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
    SCALED: tl.constexpr, NARROW: tl.constexpr, APART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sequences of one token this step. Program (kv head, sequence, split); splits leave unnormalised partial sums.

    A split without keys leaves nothing. The step's tokens of nobody become zero. SHARED: a sequence's first
    prefixes[s] keys are read elsewhere (shared_prefix.py), and of its num_parts parts only the first are made here.
    NARROW: the cache holds codes of 8 bits. APART: each of two warps has keys of its own. ORDERED: programs take the
    sequences in this order. WITHIN: the last split of a head to arrive, of those that have keys, puts them together,
    C at a time.
    """
    take_turn(EARLY)
    h, s, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        s = tl.load(order + s)
    # asked for together, before anything waits: a program begins with a chain of loads
    start, end, length = tl.load(starts + s), tl.load(starts + s + 1), tl.load(lengths + s)
    m, d, e, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, N)
    own_M, t = m < G, start.to(tl.int64)
    q_at = q + t * Q_T + h * Q_K
    if not NARROW:
        there_MD = (own_M & (end - start == 1))[:, None] & (d < D)[None, :]
        q_MD = tl.load(q_at + m[:, None] * Q_G + d[None, :], mask=there_MD, other=0.0)
    for i in range(tl.load(starts + num_seqs) + s, num_tokens, num_seqs):
        at_MV = out + ((i * K + h) * G + m)[:, None] * V + e[None, :]
        tl.store(at_MV, tl.zeros([M, VP], out.dtype.element_ty), mask=(own_M & (z == 0))[:, None] & (e < V)[None, :])
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    low = tl.load(prefixes + s) if SHARED else low
    first, each = share(length, low, tl.num_programs(2), WHOLE, LEAST)
    lo = first + z * each
    hi = tl.minimum(lo + each, length)
    if (end - start == 1) & (lo < hi):
        peak_M, sum_M = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        if SINKS and z == 0:
            peak_M = tl.load(sinks + h * G + m, mask=own_M, other=0.0).to(tl.float32) * LOG2E
            sum_M = tl.full([M], 1.0, tl.float32)
        table = tables + s * table_s
        if NARROW:
            acc_MV, peak_M, sum_M = attend_pairs(
                peak_M, sum_M, q_at, own_M, k + h * K_K, v + h * V_K, k_scale + h * (K_K // D),
                v_scale + h * (V_K // V), table, lo, hi, low, scale, factor,
                Q_G, K_N, K_P, V_N, V_P, D, V, P, CAP, M, N, DP, VP, FAR, PRECISION, SCALED,
            )  # fmt: skip
        elif APART:
            acc_MV, peak_M, sum_M = attend_apart(
                peak_M, sum_M, q_MD, k + h * K_K, v + h * V_K, table, lo, hi, low, scale, factor,
                K_N, K_P, V_N, V_P, D, V, P, CAP, M, N // 2, DP, VP, FAR, PRECISION,
            )  # fmt: skip
        else:
            acc_MV = tl.zeros([M, VP], tl.float32)
            for j in range(lo, hi, N):
                at_N = j + n
                seen_N = (at_N < hi) & (at_N >= low)
                k_ND = rows_at(k + h * K_K, table, at_N, seen_N, D, DP, P, K_N, K_P, True, FAR)
                v_NV = rows_at(v + h * V_K, table, at_N, seen_N, V, VP, P, V_N, V_P, True, FAR)
                s_MN = score(q_MD, k_ND, 1.0, scale, CAP, False, PRECISION)
                s_MN = tl.where(seen_N[None, :], s_MN, float("-inf"))
                acc_MV, peak_M, sum_M = fold(
                    acc_MV, peak_M, sum_M, s_MN, v_NV, 1.0, factor, q_MD.dtype, False, PRECISION
                )  # fmt: skip
        alone = True
        if SPLIT:
            # splits that have keys
            count = tl.cdiv(length - first, each)
            alone = (low == 0) & (tl.num_programs(2) == 1) if SHARED else (count == 1) & WITHIN
            row = (s.to(tl.int64) * K + h) * G * num_parts
            if not alone:
                row_M = row + m * num_parts + z
                tl.store(parts + row_M[:, None] * VP + e[None, :], acc_MV, mask=own_M[:, None])
                tl.store(peaks + row_M, peak_M, mask=own_M)
                tl.store(sums + row_M, sum_M, mask=own_M)
                last = False
                if WITHIN:
                    last = is_last(turns + s * K + h, count)
                if last:
                    g = tl.arange(0, GP)
                    o_GV = put_together(
                        parts + row * VP, peaks + row, sums + row, g * num_parts, g < G, count, VP, GP, C
                    )
                    at_GV = out + ((t * K + h) * G + g)[:, None] * V + e[None, :]
                    own_GV = (g < G)[:, None] & (e < V)[None, :]
                    tl.store(at_GV, o_GV.to(out.dtype.element_ty), mask=own_GV)
        if alone:
            at_MV = out + ((t * K + h) * G + m)[:, None] * V + e[None, :]
            o_MV = (acc_MV / sum_M[:, None]).to(out.dtype.element_ty)
            tl.store(at_MV, o_MV, mask=own_M[:, None] & (e < V)[None, :])


@triton.jit(do_not_specialize=["splits", "num_parts"])
def reduce(
    parts, peaks, sums, lengths, starts, prefixes, out, splits, num_parts,
    HEADS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, Z: tl.constexpr,
    WINDOW: tl.constexpr, LEAST: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits of decode, and SHARED those of a shared prefix behind them, put together. Program (head, sequence).

    A sequence that shares nothing and has one split is done already.
    """
    take_turn(EARLY)
    h, s = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + s), tl.load(lengths + s)
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    low = tl.load(prefixes + s) if SHARED else low
    first, each = share(length, low, splits, WHOLE, LEAST)
    if (tl.load(starts + s + 1) - start == 1) & ((low > 0) | (splits > 1) | (not SHARED)):
        z, e = tl.arange(0, Z), tl.arange(0, VP)
        row_Z, there_Z = (s.to(tl.int64) * HEADS + h) * num_parts + z, (z < splits) & (first + z * each < length)
        if SHARED:
            _, wide = share(low, 0, num_parts - splits, WHOLE, LEAST)
            there_Z = there_Z | ((z >= splits) & (z < num_parts) & ((z - splits) * wide < low))
        peak_Z = tl.load(peaks + row_Z, mask=there_Z, other=NEVER)
        weight_Z = tl.exp2(peak_Z - tl.max(peak_Z, 0))
        total = tl.sum(tl.load(sums + row_Z, mask=there_Z, other=0.0) * weight_Z, 0)
        part_ZV = tl.load(parts + row_Z[:, None] * VP + e[None, :], mask=there_Z[:, None], other=0.0)
        o_V = tl.sum(part_ZV * weight_Z[:, None], 0) / total
        tl.store(out + (start.to(tl.int64) * HEADS + h) * V + e, o_V.to(out.dtype.element_ty), mask=e < V)


@triton.jit
def attend_tiles(
    acc_MV, peak_M, sum_M, q_MD, k, v, k_scale, v_scale, table, position_M, lo, hi, low, scale, factor,
    K_N: tl.constexpr, K_P: tl.constexpr, V_N: tl.constexpr, V_P: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Keys lo .. hi in tiles. Not MASKED: every row sees all of them, and they are whole tiles."""
    n = tl.arange(0, N)
    for j in range(lo, hi, N):
        at_N = j + n
        seen_N = (at_N < hi) & (at_N >= low)
        k_ND = rows_at(k, table, at_N, seen_N, D, DP, P, K_N, K_P, MASKED, FAR)
        of_k = scales_at(k_scale, table, at_N, seen_N, P, K_N // D, K_P // D, MASKED, FAR, SCALED)
        s_MN = score(q_MD, k_ND, of_k, scale, CAP, SCALED, PRECISION)
        if MASKED:
            behind_MN = position_M[:, None] - at_N[None, :]
            visible_MN = (behind_MN >= 0) & seen_N[None, :]
            if WINDOW > 0:
                visible_MN = visible_MN & (behind_MN < WINDOW)
            s_MN = tl.where(visible_MN, s_MN, float("-inf"))
        v_NV = rows_at(v, table, at_N, seen_N, V, VP, P, V_N, V_P, MASKED, FAR)
        of_v = scales_at(v_scale, table, at_N, seen_N, P, V_N // V, V_P // V, MASKED, FAR, SCALED)
        acc_MV, peak_M, sum_M = fold(acc_MV, peak_M, sum_M, s_MN, v_NV, of_v, factor, q_MD.dtype, SCALED, PRECISION)
    return acc_MV, peak_M, sum_M


@triton.jit(do_not_specialize=["table_s"])
def prefill(
    q, k, v, tables, lengths, starts, tile_seqs, tile_firsts, num_tiles, sinks, out, scale, factor, table_s,
    k_scale, v_scale,
    Q_T: tl.constexpr, Q_K: tl.constexpr, Q_G: tl.constexpr, K_N: tl.constexpr, K_P: tl.constexpr, K_K: tl.constexpr,
    V_N: tl.constexpr, V_P: tl.constexpr, V_K: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, GP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Sequences of several tokens, in tiles of M // GP queries: tile w is of sequence tile_seqs[w].

    A tile's rows are its queries' heads of one group, so that they share the keys. Program (kv head, which tiles): one
    tile each where the grid suffices. Late queries see most keys: they go first, so that the last programs are short.
    """
    Q: tl.constexpr = M // GP
    h = tl.program_id(0)
    m, d, e = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, VP)
    g_M, total = m % GP, tl.load(num_tiles)
    for turn in range(tl.program_id(1), total, tl.num_programs(1)):
        w = total - 1 - turn
        s, first = tl.load(tile_seqs + w), tl.load(tile_firsts + w)
        start, length = tl.load(starts + s), tl.load(lengths + s)
        count = tl.load(starts + s + 1) - start
        computed, i_M = length - count, first + m // GP
        own_M = (i_M < count) & (g_M < G)
        t_M = (start + i_M).to(tl.int64)
        q_MD = tl.load(
            q + (t_M * Q_T + h * Q_K + g_M * Q_G)[:, None] + d[None, :],
            mask=own_M[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        peak_M, sum_M = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc_MV = tl.zeros([M, VP], tl.float32)
        if SINKS:
            peak_M = tl.load(sinks + h * G + g_M, mask=g_M < G, other=0.0).to(tl.float32) * LOG2E
            sum_M = tl.full([M], 1.0, tl.float32)
        table, position_M = tables + s * table_s, computed + i_M
        hi = computed + tl.minimum(first + Q, count)
        low = tl.maximum(computed + first - WINDOW + 1, 0) if WINDOW > 0 else 0
        # without a window, keys up to the first query's own are seen by all
        lo = low // N * N if WINDOW > 0 else (computed + first + 1) // N * N
        if WINDOW == 0:
            acc_MV, peak_M, sum_M = attend_tiles(
                acc_MV, peak_M, sum_M, q_MD, k + h * K_K, v + h * V_K, k_scale + h * (K_K // D),
                v_scale + h * (V_K // V), table, position_M, 0, lo, 0, scale, factor,
                K_N, K_P, V_N, V_P, D, V, P, WINDOW, CAP, False, N, DP, VP, FAR, PRECISION, SCALED,
            )  # fmt: skip
        acc_MV, peak_M, sum_M = attend_tiles(
            acc_MV, peak_M, sum_M, q_MD, k + h * K_K, v + h * V_K, k_scale + h * (K_K // D),
            v_scale + h * (V_K // V), table, position_M, lo, hi, low, scale, factor,
            K_N, K_P, V_N, V_P, D, V, P, WINDOW, CAP, True, N, DP, VP, FAR, PRECISION, SCALED,
        )  # fmt: skip
        at_MV = out + ((t_M * K + h) * G + g_M)[:, None] * V + e[None, :]
        o_MV = (acc_MV / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(at_MV, o_MV, mask=own_M[:, None] & (e < V)[None, :])
