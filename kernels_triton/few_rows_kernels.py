"""Products of few rows in Triton, with what stands behind them: a gate, a sum.

Such a product is bound by reading its weight. So programs share the depth where columns alone would not fill the
device (the last of a tile to arrive adds the parts up, always in the same order), and a program asks for its part of
the weight before its turn comes (early.py).

Letters: M rows of a tile, N columns of a tile, D depth of a tile, Z splits of the depth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arrivals import is_last
from .early import take_turn

LINE = tl.constexpr(64)  # numbers of two bytes that one prefetch brings


@triton.jit
def ask_for(w, low, high, n0, WIDTH: tl.constexpr, N: tl.constexpr, AHEAD: tl.constexpr):
    """Starts bringing rows low .. low + AHEAD of columns n0 .. n0 + N of the weight into the cache of the device."""
    LINES: tl.constexpr = (N + LINE - 1) // LINE
    row_A, line_L = low + tl.arange(0, AHEAD), tl.arange(0, LINES) * LINE
    row_A = tl.minimum(row_A, high - 1)
    column_L = tl.minimum(n0 + line_L, WIDTH - 1)
    place_AL = w + row_A.to(tl.int64)[:, None] * WIDTH + column_L[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place_AL], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_of(w, d_D, n_N, WIDTH: tl.constexpr, DEPTH: tl.constexpr, END: tl.constexpr, EVEN: tl.constexpr):
    """[D, N] of a weight [DEPTH, WIDTH], whose columns end at END. EVEN: all of it is there."""
    place_DN = w + d_D[:, None].to(tl.int64) * WIDTH + n_N[None, :]
    if EVEN:
        tile_DN = tl.load(place_DN, eviction_policy="evict_first")
    else:
        tile_DN = tl.load(place_DN, mask=(d_D < DEPTH)[:, None] & (n_N < END)[None, :], other=0.0)
    return tile_DN


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x, w, add, out, parts, turns, num_rows, x_r,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, EACH: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [num_rows, END] = add + gate(x @ w): GATE and ADD say what of it is there; w is [DEPTH, WIDTH].

    Program (tile of columns, split of EACH of the depth). With GATE, columns n and END + n of w make column n. `turns`
    are zeros, and are left so.
    """
    END: tl.constexpr = WIDTH // 2 if GATE else WIDTH
    tile, z = tl.program_id(0), tl.program_id(1)
    n0, low = tile * N, z * EACH
    high = tl.minimum(low + EACH, DEPTH)
    if EARLY and AHEAD > 0:
        ask_for(w, low, high, n0, WIDTH, N, AHEAD)
        if GATE:
            ask_for(w, low, high, END + n0, WIDTH, N, AHEAD)
    take_turn(EARLY)
    m_M, n_N, d_D = tl.arange(0, M), n0 + tl.arange(0, N), tl.arange(0, D)
    own_M = m_M < num_rows
    acc_MN, up_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for d0 in range(low, high, D):
        at_D = d0 + d_D
        mask_MD = own_M[:, None] if EVEN else own_M[:, None] & (at_D < DEPTH)[None, :]
        x_MD = tl.load(x + m_M[:, None] * x_r + at_D[None, :], mask=mask_MD, other=0.0)
        w_DN = tile_of(w, at_D, n_N, WIDTH, DEPTH, END, EVEN)
        acc_MN = tl.dot(x_MD, w_DN, acc_MN, input_precision=PRECISION)
        if GATE:
            u_DN = tile_of(w + END, at_D, n_N, WIDTH, DEPTH, END, EVEN)
            up_MN = tl.dot(x_MD, u_DN, up_MN, input_precision=PRECISION)
    last = True
    if Z > 1:
        # [tile, split, what, row, column]
        KINDS: tl.constexpr = 2 if GATE else 1
        here_MN = m_M[:, None] * N + tl.arange(0, N)[None, :]
        mine = parts + (tile * Z + z).to(tl.int64) * (KINDS * M * N)
        tl.store(mine + here_MN, acc_MN)
        if GATE:
            tl.store(mine + M * N + here_MN, up_MN)
        last = is_last(turns + tile, Z)
        if last:
            acc_MN, up_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
            for i in tl.static_range(Z):
                one = parts + (tile * Z + i).to(tl.int64) * (KINDS * M * N)
                acc_MN += tl.load(one + here_MN, cache_modifier=".cg")
                if GATE:
                    up_MN += tl.load(one + M * N + here_MN, cache_modifier=".cg")
    if last:
        if GATE:
            acc_MN = acc_MN / (1 + tl.exp(-acc_MN)) * up_MN
        at_MN = m_M[:, None] * END + n_N[None, :]
        mask_MN = own_M[:, None] & (n_N < END)[None, :]
        if ADD:
            acc_MN += tl.load(add + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
        tl.store(out + at_MN, acc_MN.to(out.dtype.element_ty), mask=mask_MN)
