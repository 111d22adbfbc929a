"""Paged attention in Triton: decode with split keys and a reduction, and chunked prefill in blocks of queries.

Scores are in units of log2, so that weights are powers of two. Strides are arguments: any order of block, slot and head
will do. Keys that no query of a program sees are not read, so they may hold anything.

Letters: S sequences, T tokens, M rows of a tile (queries x heads of a group), N keys of a tile, Z splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1.0e30)


@triton.jit
def score(q_MD, k_ND, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[M, N] scaled and capped scores, in log2. Without a cap `scale` holds log2(e) already."""
    s = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
    if CAP > 0:
        # cap * tanh(s / cap), tanh(x) being 1 - 2 / (exp(2 x) + 1)
        s = CAP * LOG2E * (1 - 2 / (tl.exp2(s * (2 * LOG2E / CAP)) + 1))
    return s


@triton.jit
def fold(acc_MV, peak_M, sum_M, s_MN, v_NV, PRECISION: tl.constexpr):
    """One tile of keys folded into a running softmax."""
    new_M = tl.maximum(peak_M, tl.max(s_MN, 1))
    keep_M = tl.exp2(peak_M - new_M)
    p_MN = tl.exp2(s_MN - new_M[:, None])
    acc_MV = acc_MV * keep_M[:, None] + tl.dot(p_MN.to(v_NV.dtype), v_NV, input_precision=PRECISION)
    return acc_MV, new_M, sum_M * keep_M + tl.sum(p_MN, 1)


