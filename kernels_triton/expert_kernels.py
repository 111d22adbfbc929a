"""Mixtures of experts in Triton: two grouped products and the sum, each one launch; for few tokens the sum is within.

Nothing waits for the host, and grids follow from shapes alone, so that a CUDA graph can hold them: a grouped product
has as many blocks as it could need, and those beyond the last one end at once.
Letters: X experts, C chosen ones of a token, P pairs (token, chosen expert), M rows of a block, all of one expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .arrivals import MOST, counters, is_last
from .early import early, hold_turn, take_turn
from .expert_blocks import Blocks, block_of, pairs_of, sort_pairs
from .few_rows_kernels import ask_for

Tensor = torch.Tensor

SUM_TILE = 1024


class Sizes(NamedTuple):
    """How a grouped product is cut, read and launched."""

    rows: int  # M
    columns: int
    depth: int
    warps: int
    stages: int
    # how weights are read: "apart", gate and up each for itself; "joint", as one tile (of down the same); "described",
    # by the device's copy engine, which wants rows of a multiple of 16 bytes
    way: str = "apart"
    once: bool = False  # what is read of the weights makes room in the cache first
    halves: bool = False  # a block of half the rows or fewer is computed as one of half the rows
    # rows of the weights that a program asks for before its turn: it is launched early then, however many there are
    ahead: int = 0


@triton.jit
def weights_at(at, inside, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """A tile of the weights. EVEN: all of it is there."""
    if EVEN and ONCE:
        tile = tl.load(at, eviction_policy="evict_first")
    elif EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def up_rows(
    x, w, act, order, expert, first, end, n0, x_t, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, WAY: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """N columns of a block of M rows at most: of both products, and of what they make."""
    EVEN: tl.constexpr = E % K == 0 and F % N == 0
    m, n, k = first + tl.arange(0, M), n0 + tl.arange(0, N), tl.arange(0, K)
    live = m < end
    at_x = x + (pairs_of(m, live, order, DIRECT) // C)[:, None] * x_t + k[None, :]
    if WAY == "joint":
        j = tl.arange(0, 2 * N)
        n_both = n0 + j % N
        at_w = w + expert.to(tl.int64) * E * 2 * F + k[:, None].to(tl.int64) * 2 * F + (j // N * F + n_both)[None, :]
        both = tl.zeros((M, 2 * N), tl.float32)
        for left in range(E, 0, -K):
            a = tl.load(at_x, mask=live[:, None] if EVEN else live[:, None] & (k < left)[None, :], other=0.0)
            b = weights_at(at_w, (k < left)[:, None] & (n_both < F)[None, :], EVEN, ONCE)
            both = tl.dot(a, b, both, input_precision="ieee")
            at_x += K
            at_w += K * 2 * F
        gate, up = tl.split(tl.permute(tl.reshape(both, (M, 2, N)), (0, 2, 1)))
    else:
        at_w = w
        if WAY == "apart":
            at_w = w + expert.to(tl.int64) * E * 2 * F + k[:, None].to(tl.int64) * 2 * F + n[None, :]
        gate, up = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
        for left in range(E, 0, -K):
            a = tl.load(at_x, mask=live[:, None] if EVEN else live[:, None] & (k < left)[None, :], other=0.0)
            if WAY == "described":
                b = w.load([expert, E - left, 0, n0]).reshape(K, N)
                gate = tl.dot(a, b, gate, input_precision="ieee")
                b = w.load([expert, E - left, 1, n0]).reshape(K, N)
                up = tl.dot(a, b, up, input_precision="ieee")
            else:
                inside = (k < left)[:, None] & (n < F)[None, :]
                gate = tl.dot(a, weights_at(at_w, inside, EVEN, ONCE), gate, input_precision="ieee")
                up = tl.dot(a, weights_at(at_w + F, inside, EVEN, ONCE), up, input_precision="ieee")
                at_w += K * 2 * F
            at_x += K
    y = gate / (1 + tl.exp(-gate)) * up
    to = act + m[:, None].to(tl.int64) * F + n[None, :]
    tl.store(to, y.to(act.dtype.element_ty), mask=live[:, None] & (n < F)[None, :])


@triton.jit
def up_kernel(
    x, w, act, order, table, x_t, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, WAY: tl.constexpr, ONCE: tl.constexpr,
    HALVES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """act = silu(x gate) * (x up), rows in sorted order. Program: a block of rows, N columns of both products."""
    tiles = tl.cdiv(F, N)
    block, n0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    if EARLY and AHEAD > 0:
        # whose block it will be is not known yet: nearly this one's, where nearly all are chosen
        guess = w + tl.minimum(block, X - 1).to(tl.int64) * E * 2 * F
        ask_for(guess, 0, E, n0, 2 * F, N, AHEAD)
        ask_for(guess, 0, E, F + n0, 2 * F, N, AHEAD)
    # in this order, for the next kernel asks for weights of experts that are known now
    hold_turn(EARLY)
    expert, first, end = block_of(block, order, table, X, DIRECT)
    if expert >= 0:
        if HALVES and end - first <= M // 2:
            up_rows(x, w, act, order, expert, first, end, n0, x_t, C, E, F, M // 2, N, K, DIRECT, WAY, ONCE)
        else:
            up_rows(x, w, act, order, expert, first, end, n0, x_t, C, E, F, M, N, K, DIRECT, WAY, ONCE)


@triton.jit
def down_rows(
    act, w, weights, y, order, expert, first, end, n0, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, WAY: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """N columns of a block of M rows at most."""
    EVEN: tl.constexpr = F % K == 0 and E % N == 0
    m, n, k = first + tl.arange(0, M), n0 + tl.arange(0, N), tl.arange(0, K)
    live = m < end
    at_a = act + m[:, None].to(tl.int64) * F + k[None, :]
    at_w = w
    if WAY != "described":
        at_w = w + expert.to(tl.int64) * F * E + k[:, None].to(tl.int64) * E + n[None, :]
    total = tl.zeros((M, N), tl.float32)
    for left in range(F, 0, -K):
        a = tl.load(at_a, mask=live[:, None] if EVEN else live[:, None] & (k < left)[None, :], other=0.0)
        if WAY == "described":
            b = w.load([expert, F - left, n0]).reshape(K, N)
        else:
            b = weights_at(at_w, (k < left)[:, None] & (n < E)[None, :], EVEN, ONCE)
            at_w += K * E
        total = tl.dot(a, b, total, input_precision="ieee")
        at_a += K
    pair = pairs_of(m, live, order, DIRECT)
    total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
    to = y + pair[:, None] * E + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & (n < E)[None, :])


@triton.jit
def sum_rows(y, ids, add, out, add_t, t, e, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, ADD: tl.constexpr):
    """Columns e of out = (add +) the rows of a token's pairs that have an expert, always in the same order."""
    total = tl.zeros(e.shape, tl.float32)
    for c in tl.static_range(C):
        here = tl.load(ids + t * C + c) < X
        # not from a cache that is one multiprocessor's: the rows may be those of programs that run beside this one
        row = tl.load(y + (t * C + c) * E + e, mask=here & (e < E), other=0.0, cache_modifier=".cg")
        total += row.to(tl.float32)
    if ADD:
        total += tl.load(add + t * add_t + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out + t * E + e, total.to(out.dtype.element_ty), mask=e < E)


