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

from .arrivals import MOST, counters, is_last
from .early import early, hold_turn, take_turn
from .expert_blocks import Blocks, block_of, pairs_of, sort_pairs
from .sizes import cdiv, next_power_of_2

Tensor = torch.Tensor

SUM_TILE = 1024


class Sizes(NamedTuple):
    """How a grouped product is cut and launched."""

    rows: int  # M
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def up_kernel(
    x, w, act, order, table, x_t, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """act = silu(x gate) * (x up), rows in sorted order. Program: a block of rows, N columns of both products."""
    tiles = tl.cdiv(F, N)
    block, n0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    # in this order, for the next kernel looks its block up before its turn
    hold_turn(EARLY)
    expert, first, end = block_of(block, order, table, X, DIRECT)
    EVEN: tl.constexpr = E % K == 0 and F % N == 0
    if expert >= 0:
        m, k, j = first + tl.arange(0, M), tl.arange(0, K), tl.arange(0, 2 * N)
        live, n_both = m < end, n0 + j % N
        at_x = x + (pairs_of(m, live, order, DIRECT) // C)[:, None] * x_t + k[None, :]
        at_w = w + expert.to(tl.int64) * E * 2 * F + k[:, None].to(tl.int64) * 2 * F + (j // N * F + n_both)[None, :]
        # one product with both: of two, each would read the rows for itself
        both = tl.zeros((M, 2 * N), tl.float32)
        for left in range(E, 0, -K):
            if EVEN:
                a, b = tl.load(at_x, mask=live[:, None], other=0.0), tl.load(at_w)
            else:
                a = tl.load(at_x, mask=live[:, None] & (k < left)[None, :], other=0.0)
                b = tl.load(at_w, mask=(k < left)[:, None] & (n_both < F)[None, :], other=0.0)
            both = tl.dot(a, b, both, input_precision="ieee")
            at_x += K
            at_w += K * 2 * F
        gate, up = tl.split(tl.permute(tl.reshape(both, (M, 2, N)), (0, 2, 1)))
        n, y = n0 + tl.arange(0, N), gate / (1 + tl.exp(-gate)) * up
        to = act + m[:, None].to(tl.int64) * F + n[None, :]
        tl.store(to, y.to(act.dtype.element_ty), mask=live[:, None] & (n < F)[None, :])


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
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = weight * (act down), a row a pair, in the order of pairs. Program: a block of rows, N columns.

    Direct: the last of a token's pairs to arrive adds them up. `turns` are zeros then, and are left so.
    """
    tiles = tl.cdiv(E, N)
    block, n0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    expert, first, end = block_of(block, order, table, X, DIRECT)
    take_turn(EARLY)
    n = n0 + tl.arange(0, N)
    EVEN: tl.constexpr = F % K == 0 and E % N == 0
    if expert >= 0:
        m, k = first + tl.arange(0, M), tl.arange(0, K)
        live = m < end
        at_a = act + m[:, None].to(tl.int64) * F + k[None, :]
        at_w = w + expert.to(tl.int64) * F * E + k[:, None].to(tl.int64) * E + n[None, :]
        total = tl.zeros((M, N), tl.float32)
        for left in range(F, 0, -K):
            if EVEN:
                a, b = tl.load(at_a, mask=live[:, None], other=0.0), tl.load(at_w)
            else:
                a = tl.load(at_a, mask=live[:, None] & (k < left)[None, :], other=0.0)
                b = tl.load(at_w, mask=(k < left)[:, None] & (n < E)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            at_a += K
            at_w += K * E
        pair = pairs_of(m, live, order, DIRECT)
        total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
        to = y + pair[:, None] * E + n[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & (n < E)[None, :])
    if DIRECT:
        t = (block // C).to(tl.int64)
        if is_last(turns + t * tiles + n0 // N, C):
            sum_rows(y, order, add, out, add_t, t, n, X, C, E, ADD)


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
    # measured on an H200 at Qwen3-30B-A3B's shape: shares of 4, 16, 52 and 512
    if num_pairs <= 64:
        # too few blocks to fill the device: more programs for each
        return Sizes(16, 64, 128, 8, 5), Sizes(16, 64, 128, 4, 4)
    if a_share <= 24:
        rows = 16 if a_share <= 8 else 32
        return Sizes(rows, 128, 64, 4, 3), Sizes(rows, 128, 64, 4, 4)
    if a_share <= 96:
        return Sizes(64, 64, 64, 4, 3), Sizes(64, 128, 64, 4, 4)
    return Sizes(128, 128, 32, 8, 5), Sizes(128, 128, 64, 8, 3)


def constants_of(cut: Sizes, blocks: Blocks, programs: int, device: torch.device) -> dict[str, Any]:
    """What both products are compiled with."""
    return {
        "M": cut.rows, "N": cut.columns, "K": cut.depth, "DIRECT": blocks.direct, "num_warps": cut.warps,
        "num_stages": cut.stages, **early(device, programs),
    }  # fmt: skip


def up(x_TE: Tensor, gate_up_XEXF: Tensor, blocks: Blocks, act_PF: Tensor, chosen: int, cut: Sizes) -> None:
    """Fills act_PF, rows in sorted order: silu(gate) * up."""
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    programs = blocks.num_blocks * cdiv(size, cut.columns)
    up_kernel[(programs,)](
        x_TE, gate_up_XEXF, act_PF, blocks.order_P, blocks.table, x_TE.stride(0),
        X=num_experts, C=chosen, E=embed_dim, F=size, **constants_of(cut, blocks, programs, x_TE.device),
    )  # fmt: skip


def down(
    act_PF: Tensor, down_XFE: Tensor, weights_TC: Tensor, blocks: Blocks, y_PE: Tensor, add_TE: Tensor | None,
    out_TE: Tensor, cut: Sizes,
) -> None:  # fmt: skip
    """Fills y_PE, a row a pair; and out_TE with the sums of these, if the blocks are direct."""
    num_experts, size, embed_dim = down_XFE.shape
    tiles = cdiv(embed_dim, cut.columns)
    programs, turns = blocks.num_blocks * tiles, blocks.table
    if blocks.direct:
        assert len(out_TE) * tiles <= MOST
        turns = counters(y_PE.device)
    down_kernel[(programs,)](
        act_PF, down_XFE, weights_TC, y_PE, blocks.order_P, blocks.table,
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
        tile = min(SUM_TILE, next_power_of_2(embed_dim))
        tiles = cdiv(embed_dim, tile)
        sum_kernel[(num_tokens, tiles)](
            y_PE, ids_TC, out_TE if add_TE is None else add_TE, out_TE, 0 if add_TE is None else add_TE.stride(0),
            X=num_experts, C=chosen, E=embed_dim, B=tile, ADD=add_TE is not None,
            **early(x_TE.device, num_tokens * tiles),
        )  # fmt: skip
    return out_TE
