"""Pairs (token, chosen expert) sorted by expert, and cut into blocks of rows, each of one expert.

Nothing waits for the host: how many blocks there could be follows from shapes, and those beyond the last one are none.
Letters: X experts, C chosen ones of a token, P pairs, M rows of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .arrivals import counters, is_last
from .early import early, take_turn
from .sizes import cdiv, next_power_of_2

Tensor = torch.Tensor

FEW_PAIRS = 16  # that are not sorted: two tokens seldom go through the same expert
MOST_PAIRS = 2048  # that are sorted by comparing all with all; more are counted by chunks first
RANKED = 32  # pairs of a program that compares
COMPARED = 256  # pairs that it compares them with at a time
CHUNK = 512  # pairs that are counted together
PLACED = 64  # pairs of a chunk that a program places
ADDED = 32  # chunks whose counts are added up at a time
LISTED = 128  # blocks that are none, written down at a time


class Blocks(NamedTuple):
    """Pairs sorted by expert, and the blocks they are cut into. Direct: every pair is a block, and none is sorted."""

    order_P: Tensor  # the pairs, those of no expert last; direct: the expert of each
    # [blocks, 3]: expert, first and end of its rows among the sorted. Expert -1: no such block, first and end unwritten
    table: Tensor
    num_blocks: int
    direct: bool = False


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


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_kernel(
    ids, order, table, num_pairs, num_blocks,
    X: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    PP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The place of R pairs among all by expert, then by number; the last program writes the table of blocks."""
    take_turn(EARLY)
    i = tl.program_id(0)
    if i < tl.num_programs(0) - 1:
        p = i * R + tl.arange(0, R)
        mine = tl.load(ids + p, mask=p < num_pairs, other=0)
        place = tl.zeros((R,), tl.int32)
        for at in range(0, num_pairs, K):
            q = at + tl.arange(0, K)
            other = tl.load(ids + q, mask=q < num_pairs, other=X + 1)
            # summed along the first axis, which threads hold
            before = (other[:, None] < mine[None, :]) | ((other[:, None] == mine[None, :]) & (q[:, None] < p[None, :]))
            place += tl.sum(before.to(tl.int32), 0)
        tl.store(order + place, p, mask=p < num_pairs)
    else:
        q = tl.arange(0, PP)
        # those of no expert, and those that are none, have a place of their own
        expert = tl.load(ids + q, mask=q < num_pairs, other=X)
        list_blocks(tl.histogram(expert, XP), table, num_blocks, X, XP, M, L)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def count_kernel(
    ids, counts, table, turns, num_pairs, num_blocks,
    X: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, J: tl.constexpr, L: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Counts each expert's pairs of a chunk of Q, and in place X those of none. Program: a chunk.

    The last to arrive turns counts [chunks, XP] into the place of a chunk's first pair of each expert among all, and
    writes the table of blocks. `turns` are zeros, and are left so.
    """
    take_turn(EARLY)
    i, chunks, x = tl.program_id(0), tl.num_programs(0), tl.arange(0, XP)
    q = i * Q + tl.arange(0, Q)
    tl.store(counts + i * XP + x, tl.histogram(tl.load(ids + q, mask=q < num_pairs, other=X), XP))
    if is_last(turns, chunks):
        j = tl.arange(0, J)[:, None]
        total = tl.zeros((XP,), tl.int32)
        for c in range(0, chunks, J):
            rows = counts + (c + j) * XP + x[None, :]
            total += tl.sum(tl.load(rows, mask=c + j < chunks, other=0, cache_modifier=".cg"), 0)
        first = tl.cumsum(total, 0) - total
        for c in range(0, chunks, J):
            rows = counts + (c + j) * XP + x[None, :]
            count = tl.load(rows, mask=c + j < chunks, other=0, cache_modifier=".cg")
            tl.store(rows, first[None, :] + tl.cumsum(count, 0) - count, mask=c + j < chunks)
            first += tl.sum(count, 0)
        list_blocks(total, table, num_blocks, X, XP, M, L)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids, firsts, order, num_pairs,
    X: tl.constexpr, XP: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The place of R pairs, from that of their chunk's first pair of the same expert."""
    take_turn(EARLY)
    start = tl.program_id(0) * R
    chunk, p = start // Q, start + tl.arange(0, R)
    mine = tl.load(ids + p, mask=p < num_pairs, other=X)
    place = tl.load(firsts + chunk * XP + mine)
    for at in range(chunk * Q, start + R, K):
        q = at + tl.arange(0, K)
        other = tl.load(ids + q, mask=q < num_pairs, other=X + 1)
        place += tl.sum(((other[:, None] == mine[None, :]) & (q[:, None] < p[None, :])).to(tl.int32), 0)
    tl.store(order + place, p, mask=p < num_pairs)


@triton.jit
def block_of(block, order, table, X: tl.constexpr, DIRECT: tl.constexpr):
    """(expert or -1, first and end of its rows among the sorted). Without an expert, first and end bound nothing."""
    if DIRECT:
        expert, first, end = tl.load(order + block), block, block + 1
        expert = tl.where(expert < X, expert, -1)
    else:
        row = table + block * 3
        expert, first, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    return expert, first, end


@triton.jit
def pairs_of(m, live, order, DIRECT: tl.constexpr):
    """The pairs of rows m among the sorted."""
    pair = m
    if not DIRECT:
        pair = tl.load(order + m, mask=live, other=0)
    return pair.to(tl.int64)


def sort_pairs(ids_TC: Tensor, num_experts: int, rows: int) -> Blocks:
    """The pairs by expert, and blocks of at most `rows` of one expert each."""
    num_pairs, device = ids_TC.numel(), ids_TC.device
    if num_pairs <= FEW_PAIRS:
        return Blocks(ids_TC, ids_TC, num_pairs, direct=True)
    num_blocks = num_pairs // rows + min(num_pairs, num_experts)
    table = torch.empty((num_blocks, 3), dtype=torch.int32, device=device)
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    padded = next_power_of_2(num_experts + 1)
    sizes: dict[str, Any] = {"X": num_experts, "XP": padded, "M": rows, "L": LISTED}
    if num_pairs <= MOST_PAIRS:
        programs = cdiv(num_pairs, RANKED) + 1
        sort_kernel[(programs,)](
            ids_TC, order_P, table, num_pairs, num_blocks, R=RANKED,
            K=min(COMPARED, max(16, next_power_of_2(num_pairs))),
            # one for each thread at least: what several threads hold might be counted by each
            PP=max(128, next_power_of_2(num_pairs)), **sizes, **early(device, programs),
        )  # fmt: skip
    else:
        num_chunks, programs = cdiv(num_pairs, CHUNK), cdiv(num_pairs, PLACED)
        counts = torch.empty((num_chunks, padded), dtype=torch.int32, device=device)
        count_kernel[(num_chunks,)](
            ids_TC, counts, table, counters(device), num_pairs, num_blocks, Q=CHUNK, J=ADDED, **sizes,
            **early(device, num_chunks),
        )  # fmt: skip
        place_kernel[(programs,)](
            ids_TC, counts, order_P, num_pairs, X=num_experts, XP=padded, Q=CHUNK, R=PLACED, K=min(CHUNK, COMPARED),
            **early(device, programs),
        )  # fmt: skip
    return Blocks(order_P, table, num_blocks)
