"""Attention of a step of one token: norms of heads, rope, the write of its key and value and decode, in one launch.

What earlier steps left in the cache depends on no kernel of this step. So a program asks for its keys and values before
its turn (early.py); behind it comes only the new token, which is read from its arrays and not from the cache. With two
sequences it would not be so: one may read what the other writes in the same step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .attention_kernels import NEVER, share
from .early import early, take_turn
from .fused import PLACES
from .sizes import cdiv, next_power_of_2
from .triton_attention import factor_of

Tensor = torch.Tensor

KEYS = 16  # of a tile: a program is one warp, whose sums need no shared memory
MAX_SPLITS = 64
WIDE = 32  # numbers of a head that a program puts together
MOST_BYTES, MOST_GROUP = 256, 4  # of a head; queries of a kv head: what a warp's registers hold
MOST_KEYS = 8192  # that a block table has room for: beyond, decode's own tiles are better


@triton.jit
def turned(x, scale, d_D, cos_D, sin_D, eps, D: tl.constexpr, NORM: tl.constexpr, TO: tl.constexpr):
    """A head through its norm and rope, each rounded; sin_D has its sign."""
    other_D = (d_D + D // 2) % D
    a_D, b_D = tl.load(x + d_D).to(tl.float32), tl.load(x + other_D).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(a_D * a_D, 0) / D + eps)
        a_D = (a_D * factor * tl.load(scale + d_D).to(tl.float32)).to(TO).to(tl.float32)
        b_D = (b_D * factor * tl.load(scale + other_D).to(tl.float32)).to(TO).to(tl.float32)
    return (a_D * cos_D + b_D * sin_D).to(TO)


@triton.jit
def tile_of(pool, table, at_N, hi, d_D, P: tl.constexpr, OF_N: tl.constexpr, OF_P: tl.constexpr):
    """[N, D] of keys or values of one head at places at_N below hi. Not from a multiprocessor's own cache."""
    there_N = at_N < hi
    block_N = tl.load(table + at_N // P, mask=there_N, other=0, cache_modifier=".cg").to(tl.int64)
    place_ND = pool + (block_N * OF_N + at_N % P * OF_P)[:, None] + d_D[None, :]
    return tl.load(place_ND, mask=there_N[:, None], other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_parts"])
def decode(
    q, k, v, q_scale, k_scale, cos, sin, block, offset, k_pool, v_pool, table, lengths, parts, peaks, sums,
    eps, factor, num_parts,
    Q_K: tl.constexpr, Q_G: tl.constexpr, NEW_K: tl.constexpr, NEW_V: tl.constexpr,
    K_N: tl.constexpr, K_P: tl.constexpr, K_K: tl.constexpr, V_N: tl.constexpr, V_P: tl.constexpr, V_K: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The new key and value put into their slot, and partial sums of the heads of a group. Program (kv head, split).

    A split without keys leaves nothing.
    """
    h, z = tl.program_id(0), tl.program_id(1)
    n_N, d_D = tl.arange(0, N), tl.arange(0, D)
    length = tl.load(lengths, cache_modifier=".cg")
    _, each = share(length, 0, num_parts, N, N)
    lo = z * each
    hi, own = tl.minimum(lo + each, length - 1), length <= lo + each
    k_ND = tile_of(k_pool + h * K_K, table, lo + n_N, hi, d_D, P, K_N, K_P)
    v_ND = tile_of(v_pool + h * V_K, table, lo + n_N, hi, d_D, P, V_N, V_P)
    take_turn(EARLY)
    if lo < length:
        TO: tl.constexpr = k_pool.dtype.element_ty
        cos_D, sin_D = tl.load(cos + d_D % (D // 2)), tl.load(sin + d_D % (D // 2))
        sin_D = tl.where(d_D < D // 2, -sin_D, sin_D)
        new_k_D = turned(k + h * NEW_K, k_scale, d_D, cos_D, sin_D, eps, D, NORM, TO)
        new_v_D = tl.load(v + h * NEW_V + d_D)
        if own:
            to, at = tl.load(block).to(tl.int64), tl.load(offset)
            tl.store(k_pool + to * K_N + at * K_P + h * K_K + d_D, new_k_D)
            tl.store(v_pool + to * V_N + at * V_P + h * V_K + d_D, new_v_D)
        queries, tops, totals, accs = (), (), (), ()
        for g in tl.static_range(G):
            q_D = turned(q + h * Q_K + g * Q_G, q_scale, d_D, cos_D, sin_D, eps, D, NORM, TO).to(tl.float32)
            queries = queries + (q_D,)
            tops = tops + (tl.where(own, tl.sum(q_D * new_k_D.to(tl.float32), 0) * factor, NEVER),)
            totals = totals + (tl.where(own, 1.0, 0.0),)
            accs = accs + (tl.where(own, new_v_D.to(tl.float32), 0.0),)
        for j in tl.range(lo, hi, N, num_stages=1):
            next_k_ND = tile_of(k_pool + h * K_K, table, j + N + n_N, hi, d_D, P, K_N, K_P)
            next_v_ND = tile_of(v_pool + h * V_K, table, j + N + n_N, hi, d_D, P, V_N, V_P)
            new_tops, new_totals, new_accs = (), (), ()
            for g in tl.static_range(G):
                s_N = tl.sum(k_ND.to(tl.float32) * queries[g][None, :], 1) * factor
                s_N = tl.where(j + n_N < hi, s_N, float("-inf"))
                top = tl.maximum(tops[g], tl.max(s_N, 0))
                keep, p_N = tl.exp2(tops[g] - top), tl.exp2(s_N - top)
                new_tops = new_tops + (top,)
                new_totals = new_totals + (totals[g] * keep + tl.sum(p_N, 0),)
                new_accs = new_accs + (accs[g] * keep + tl.sum(p_N[:, None] * v_ND.to(tl.float32), 0),)
            tops, totals, accs = new_tops, new_totals, new_accs
            k_ND, v_ND = next_k_ND, next_v_ND
        for g in tl.static_range(G):
            row = (h * G + g) * num_parts + z
            tl.store(parts + row * D + d_D, accs[g])
            tl.store(peaks + row, tops[g])
            tl.store(sums + row, totals[g])


@triton.jit(do_not_specialize=["num_parts"])
def reduce(
    parts, peaks, sums, lengths, out, num_parts,
    D: tl.constexpr, W: tl.constexpr, Z: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits of decode put together. Program (head, W of its numbers)."""
    h, e_W = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    length = tl.load(lengths, cache_modifier=".cg")
    _, each = share(length, 0, num_parts, N, N)
    row_Z = h * num_parts + tl.arange(0, Z)
    there_Z = tl.arange(0, Z) * each < length
    take_turn(EARLY)
    peak_Z = tl.load(peaks + row_Z, mask=there_Z, other=NEVER)
    sum_Z = tl.load(sums + row_Z, mask=there_Z, other=0.0)
    part_ZW = tl.load(parts + row_Z[:, None] * D + e_W[None, :], mask=there_Z[:, None], other=0.0)
    weight_Z = tl.exp2(peak_Z - tl.max(peak_Z, 0))
    total = tl.sum(weight_Z * sum_Z, 0)
    # of a step that is all padding there is nothing
    o_W = tl.sum(part_ZW * weight_Z[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + h * D + e_W, o_W.to(out.dtype.element_ty))


def serves(
    q: Tensor, new: dict[str, Tensor], rope: Any, pools: dict[str, Tensor], order: str, step: Any, spec: Any,
    sinks: Tensor | None,
) -> bool:  # fmt: skip
    """Whether this is a step of one token, of plain attention over a cache that is not too long."""
    alone = len(q) == len(step.block_tables_SB) == 1 and step.decode and step.shared is None
    if not alone or rope is None or sinks is not None or set(pools) != {"k", "v"} or order not in PLACES:
        return False
    k, v, dim = pools["k"], pools["v"], spec.k_dim
    keys = step.block_tables_SB.shape[1] * k.shape[PLACES[order][1]]
    plain = spec.window is None and not spec.softcap and spec.v_dim == dim and keys <= MOST_KEYS
    fits = dim in (16, 32, 64, 128) and dim * q.element_size() <= MOST_BYTES and spec.group_size <= MOST_GROUP
    together = all(x.stride(-1) == 1 for x in (q, new["k"], new["v"], k, v))
    return plain and fits and together and q.dtype == k.dtype == v.dtype


def attend(
    q: Tensor, new: dict[str, Tensor], rope: Any, pools: dict[str, Tensor], order: str, step: Any, spec: Any,
    norm: tuple[Tensor, Tensor, float] | None,
) -> Tensor:  # fmt: skip
    """Attention of the step's token, [1, K, G, D], whose key and value are put into the pools."""
    n, p, h = PLACES[order]
    (_, heads, group, dim), k, v, table = q.shape, pools["k"], pools["v"], step.block_tables_SB
    keys = table.shape[1] * k.shape[p]
    splits = min(MAX_SPLITS, cdiv(keys, KEYS))
    out, num = torch.empty_like(q, memory_format=torch.contiguous_format), heads * group * splits
    parts = torch.empty((num, dim), dtype=torch.float32, device=q.device)
    peaks, sums = torch.empty((2, num), dtype=torch.float32, device=q.device)
    q_scale, k_scale, eps = norm or (q, q, 0.0)
    decode[(heads, splits)](
        q, new["k"], new["v"], q_scale, k_scale, rope.cos_TD, rope.sin_TD, step.blocks_T, step.offsets_T, k, v, table,
        step.lengths_S, parts, peaks, sums, eps, factor_of(spec), splits,
        *q.stride()[1:3], new["k"].stride(1), new["v"].stride(1),
        k.stride(n), k.stride(p), k.stride(h), v.stride(n), v.stride(p), v.stride(h),
        G=group, D=dim, P=k.shape[p], N=KEYS, NORM=norm is not None, num_warps=1, **early(q.device, heads * splits),
    )  # fmt: skip
    wide = min(WIDE, dim)
    reduce[(heads * group, dim // wide)](
        parts, peaks, sums, step.lengths_S, out, splits, D=dim, W=wide, Z=next_power_of_2(splits), N=KEYS,
        num_warps=1, **early(q.device, heads * group * dim // wide),
    )  # fmt: skip
    return out