@triton.jit
def decode(
    q, k, v, tables, lengths, starts, sinks, out, parts, peaks, sums, scale,
    q_t, q_k, q_g, k_n, k_p, k_k, v_n, v_p, v_k, table_s, num_seqs,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, ONLY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sequences of one token this step. Program (kv head, sequence, split); splits leave unnormalised partial sums.

    ONLY says that the step has no others: the rows after the last token are then zeroed here.
    """
    h, s, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + s)
    m, d, e, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, N)
    own_M = m < G
    nobodys = ONLY and (s >= tl.load(starts + num_seqs)) & (z == 0)
    if nobodys:
        at_MV = out + ((s.to(tl.int64) * K + h) * G + m)[:, None] * V + e[None, :]
        tl.store(at_MV, tl.zeros([M, VP], out.dtype.element_ty), mask=own_M[:, None] & (e < V)[None, :])
    if tl.load(starts + s + 1) - start == 1:
        length, t = tl.load(lengths + s), start.to(tl.int64)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(length - WINDOW, 0)
        first = low // N * N
        each = tl.cdiv(tl.cdiv(length - first, tl.num_programs(2)), N) * N
        lo = first + z * each
        hi = tl.minimum(lo + each, length)
        q_MD = tl.load(
            q + t * q_t + h * q_k + m[:, None] * q_g + d[None, :], mask=own_M[:, None] & (d < D)[None, :], other=0.0
        )
        peak_M, sum_M = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc_MV = tl.zeros([M, VP], tl.float32)
        if SINKS and z == 0:
            peak_M = tl.load(sinks + h * G + m, mask=own_M, other=0.0).to(tl.float32) * LOG2E
            sum_M = tl.full([M], 1.0, tl.float32)
        for j in range(lo, hi, N):
            at_N = j + n
            seen_N = (at_N < hi) & (at_N >= low)
            block_N = tl.load(tables + s * table_s + at_N // P, mask=seen_N, other=0).to(tl.int64)
            k_ND = tl.load(
                k + (block_N * k_n + at_N % P * k_p + h * k_k)[:, None] + d[None, :],
                mask=seen_N[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            v_NV = tl.load(
                v + (block_N * v_n + at_N % P * v_p + h * v_k)[:, None] + e[None, :],
                mask=seen_N[:, None] & (e < V)[None, :], other=0.0,
            )  # fmt: skip
            s_MN = tl.where(seen_N[None, :], score(q_MD, k_ND.to(q_MD.dtype), scale, CAP, PRECISION), NEVER)
            acc_MV, peak_M, sum_M = fold(acc_MV, peak_M, sum_M, s_MN, v_NV.to(q_MD.dtype), PRECISION)
        if SPLIT:
            row_M = ((s.to(tl.int64) * K + h) * G + m) * tl.num_programs(2) + z
            tl.store(parts + row_M[:, None] * VP + e[None, :], acc_MV, mask=own_M[:, None])
            tl.store(peaks + row_M, peak_M, mask=own_M)
            tl.store(sums + row_M, sum_M, mask=own_M)
        else:
            at_MV = out + ((t * K + h) * G + m)[:, None] * V + e[None, :]
            o_MV = (acc_MV / sum_M[:, None]).to(out.dtype.element_ty)
            tl.store(at_MV, o_MV, mask=own_M[:, None] & (e < V)[None, :])


@triton.jit
def reduce(
    parts, peaks, sums, starts, out, splits,
    HEADS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """The splits of decode put together. Program (head, sequence)."""
    h, s = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + s)
    if tl.load(starts + s + 1) - start == 1:
        z, e = tl.arange(0, Z), tl.arange(0, VP)
        row_Z, there_Z = (s.to(tl.int64) * HEADS + h) * splits + z, z < splits
        peak_Z = tl.load(peaks + row_Z, mask=there_Z, other=NEVER)
        weight_Z = tl.exp2(peak_Z - tl.max(peak_Z, 0))
        total = tl.sum(tl.load(sums + row_Z, mask=there_Z, other=0.0) * weight_Z, 0)
        part_ZV = tl.load(parts + row_Z[:, None] * VP + e[None, :], mask=there_Z[:, None], other=0.0)
        o_V = tl.sum(part_ZV * weight_Z[:, None], 0) / total
        tl.store(out + (start.to(tl.int64) * HEADS + h) * V + e, o_V.to(out.dtype.element_ty), mask=e < V)


@triton.jit
def attend_tiles(
    acc_MV, peak_M, sum_M, q_MD, k, v, table, position_M, lo, hi, low, scale,
    k_n, k_p, v_n, v_p,
    D: tl.constexpr, V: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys lo .. hi in tiles. Not MASKED: every row sees all of them, and they are whole tiles."""
    d, e, n = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, N)
    for j in range(lo, hi, N):
        at_N = j + n
        seen_N = (at_N < hi) & (at_N >= low) if MASKED else at_N >= 0
        block_N = tl.load(table + at_N // P, mask=seen_N, other=0).to(tl.int64)
        k_ND = tl.load(
            k + (block_N * k_n + at_N % P * k_p)[:, None] + d[None, :],
            mask=seen_N[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        s_MN = score(q_MD, k_ND.to(q_MD.dtype), scale, CAP, PRECISION)
        if MASKED:
            behind_MN = position_M[:, None] - at_N[None, :]
            visible_MN = (behind_MN >= 0) & seen_N[None, :]
            if WINDOW > 0:
                visible_MN = visible_MN & (behind_MN < WINDOW)
            s_MN = tl.where(visible_MN, s_MN, NEVER)
        v_NV = tl.load(
            v + (block_N * v_n + at_N % P * v_p)[:, None] + e[None, :],
            mask=seen_N[:, None] & (e < V)[None, :], other=0.0,
        )  # fmt: skip
        acc_MV, peak_M, sum_M = fold(acc_MV, peak_M, sum_M, s_MN, v_NV.to(q_MD.dtype), PRECISION)
    return acc_MV, peak_M, sum_M


@triton.jit
def prefill(
    q, k, v, tables, lengths, starts, tiles, sinks, out, scale,
    q_t, q_k, q_g, k_n, k_p, k_k, v_n, v_p, v_k, table_s, num_seqs, num_tokens,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    GP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sequences of several tokens. Program (kv head, tile of M // GP queries); `tiles` names each tile's sequence.

    A tile's rows are its queries' heads of one group, so that they share the keys. Tokens of nobody become zero.
    """
    Q: tl.constexpr = M // GP
    h = tl.program_id(0)
    # late queries see most keys: they go first, so that the last programs are short ones
    w = tl.num_programs(1) - 1 - tl.program_id(1)
    s = tl.load(tiles + w)
    start, total = tl.load(starts + s), tl.load(starts + num_seqs)
    count, length = tl.load(starts + s + 1) - start, tl.load(lengths + s)
    m, d, e = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, VP)
    g_M = m % GP
    if (w + 1) * Q > total:
        t_M = w * Q + m // GP
        nobodys_M = (t_M >= total) & (t_M < num_tokens) & (g_M < G)
        at_MV = out + ((t_M.to(tl.int64) * K + h) * G + g_M)[:, None] * V + e[None, :]
        tl.store(at_MV, tl.zeros([M, VP], out.dtype.element_ty), mask=nobodys_M[:, None] & (e < V)[None, :])
    first = (w - (start // Q + s)) * Q
    if (count > 1) & (first < count):
        computed = length - count
        i_M = first + m // GP
        own_M = (i_M < count) & (g_M < G)
        t_M = (start + i_M).to(tl.int64)
        q_MD = tl.load(
            q + (t_M * q_t + h * q_k + g_M * q_g)[:, None] + d[None, :],
            mask=own_M[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        peak_M, sum_M = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc_MV = tl.zeros([M, VP], tl.float32)
        if SINKS:
            peak_M = tl.load(sinks + h * G + g_M, mask=g_M < G, other=0.0).to(tl.float32) * LOG2E
            sum_M = tl.full([M], 1.0, tl.float32)
        table, position_M = tables + s * table_s, computed + i_M
        hi = computed + tl.minimum(first + Q, count)
        if WINDOW > 0:
            low = tl.maximum(computed + first - WINDOW + 1, 0)
            lo = low // N * N
        else:
            low = 0
            # keys up to the first query's own are seen by all
            lo = (computed + first + 1) // N * N
            acc_MV, peak_M, sum_M = attend_tiles(
                acc_MV, peak_M, sum_M, q_MD, k + h * k_k, v + h * v_k, table, position_M, 0, lo, low, scale,
                k_n, k_p, v_n, v_p, D, V, P, WINDOW, CAP, False, N, DP, VP, PRECISION,
            )  # fmt: skip
        acc_MV, peak_M, sum_M = attend_tiles(
            acc_MV, peak_M, sum_M, q_MD, k + h * k_k, v + h * v_k, table, position_M, lo, hi, low, scale,
            k_n, k_p, v_n, v_p, D, V, P, WINDOW, CAP, True, N, DP, VP, PRECISION,
        )  # fmt: skip
        at_MV = out + ((t_M * K + h) * G + g_M)[:, None] * V + e[None, :]
        o_MV = (acc_MV / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(at_MV, o_MV, mask=own_M[:, None] & (e < V)[None, :])
