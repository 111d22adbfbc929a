"""A prefix that sequences share, read once for all of them: the first half of attention in two parts (Triton).

The queries of a tile's members are rows against the leader's first blocks, a dense product with high reuse. What comes
out are partial sums behind those that `decode` leaves of each sequence's own keys; `reduce` puts all of them together
by their peaks. Letters as in attention_kernels.py; W tiles, C members of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .attention_kernels import NEVER, WHOLE, attend_tiles, share
from .sizes import next_power_of_2

Tensor = torch.Tensor

FILL = 2  # programs a multiprocessor that a step in which all share one prefix should have
MAX_PARTS = 32  # of a sequence: half at most of what it shares, half of its own


@triton.jit(do_not_specialize=["table_s", "num_splits", "num_parts"])
def prefix(
    q, k, v, tables, starts, members, lengths, parts, peaks, sums, scale, factor, table_s, num_splits, num_parts,
    k_scale, v_scale,
    Q_T: tl.constexpr, Q_K: tl.constexpr, Q_G: tl.constexpr, K_N: tl.constexpr, K_P: tl.constexpr, K_K: tl.constexpr,
    V_N: tl.constexpr, V_P: tl.constexpr, V_K: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    CAP: tl.constexpr, LEAST: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Program (kv head, M rows of a tile, split). Parts from num_splits on are made here, of a tile's members alone."""
    h, z = tl.program_id(0), tl.program_id(2)
    w, first = tl.program_id(1) * M // (C * GP), tl.program_id(1) * (M // GP) % C
    _, each = share(tl.load(lengths + w), 0, tl.num_programs(2), WHOLE, LEAST)
    lo = z * each
    hi = tl.minimum(lo + each, tl.load(lengths + w))
    m, d, e = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, VP)
    g_M = m % GP
    # in tiles of few members, most programs have none
    if (lo < hi) & (tl.load(members + w * C + first) >= 0):
        seq_M = tl.load(members + w * C + first + m // GP)
        own_M = (seq_M >= 0) & (g_M < G)
        t_M = tl.load(starts + seq_M, mask=own_M, other=0).to(tl.int64)
        q_MD = tl.load(
            q + (t_M * Q_T + h * Q_K + g_M * Q_G)[:, None] + d[None, :],
            mask=own_M[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        peak_M, sum_M = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc_MV, position_M = tl.zeros([M, VP], tl.float32), tl.full([M], 0, tl.int32) + hi
        table, whole = tables + tl.load(members + w * C).to(tl.int64) * table_s, hi // N * N
        acc_MV, peak_M, sum_M = attend_tiles(
            acc_MV, peak_M, sum_M, q_MD, k + h * K_K, v + h * V_K, k_scale + h * (K_K // D),
            v_scale + h * (V_K // V), table, position_M, lo, whole, 0, scale, factor,
            K_N, K_P, V_N, V_P, D, V, P, 0, CAP, False, N, DP, VP, FAR, PRECISION, SCALED,
        )  # fmt: skip
        acc_MV, peak_M, sum_M = attend_tiles(
            acc_MV, peak_M, sum_M, q_MD, k + h * K_K, v + h * V_K, k_scale + h * (K_K // D),
            v_scale + h * (V_K // V), table, position_M, whole, hi, 0, scale, factor,
            K_N, K_P, V_N, V_P, D, V, P, 0, CAP, True, N, DP, VP, FAR, PRECISION, SCALED,
        )  # fmt: skip
        row_M = ((seq_M.to(tl.int64) * K + h) * G + g_M) * num_parts + num_splits + z
        tl.store(parts + row_M[:, None] * VP + e[None, :], acc_MV, mask=own_M[:, None])
        tl.store(peaks + row_M, peak_M, mask=own_M)
        tl.store(sums + row_M, sum_M, mask=own_M)


def num_splits(programs: int, keys: int, processors: int, least: int) -> int:
    """How many programs share a tile's keys, of which each has `least`, or all. `programs`: full tiles times heads."""
    return max(1, min(MAX_PARTS // 2, FILL * processors // max(1, programs), -(-keys // least)))


def launch(
    q: Tensor, k: Tensor, v: Tensor, step: Any, parts: Tensor, peaks: Tensor, sums: Tensor,
    splits: int, num_parts: int, scale: float, factor: float, constants: dict[str, Any], tiling: Any, least: int,
) -> None:  # fmt: skip
    """The parts of the shared prefixes, behind the `splits` that each sequence has of its own."""
    shared, tables, group = step.shared, step.block_tables_SB, next_power_of_2(q.shape[2])
    tiles, size = shared.members_WC.shape
    grid = (q.shape[1], tiles * size * group // tiling.rows, num_parts - splits)
    prefix[grid](
        q, k, v, tables, step.query_starts_S1, shared.members_WC, shared.lengths_W, parts, peaks, sums,
        scale, factor, tables.stride(0), splits, num_parts,
        **{name: x for name, x in constants.items() if name != "WINDOW"}, LEAST=least, GP=group, C=size,
        M=tiling.rows, N=tiling.keys, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