@triton.jit
def down_kernel(
    act, w, weights, y, order, table, add, out, turns, add_t,
    X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, WAY: tl.constexpr, ONCE: tl.constexpr,
    HALVES: tl.constexpr, AHEAD: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = weight * (act down), a row a pair, in the order of pairs. Program: a block of rows, N columns.

    Direct: the last of a token's pairs to arrive adds them up. `turns` are zeros then, and are left so.
    """
    tiles = tl.cdiv(E, N)
    block, n0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    expert, first, end = block_of(block, order, table, X, DIRECT)
    if EARLY and AHEAD > 0:
        # of no expert: as well those of the first
        ask_for(w + tl.maximum(expert, 0).to(tl.int64) * F * E, 0, F, n0, E, N, AHEAD)
    take_turn(EARLY)
    if expert >= 0:
        if HALVES and end - first <= M // 2:
            down_rows(act, w, weights, y, order, expert, first, end, n0, E, F, M // 2, N, K, DIRECT, WAY, ONCE)
        else:
            down_rows(act, w, weights, y, order, expert, first, end, n0, E, F, M, N, K, DIRECT, WAY, ONCE)
    if DIRECT:
        t = (block // C).to(tl.int64)
        if is_last(turns + t * tiles + n0 // N, C):
            sum_rows(y, order, add, out, add_t, t, n0 + tl.arange(0, N), X, C, E, ADD)


@triton.jit
def sum_kernel(
    y, ids, add, out, add_t, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out = (add +) the rows of a token's pairs that have an expert. Program (token, tile of columns)."""
    take_turn(EARLY)
    e = tl.program_id(1) * B + tl.arange(0, B)
    sum_rows(y, ids, add, out, add_t, tl.program_id(0).to(tl.int64), e, X, C, E, ADD)


def product_sizes(num_pairs: int, num_experts: int, itemsize: int) -> tuple[Sizes, Sizes]:
    """How the two products are cut: few rows an expert are bound by memory, many by products."""
    a_share = num_pairs / num_experts
    if itemsize == 4:
        return Sizes(16, 32, 32, 4, 2), Sizes(16, 32, 32, 4, 2)
    # measured on an H200 at Qwen3-30B-A3B's shape
    if num_pairs <= 64:
        # too few blocks to fill the device: more programs for each
        return Sizes(16, 32, 128, 4, 4), Sizes(16, 64, 128, 4, 4)
    if a_share <= 24:
        return Sizes(16, 64, 64, 4, 4), Sizes(16, 128, 64, 4, 4)
    if a_share <= 96:
        return Sizes(64, 64, 64, 4, 4), Sizes(64, 128, 64, 4, 4)
    return Sizes(128, 128, 64, 8, 3), Sizes(128, 256, 64, 8, 3)


def read_by(cut: Sizes, w: Tensor) -> Tensor | TensorDescriptor:
    """A weight whose last two axes but those of size 2 are tiled, as `cut.way` reads it."""
    if cut.way != "described":
        return w
    tile = [1, cut.depth, *[1] * (w.ndim - 3), cut.columns]
    return TensorDescriptor(w, list(w.shape), list(w.stride()), tile)


def constants_of(cut: Sizes, blocks: Blocks, programs: int, device: torch.device) -> dict[str, Any]:
    """What both products are compiled with."""
    return {
        "M": cut.rows, "N": cut.columns, "K": cut.depth, "DIRECT": blocks.direct, "WAY": cut.way, "ONCE": cut.once,
        "HALVES": cut.halves, "AHEAD": cut.ahead, "num_warps": cut.warps, "num_stages": cut.stages,
        **early(device, 1 if cut.ahead else programs),
    }  # fmt: skip


def up(x_TE: Tensor, gate_up_XEXF: Tensor, blocks: Blocks, act_PF: Tensor, chosen: int, cut: Sizes) -> None:
    """Fills act_PF, rows in sorted order: silu(gate) * up."""
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    programs = blocks.num_blocks * triton.cdiv(size, cut.columns)
    up_kernel[(programs,)](
        x_TE, read_by(cut, gate_up_XEXF), act_PF, blocks.order_P, blocks.table, x_TE.stride(0),
        X=num_experts, C=chosen, E=embed_dim, F=size, **constants_of(cut, blocks, programs, x_TE.device),
    )  # fmt: skip


def down(
    act_PF: Tensor, down_XFE: Tensor, weights_TC: Tensor, blocks: Blocks, y_PE: Tensor, add_TE: Tensor | None,
    out_TE: Tensor, cut: Sizes,
) -> None:  # fmt: skip
    """Fills y_PE, a row a pair; and out_TE with the sums of these, if the blocks are direct."""
    num_experts, size, embed_dim = down_XFE.shape
    tiles = triton.cdiv(embed_dim, cut.columns)
    programs, turns = blocks.num_blocks * tiles, blocks.table
    if blocks.direct:
        assert len(out_TE) * tiles <= MOST
        turns = counters(y_PE.device)
    down_kernel[(programs,)](
        act_PF, read_by(cut, down_XFE), weights_TC, y_PE, blocks.order_P, blocks.table,
        out_TE if add_TE is None else add_TE, out_TE, turns, 0 if add_TE is None else add_TE.stride(0),
        X=num_experts, C=weights_TC.shape[1], E=embed_dim, F=size, ADD=add_TE is not None,
        **constants_of(cut, blocks, programs, y_PE.device),
    )  # fmt: skip


def experts(
    x_TE: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_XEXF: Tensor,
    down_XFE: Tensor,
    add_TE: Tensor | None,
    dtype: torch.dtype,
    sizes: tuple[Sizes, Sizes] | None = None,
) -> Tensor:
    """[T, E] of `dtype`: the weighted sum of each token's experts, and `add_TE`. Reference: experts.py.

    Sums are in float32; what an expert makes of a token is rounded to the weights' dtype before it is added up.
    """
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    (num_tokens, chosen), num_pairs, x_TE = ids_TC.shape, ids_TC.numel(), x_TE.to(gate_up_XEXF.dtype)
    first, second = sizes or product_sizes(num_pairs, num_experts, x_TE.element_size())
    assert first.rows == second.rows
    ids_TC = ids_TC.contiguous()
    blocks = sort_pairs(ids_TC, num_experts, first.rows)
    act_PF = torch.empty((num_pairs, size), dtype=x_TE.dtype, device=x_TE.device)
    up(x_TE, gate_up_XEXF, blocks, act_PF, chosen, first)
    y_PE = torch.empty((num_pairs, embed_dim), dtype=x_TE.dtype, device=x_TE.device)
    out_TE = torch.empty((num_tokens, embed_dim), dtype=dtype, device=x_TE.device)
    down(act_PF, down_XFE, weights_TC, blocks, y_PE, add_TE, out_TE, second)
    if not blocks.direct:
        tile = min(SUM_TILE, triton.next_power_of_2(embed_dim))
        tiles = triton.cdiv(embed_dim, tile)
        sum_kernel[(num_tokens, tiles)](
            y_PE, ids_TC, out_TE if add_TE is None else add_TE, out_TE, 0 if add_TE is None else add_TE.stride(0),
            X=num_experts, C=chosen, E=embed_dim, B=tile, ADD=add_TE is not None,
            **early(x_TE.device, num_tokens * tiles),
        )  # fmt: skip
    return out_TE
