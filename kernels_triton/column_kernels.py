"""Products of very few rows in Triton: a program makes some columns from the whole depth, and nobody waits for another.

A weight depends on no earlier kernel. So a program asks for its first tiles before its turn (early.py), into registers,
and behind its turn only rows come, which are small. The norm in front is a factor of the sums: nothing waits for it.

A weight may lie turned, [WIDTH, DEPTH]: a column is then made of what lies together, and a program can have few.

Letters: R rows, N columns of a program, D depth of a tile, S tiles on their way, L numbers that a thread loads at once,
B rows of a weight that is not turned, of which all threads together load once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .early import take_turn

L = tl.constexpr(8)


@triton.jit
def tiles_at(
    w, n_N, at_D, TURNED: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """S tiles of a weight, one behind another along the depth: [N, D] of a turned one, else [D, N]."""
    tiles = ()
    for i in tl.static_range(S):
        if TURNED:
            place = w + n_N.to(tl.int64)[:, None] * DEPTH + (i * D + at_D)[None, :]
        else:
            place = w + (i * D + at_D).to(tl.int64)[:, None] * WIDTH + n_N[None, :]
        tiles = tiles + (tl.load(place, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def parts_at(x, x_r, num_rows, at_D, D: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """S parts [D] of each of R rows; a row of nobody is the last."""
    parts = ()
    for i in tl.static_range(S):
        for r in tl.static_range(R):
            row = tl.minimum(r, num_rows - 1) if R > 1 else 0
            parts = parts + (tl.load(x + row * x_r + i * D + at_D),)
    return parts


@triton.jit
def times(tile, x_D, TURNED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Of the products of a tile and a row, the sums that a thread makes alone: [N, D / L], or [B, N]."""
    if TURNED:
        sums = tl.sum(tl.reshape(tile * x_D[None, :], [N, D // L, L]), 2)
    else:
        sums = tl.sum(tl.reshape(tile * x_D[:, None], [D // B, B, N]), 0)
    return sums


@triton.jit
def folded(
    sums, ups, squares, w_tiles, up_tiles, scales, parts,
    TURNED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, S: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Each row's sums, and squares, with those of S tiles added."""
    for i in tl.static_range(S):
        w_tile = w_tiles[i].to(tl.float32)
        up_tile = up_tiles[i].to(tl.float32) if GATE else w_tile
        new_sums, new_ups, new_squares = (), (), ()
        for r in tl.static_range(R):
            x_D = parts[i * R + r].to(tl.float32)
            if NORM:
                new_squares = new_squares + (squares[r] + x_D * x_D,)
                x_D = x_D * scales[i].to(tl.float32)
            new_sums = new_sums + (sums[r] + times(w_tile, x_D, TURNED, N, D, B),)
            if GATE:
                new_ups = new_ups + (ups[r] + times(up_tile, x_D, TURNED, N, D, B),)
        sums, ups, squares = new_sums, new_ups, new_squares
    return sums, ups, squares


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x, w, scale, add, out, num_rows, x_r, eps,
    TURNED: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, S: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [num_rows, END] = add + gate(norm(x) @ w): NORM, GATE and ADD say what of it is there. A program N columns.

    With GATE, columns n and END + n make column n. w is [DEPTH, WIDTH], or TURNED.
    """
    END: tl.constexpr = WIDTH // 2 if GATE else WIDTH
    UP: tl.constexpr = END * DEPTH if TURNED else END
    n_N, d_D = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    w_tiles = tiles_at(w, n_N, d_D, TURNED, DEPTH, WIDTH, D, S)
    up_tiles = tiles_at(w + UP, n_N, d_D, TURNED, DEPTH, WIDTH, D, S if GATE else 0)
    scales = parts_at(scale, 0, 1, d_D, D, S if NORM else 0, 1)
    take_turn(EARLY)
    parts = parts_at(x, x_r, num_rows, d_D, D, S, R)
    sums, ups, squares, adds = (), (), (), ()
    nothing = tl.zeros([N, D // L] if TURNED else [B, N], tl.float32)
    for r in tl.static_range(R):
        sums = sums + (nothing,)
        if GATE:
            ups = ups + (nothing,)
        if NORM:
            squares = squares + (tl.zeros([D], tl.float32),)
        if ADD:
            adds = adds + (tl.load(add + r * END + n_N, mask=(n_N < END) & (r < num_rows), other=0.0),)
    for d0 in tl.range(S * D, DEPTH, S * D, num_stages=1):
        at_D = d0 + d_D
        # on their way while those before are added
        next_w = tiles_at(w, n_N, at_D, TURNED, DEPTH, WIDTH, D, S)
        next_up = tiles_at(w + UP, n_N, at_D, TURNED, DEPTH, WIDTH, D, S if GATE else 0)
        next_scales = parts_at(scale, 0, 1, at_D, D, S if NORM else 0, 1)
        next_parts = parts_at(x, x_r, num_rows, at_D, D, S, R)
        sums, ups, squares = folded(
            sums, ups, squares, w_tiles, up_tiles, scales, parts, TURNED, GATE, NORM, R, N, D, S, B
        )
        w_tiles, up_tiles, scales, parts = next_w, next_up, next_scales, next_parts
    sums, ups, squares = folded(sums, ups, squares, w_tiles, up_tiles, scales, parts, TURNED, GATE, NORM, R, N, D, S, B)
    for r in tl.static_range(R):
        y_N = tl.sum(sums[r], 1 if TURNED else 0)
        factor = tl.rsqrt(tl.sum(squares[r], 0) / DEPTH + eps) if NORM else 1.0
        y_N *= factor
        if GATE:
            y_N = y_N / (1 + tl.exp(-y_N)) * (tl.sum(ups[r], 1 if TURNED else 0) * factor)
        if ADD:
            y_N += adds[r].to(tl.float32)
        tl.store(out + r * END + n_N, y_N.to(out.dtype.element_ty), mask=(n_N < END) & (r < num_rows))
