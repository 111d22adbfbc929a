"""Mixtures of experts in Triton: routing, sorting, two grouped products and the sum, each one launch.

Nothing waits for the host, and grids follow from shapes alone, so that a CUDA graph can hold them: a grouped product
has as many blocks as it could need, and those beyond the last one end at once.
Letters: X experts, C chosen ones of a token, P pairs (token, chosen expert), M rows of a block, all of one expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

FEW_PAIRS = 16  # that are not sorted: two tokens seldom go through the same expert
MOST_PAIRS = 2048  # that are sorted by comparing all with all
RANKED = 32  # pairs of a program that sorts
COMPARED = 256  # pairs that it compares them with at a time
LISTED = 128  # blocks that are none, written down at a time
SUM_TILE = 1024


class Sizes(NamedTuple):
    """How a grouped product is cut and launched."""

    rows: int  # M
    columns: int
    depth: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """Pairs sorted by expert, and the blocks they are cut into. Direct: every pair is a block, and none is sorted."""

    order_P: Tensor  # the pairs, those of no expert last; direct: the expert of each
    # [blocks, 3]: expert, first and end of its rows among the sorted. Expert -1: no such block, first and end unwritten
    table: Tensor
    num_blocks: int
    direct: bool = False


@triton.jit
def route_kernel(
    logits, bias, real, weights, ids, scale, logits_t,
    X: tl.constexpr, XP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Scores, the C best experts, the weights of these. A program a token."""
    t, x, c = tl.program_id(0).to(tl.int64), tl.arange(0, XP), tl.arange(0, CP)
    logit = tl.load(logits + t * logits_t + x, mask=x < X, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if BIASED:
        choice += tl.load(bias + x, mask=x < X, other=0.0)
    choice = tl.where(x < X, choice, -float("inf"))
    weight, chosen = tl.zeros((CP,), tl.float32), tl.zeros((CP,), tl.int32)
    for i in tl.static_range(C):
        best = tl.min(tl.where(choice == tl.max(choice, 0), x, XP), 0)
        weight = tl.where(c == i, tl.sum(tl.where(x == best, score, 0.0), 0), weight)
        chosen = tl.where(c == i, best, chosen)
        choice = tl.where(x == best, -float("inf"), choice)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + t * C + c, weight * scale, mask=c < C)
    tl.store(ids + t * C + c, tl.where(tl.load(real + t), chosen, X), mask=c < C)


@triton.jit
def list_blocks(count, table, num_blocks, X: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, L: tl.constexpr):
    """Writes the table of blocks, from how many pairs each expert has. Every expert writes its own, all at once."""
    x = tl.arange(0, XP)
    count = tl.where(x < X, count, 0)
    end, blocks = tl.cumsum(count, 0), (count + M - 1) // M
    first = end - count
    at = tl.cumsum(blocks, 0) - blocks
    for i in range(tl.max(blocks, 0)):
        row, mine = table + (at + i) * 3, i < blocks
        tl.store(row, x, mask=mine)
        tl.store(row + 1, first + i * M, mask=mine)
        tl.store(row + 2, tl.minimum(first + (i + 1) * M, end), mask=mine)
    for b in range(tl.sum(blocks, 0), num_blocks, L):
        rest = b + tl.arange(0, L)
        tl.store(table + rest * 3, -1, mask=rest < num_blocks)


@triton.jit
def sort_kernel(
    ids, order, table, num_pairs, num_blocks,
    X: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    PP: tl.constexpr,
):  # fmt: skip
    """The place of R pairs among all by expert, then by number; the last program writes the table of blocks."""
    i = tl.program_id(0)
    if i < tl.num_programs(0) - 1:
        p = i * R + tl.arange(0, R)
        mine = tl.load(ids + p, mask=p < num_pairs, other=0)
        place = tl.zeros((R,), tl.int32)
        for at in range(0, num_pairs, K):
            q = at + tl.arange(0, K)
            other = tl.load(ids + q, mask=q < num_pairs, other=X + 1)
            before = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (q[None, :] < p[:, None]))
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order + place, p, mask=p < num_pairs)
    else:
        q = tl.arange(0, PP)
        # those of no expert, and those that are none, have a place of their own
        expert = tl.load(ids + q, mask=q < num_pairs, other=X)
        list_blocks(tl.histogram(expert, XP), table, num_blocks, X, XP, M, L)


