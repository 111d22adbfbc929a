"""Decode in Triton by two warps that have keys of their own: what `decode` of attention_kernels.py does with its keys.

Each warp, W, has N keys of a tile and a softmax of its own, as one of two in a product. So they meet where a tile has
come and where its room is free, and once at the end. With one softmax they met nine times a tile, as Triton 3.6 takes
maxima and sums across warps, and wrote their weights to shared memory for each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1.0e30)  # as in attention_kernels.py


@triton.jit
def capped(s, scale, CAP: tl.constexpr):
    """Products as they are; with a cap they are scaled, capped and in log2."""
    if CAP > 0:
        # cap * tanh(s / cap), tanh(x) being 1 - 2 / (exp(2 x) + 1)
        s = CAP * LOG2E * (1 - 2 / (tl.exp2(s * (scale * 2 * LOG2E / CAP)) + 1))
    return s


@triton.jit
def rows_of(pool, row_WN, D: tl.constexpr, DP: tl.constexpr):
    """[W, N, DP]: the keys or values of one head that begin at row_WN."""
    d = tl.arange(0, DP)
    place_WND = (pool + row_WN)[:, :, None] + d[None, None, :]
    return tl.load(place_WND) if D == DP else tl.load(place_WND, mask=(d < D)[None, None, :], other=0.0)


@triton.jit
def attend_apart(
    peak_M, sum_M, q_MD, k, v, table, lo, hi, low, scale, factor,
    K_N: tl.constexpr, K_P: tl.constexpr, V_N: tl.constexpr, V_P: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    P: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """([M, VP] values, peaks, sums) of keys lo .. hi, those from low on, of which there is one at least."""
    w, n = tl.arange(0, 2), tl.arange(0, N)
    # a sink counts once
    peak_WM = tl.where((w == 0)[:, None], peak_M[None, :], NEVER)
    sum_WM = tl.where((w == 0)[:, None], sum_M[None, :], 0.0)
    q_WMD, acc_WMV = tl.broadcast_to(q_MD[None, :, :], (2, M, DP)), tl.zeros([2, M, VP], tl.float32)
    for j in range(lo, hi, 2 * N):
        at_WN = (j + w * N)[:, None] + n[None, :]
        seen_WN = (at_WN < hi) & (at_WN >= low)
        # what is not seen is read where something is, and weighs nothing. Unsigned numbers are divided in one step
        at_WN = tl.maximum(tl.minimum(at_WN, hi - 1), low).to(tl.uint32)
        if P % N == 0:
            # a warp's keys are in one block
            at_W = tl.maximum(tl.minimum(j + w * N, hi - 1), low).to(tl.uint32)
            block_WN = tl.load(table + (at_W // P).to(tl.int32))[:, None]
        else:
            # loaded in a row: all threads take part
            at_B = tl.maximum(tl.minimum(j + tl.arange(0, 2 * N), hi - 1), low).to(tl.uint32)
            block_WN = tl.reshape(tl.load(table + (at_B // P).to(tl.int32)), (2, N))
        block_WN = block_WN.to(tl.int64) if FAR else block_WN
        place_WN = (at_WN % P).to(tl.int32)
        k_WND = rows_of(k, block_WN * K_N + place_WN * K_P, D, DP)
        v_WNV = rows_of(v, block_WN * V_N + place_WN * V_P, V, VP)
        s_WMN = capped(tl.dot(q_WMD, tl.permute(k_WND, (0, 2, 1)), input_precision=PRECISION), scale, CAP)
        s_WMN = tl.where(seen_WN[:, None, :], s_WMN, float("-inf"))
        new_WM = tl.maximum(peak_WM, tl.max(s_WMN, 2) * factor)
        keep_WM = tl.exp2(peak_WM - new_WM)
        p_WMN = tl.exp2(s_WMN * factor - new_WM[:, :, None])
        sum_WM = sum_WM * keep_WM + tl.sum(p_WMN, 2)
        more_WMV = tl.dot(p_WMN.to(q_MD.dtype), v_WNV, input_precision=PRECISION)
        acc_WMV, peak_WM = acc_WMV * keep_WM[:, :, None] + more_WMV, new_WM
    # halves exchanged as wholes: a sum over the axis of warps goes number by number
    peak_M, peak_2 = tl.split(tl.trans(peak_WM))
    sum_M, sum_2 = tl.split(tl.trans(sum_WM))
    acc_MV, acc_2 = tl.split(tl.permute(acc_WMV, (1, 2, 0)))
    top_M = tl.maximum(peak_M, peak_2)
    keep_M, keep_2 = tl.exp2(peak_M - top_M), tl.exp2(peak_2 - top_M)
    return acc_MV * keep_M[:, None] + acc_2 * keep_2[:, None], top_M, sum_M * keep_M + sum_2 * keep_2
