"""Decode over a cache of 8 bits in Triton: what `decode` of attention_kernels.py does with a program's keys.

Two codes are read as one number of 16 bits. So matrix loads, which know no numbers of 8, bring them where the matrix
units want them, those of two keys in one register, and what is left is to take halves apart: into float16, which all
codes fit, in a third of the instructions that bfloat16 takes. Even and odd dims are products of their own.

Queries are divided by their largest number, whatever dtype they come in, so that float16 holds them. A weight is
times its value's scale from the start, by the peak, which is of both: none is above 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# a scale at least: that of a value of nothing but zeros, whose weight counts all the same, is 0
LEAST_SCALE = tl.constexpr(1.0e-24)


@triton.jit
def halves(x, like: tl.constexpr, FP8: tl.constexpr):
    """(low, high): the two codes of each number of 16 bits."""
    if like != tl.float16:
        low, high = ((x << 8) >> 8).to(tl.int8), (x >> 8).to(tl.int8)
        if FP8:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        low, high = low.to(like), high.to(like)
    elif FP8:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            .reg .b16 a, b;
            prmt.b32 x, $2, 0, 0x3120;
            mov.b32 {a, b}, x;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # a byte in the low bits of 1024 is 1024 and that byte; its sign turned, 128 more
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m;
            mov.b32 m, 0x64806480;
            lop3.b32 a, $2, 0x00FF00FF, m, 0x6A;
            shr.u32 b, $2, 8;
            lop3.b32 b, b, 0x00FF00FF, m, 0x6A;
            sub.rn.f16x2 $0, a, m;
            sub.rn.f16x2 $1, b, m;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def log2_of(x, like: tl.constexpr):
    """log2 of normal numbers. In one instruction on a GPU: what weights are divided by is exp2 of the same."""
    if like == tl.float16:
        log = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        log = tl.log2(x)
    return log


@triton.jit
def pairs_at(
    pool, block_N, at_N, D: tl.constexpr, DP: tl.constexpr, OF_N: tl.constexpr, OF_P: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """[N, DP / 2]: keys or values of one head, two codes in a number of 16 bits."""
    d = tl.arange(0, DP // 2)
    row_N = block_N * (OF_N // 2) + at_N % P * (OF_P // 2)
    place_ND = pool.to(tl.pointer_type(tl.int16), bitcast=True) + row_N[:, None] + d[None, :]
    return tl.load(place_ND) if D == DP else tl.load(place_ND, mask=(d < D // 2)[None, :], other=0)


@triton.jit
def queries_at(q, own_M, D: tl.constexpr, DP: tl.constexpr, Q_G: tl.constexpr, like: tl.constexpr):
    """(even dims, odd dims, what they are to be multiplied by) of the heads of a group."""
    m, d = tl.arange(0, own_M.shape[0]), tl.arange(0, DP // 2)
    place_MD, there_MD = q + m[:, None] * Q_G + 2 * d[None, :], own_M[:, None] & (d < D // 2)[None, :]
    even_MD = tl.load(place_MD, mask=there_MD, other=0.0).to(tl.float32)
    odd_MD = tl.load(place_MD + 1, mask=there_MD, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.maximum(tl.abs(even_MD), tl.abs(odd_MD)), 1), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    return (even_MD / largest).to(like), (odd_MD / largest).to(like), largest


@triton.jit
def attend_pairs(
    peak_M, sum_M, q, own_M, k, v, k_scale, v_scale, table, lo, hi, low, scale, factor,
    Q_G: tl.constexpr, K_N: tl.constexpr, K_P: tl.constexpr, V_N: tl.constexpr, V_P: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, P: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """([M, VP] values, peaks, sums) of keys lo .. hi, those from low on, of which there is one at least."""
    like = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    FP8: tl.constexpr = k.dtype.element_ty == tl.float8e4nv
    even_MD, odd_MD, largest = queries_at(q, own_M, D, DP, Q_G, like)
    even_MV, odd_MV = tl.zeros([M, VP // 2], tl.float32), tl.zeros([M, VP // 2], tl.float32)
    factor = (scale if CAP > 0 else factor) * largest
    n = tl.arange(0, N)
    for j in range(lo, hi, N):
        # what is not seen is read where something is, and weighs nothing
        at_N = tl.maximum(tl.minimum(j + n, hi - 1), low)
        seen_N = (j + n < hi) & (j + n >= low)
        block_N = tl.load(table + at_N // P)
        block_N = block_N.to(tl.int64) if FAR else block_N
        k_ND = pairs_at(k, block_N, at_N, D, DP, K_N, K_P, P)
        v_NV = pairs_at(v, block_N, at_N, V, VP, V_N, V_P, P)
        of_N, log_N = factor, tl.zeros([N], tl.float32)
        if SCALED:
            of_N = tl.load(k_scale + block_N * (K_N // D) + at_N % P * (K_P // D)) * factor
            of_v = tl.load(v_scale + block_N * (V_N // V) + at_N % P * (V_P // V))
            log_N = log2_of(tl.maximum(of_v, LEAST_SCALE), like)
        low_ND, high_ND = halves(k_ND, like, FP8)
        s_MN = tl.dot(even_MD, tl.trans(low_ND), input_precision=PRECISION)
        s_MN = tl.dot(odd_MD, tl.trans(high_ND), s_MN, input_precision=PRECISION)
        s_MN = s_MN * (of_N[None, :] if SCALED else factor)
        if CAP > 0:
            s_MN = CAP * LOG2E * (1 - 2 / (tl.exp2(s_MN * (2 * LOG2E / CAP)) + 1))
        s_MN += tl.where(seen_N, log_N, float("-inf"))[None, :]
        new_M = tl.maximum(peak_M, tl.max(s_MN, 1))
        keep_M = tl.exp2(peak_M - new_M)
        p_MN = tl.exp2(s_MN - new_M[:, None])
        plain_MN = p_MN * tl.exp2(-log_N)[None, :] if SCALED else p_MN
        sum_M = sum_M * keep_M + tl.sum(plain_MN, 1)
        low_NV, high_NV = halves(v_NV, like, FP8)
        p_MN = p_MN.to(like)
        even_MV = tl.dot(p_MN, low_NV, even_MV * keep_M[:, None], input_precision=PRECISION)
        odd_MV = tl.dot(p_MN, high_NV, odd_MV * keep_M[:, None], input_precision=PRECISION)
        peak_M = new_M
    return tl.reshape(tl.join(even_MV, odd_MV), (M, VP)), peak_M, sum_M