@triton.jit
def table_kernel(starts, table, num_blocks, X: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, L: tl.constexpr):
    """The table of blocks, of pairs that are sorted already."""
    x = tl.arange(0, XP)
    start = tl.load(starts + x, mask=x < X, other=0)
    end = tl.load(starts + x + 1, mask=x < X, other=0)
    list_blocks(end - start, table, num_blocks, X, XP, M, L)


@triton.jit
def block_of(block, order, table, X: tl.constexpr, M: tl.constexpr, DIRECT: tl.constexpr):
    """(expert or -1, rows [M] among the sorted, which of them are the block's [M], their pairs [M])."""
    if DIRECT:
        expert = tl.load(order + block)
        m = block + tl.arange(0, M)
        live, pair = m == block, m
        expert = tl.where(expert < X, expert, -1)
    else:
        expert = tl.load(table + block * 3)
        m = tl.load(table + block * 3 + 1) + tl.arange(0, M)
        # of no block, the rest of the row was never written: it may bound anything
        live = (m < tl.load(table + block * 3 + 2)) & (expert >= 0)
        pair = tl.load(order + m, mask=live, other=0)
    return expert.to(tl.int64), m, live, pair.to(tl.int64)


@triton.jit
def up_kernel(
    x, w, act, order, table, x_t, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """act = silu(x gate) * (x up), rows in sorted order. Program: a block of rows, N columns of both products."""
    tiles = tl.cdiv(F, N)
    block, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N + tl.arange(0, N)
    expert, m, live, pair = block_of(block, order, table, X, M, DIRECT)
    if expert >= 0:
        token = pair // C
        k = tl.arange(0, K)
        at_x = x + token[:, None] * x_t + k[None, :]
        at_w = w + expert * E * 2 * F + k[:, None].to(tl.int64) * 2 * F + n[None, :]
        gate, up = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
        for left in range(E, 0, -K):
            a = tl.load(at_x, mask=live[:, None] & (k < left)[None, :], other=0.0)
            inside = (k < left)[:, None] & (n < F)[None, :]
            gate = tl.dot(a, tl.load(at_w, mask=inside, other=0.0), gate, input_precision="ieee")
            up = tl.dot(a, tl.load(at_w + F, mask=inside, other=0.0), up, input_precision="ieee")
            at_x += K
            at_w += K * 2 * F
        y = gate / (1 + tl.exp(-gate)) * up
        to = act + m[:, None].to(tl.int64) * F + n[None, :]
        tl.store(to, y.to(act.dtype.element_ty), mask=live[:, None] & (n < F)[None, :])


@triton.jit
def down_kernel(
    act, w, weights, y, order, table, X: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """y = weight * (act down), a row a pair, in the order of pairs. Program: a block of rows, N columns."""
    tiles = tl.cdiv(E, N)
    block, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N + tl.arange(0, N)
    expert, m, live, pair = block_of(block, order, table, X, M, DIRECT)
    if expert >= 0:
        k = tl.arange(0, K)
        at_a = act + m[:, None].to(tl.int64) * F + k[None, :]
        at_w = w + expert * F * E + k[:, None].to(tl.int64) * E + n[None, :]
        total = tl.zeros((M, N), tl.float32)
        for left in range(F, 0, -K):
            a = tl.load(at_a, mask=live[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(at_w, mask=(k < left)[:, None] & (n < E)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            at_a += K
            at_w += K * E
        total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
        to = y + pair[:, None] * E + n[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & (n < E)[None, :])


@triton.jit
def sum_kernel(
    y, ids, add, out, add_t, X: tl.constexpr, C: tl.constexpr, E: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr
):
    """out = (add +) the rows of a token's pairs that have an expert. Program (token, tile of columns)."""
    t, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for c in tl.static_range(C):
        here = tl.load(ids + t * C + c) < X
        total += tl.load(y + (t * C + c) * E + e, mask=here & (e < E), other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(add + t * add_t + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out + t * E + e, total.to(out.dtype.element_ty), mask=e < E)


def routes(routing: Any) -> bool:
    """Whether `route` knows the routing: groups it does not."""
    return routing.num_groups == routing.num_top_groups


def route(logits_TX: Tensor, routing: Any, bias_X: Tensor | None, real_T: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [T, C], float32; experts [T, C], int32, X for padding). Reference: models/moe.py."""
    num_tokens, num_experts = logits_TX.shape
    chosen, device = routing.num_chosen, logits_TX.device
    weights_TC = torch.empty((num_tokens, chosen), dtype=torch.float32, device=device)
    ids_TC = torch.empty((num_tokens, chosen), dtype=torch.int32, device=device)
    route_kernel[(num_tokens,)](
        logits_TX, logits_TX if bias_X is None else bias_X, real_T, weights_TC, ids_TC, routing.scale,
        logits_TX.stride(0), X=num_experts, XP=triton.next_power_of_2(num_experts), C=chosen,
        CP=triton.next_power_of_2(chosen), SIGMOID=routing.scoring == "sigmoid", NORMALISE=routing.normalise,
        BIASED=bias_X is not None, num_warps=1,
    )  # fmt: skip
    return weights_TC, ids_TC


def sort_pairs(ids_TC: Tensor, num_experts: int, rows: int) -> Blocks:
    """The pairs by expert, and blocks of at most `rows` of one expert each."""
    num_pairs, device = ids_TC.numel(), ids_TC.device
    if num_pairs <= FEW_PAIRS:
        return Blocks(ids_TC, ids_TC, num_pairs, direct=True)
    num_blocks = num_pairs // rows + min(num_pairs, num_experts)
    table = torch.empty((num_blocks, 3), dtype=torch.int32, device=device)
    sizes: dict[str, Any] = {"X": num_experts, "XP": triton.next_power_of_2(num_experts + 1), "M": rows, "L": LISTED}
    if num_pairs <= MOST_PAIRS:
        order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
        programs = triton.cdiv(num_pairs, RANKED) + 1
        # one for each thread at least: what several threads hold might be counted by each
        padded = max(128, triton.next_power_of_2(num_pairs))
        compared = min(COMPARED, max(16, triton.next_power_of_2(num_pairs)))
        sort_kernel[(programs,)](
            ids_TC, order_P, table, num_pairs, num_blocks, R=RANKED, K=compared, PP=padded, **sizes
        )
        return Blocks(order_P, table, num_blocks)
    sorted_P, order_P = torch.sort(ids_TC.reshape(-1), stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    table_kernel[(1,)](torch.searchsorted(sorted_P, experts, out_int32=True), table, num_blocks, **sizes)
    return Blocks(order_P.to(torch.int32), table, num_blocks)


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
    up_kernel[(blocks.num_blocks * triton.cdiv(size, first.columns),)](
        x_TE, gate_up_XEXF, act_PF, blocks.order_P, blocks.table, x_TE.stride(0),
        X=num_experts, C=chosen, E=embed_dim, F=size, DIRECT=blocks.direct,
        M=first.rows, N=first.columns, K=first.depth, num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    y_PE = torch.empty((num_pairs, embed_dim), dtype=x_TE.dtype, device=x_TE.device)
    down_kernel[(blocks.num_blocks * triton.cdiv(embed_dim, second.columns),)](
        act_PF, down_XFE, weights_TC, y_PE, blocks.order_P, blocks.table, X=num_experts, E=embed_dim, F=size,
        DIRECT=blocks.direct, M=second.rows, N=second.columns, K=second.depth,
        num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip
    out_TE = torch.empty((num_tokens, embed_dim), dtype=dtype, device=x_TE.device)
    tile = min(SUM_TILE, triton.next_power_of_2(embed_dim))
    sum_kernel[(num_tokens, triton.cdiv(embed_dim, tile))](
        y_PE, ids_TC, out_TE if add_TE is None else add_TE, out_TE, 0 if add_TE is None else add_TE.stride(0),
        X=num_experts, C=chosen, E=embed_dim, B=tile, ADD=add_TE is not None,
    )  # fmt: skip
    return out_TE
