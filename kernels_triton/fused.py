"""Small ops in Triton, each one launch: norms, the gate of an MLP, rope with the write of keys and values.

Every sum and product is in fp32, rounded once to what goes out. References: the plain ops of ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .early import early, take_turn
from .sizes import cdiv, next_power_of_2

Tensor = torch.Tensor

PLACES = {order: tuple(order.split().index(a) for a in "npk") for order in ("n p k d", "n k p d")}
GATE_TILE = 1024


@triton.jit
def norm_kernel(
    x, y, scale, total, out, eps, x_r, y_r,
    E: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * scale, or total = x + y and out = norm(total) * scale. A program a row."""
    take_turn(EARLY)
    r, c = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    inside = c < E
    v = tl.load(x + r * x_r + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(y + r * y_r + c, mask=inside, other=0.0).to(tl.float32)
        # what is normed is what is kept
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + r * E + c, rounded, mask=inside)
        v = rounded.to(tl.float32)
    normed = v * tl.rsqrt(tl.sum(v * v, 0) / E + eps) * tl.load(scale + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + r * E + c, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_kernel(
    q, k, q_scale, k_scale, q_out, k_out, eps, q_t, q_k, q_g, k_t, k_k,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, B: tl.constexpr, GP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The heads of q and k normed apart. Program (token, kv head): its group's queries, and its key as one more row."""
    take_turn(EARLY)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GP)[:, None], tl.arange(0, B)[None, :]
    is_q, is_k = (g < G) & (c < D), (g == G) & (c < D)
    v = tl.load(q + t * q_t + h * q_k + g * q_g + c, mask=is_q, other=0.0).to(tl.float32)
    v += tl.load(k + t * k_t + h * k_k + c + 0 * g, mask=is_k, other=0.0).to(tl.float32)
    scale = tl.load(q_scale + c + 0 * g, mask=is_q, other=0.0).to(tl.float32)
    scale += tl.load(k_scale + c + 0 * g, mask=is_k, other=0.0).to(tl.float32)
    normed = (v * tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None] * scale).to(q_out.dtype.element_ty)
    tl.store(q_out + ((t * K + h) * G + g) * D + c, normed, mask=is_q)
    tl.store(k_out + (t * K + h) * D + c + 0 * g, normed, mask=is_k)


@triton.jit
def gate_kernel(x, out, F: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr):
    """silu(gate) * up. Program (row, tile of columns)."""
    take_turn(EARLY)
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    inside = c < F
    gate = tl.load(x + r * 2 * F + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + r * 2 * F + F + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + r * F + c, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_write_kernel(
    q, k, v, q_scale, k_scale, cos, sin, blocks, offsets, q_out, k_pool, v_pool, eps,
    q_t, q_k, q_g, k_t, k_k, v_t, v_k, kp_n, kp_p, kp_k, vp_n, vp_p, vp_k,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr,
    VP: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q and k turned, q put into q_out, k and v into their slots; NORM: each head of q and k is normed before.

    Program (token, kv head), a row for each of its queries, and one for its key.
    """
    take_turn(EARLY)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H: tl.constexpr = D // 2
    g, c, e = tl.arange(0, GP), tl.arange(0, HP)[None, :], tl.arange(0, VP)
    is_q, is_k = (g < G)[:, None] & (c < H), (g == G)[:, None] & (c < H)
    at_q, at_k = q + t * q_t + h * q_k + g[:, None] * q_g + c, k + t * k_t + h * k_k + 0 * g[:, None] + c
    a = tl.load(at_q, mask=is_q, other=0.0).to(tl.float32) + tl.load(at_k, mask=is_k, other=0.0).to(tl.float32)
    b = tl.load(at_q + H, mask=is_q, other=0.0).to(tl.float32) + tl.load(at_k + H, mask=is_k, other=0.0).to(tl.float32)
    turn = tl.load(cos + t * H + c, mask=c < H, other=0.0)
    lift = tl.load(sin + t * H + c, mask=c < H, other=0.0)
    block, offset = tl.load(blocks + t).to(tl.int64), tl.load(offsets + t)
    if NORM:
        d = c + 0 * g[:, None]
        of_a = tl.load(q_scale + d, mask=is_q, other=0.0) + tl.load(k_scale + d, mask=is_k, other=0.0)
        of_b = tl.load(q_scale + H + d, mask=is_q, other=0.0) + tl.load(k_scale + H + d, mask=is_k, other=0.0)
        norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        # rounded as a norm of its own would
        a = (a * norm * of_a.to(tl.float32)).to(q_out.dtype.element_ty).to(tl.float32)
        b = (b * norm * of_b.to(tl.float32)).to(q_out.dtype.element_ty).to(tl.float32)
    first, second = a * turn - b * lift, b * turn + a * lift
    to_q = q_out + ((t * K + h) * G + g[:, None]) * D + c
    to_k = k_pool + block * kp_n + offset * kp_p + h * kp_k + 0 * g[:, None] + c
    tl.store(to_q, first.to(q_out.dtype.element_ty), mask=is_q)
    tl.store(to_q + H, second.to(q_out.dtype.element_ty), mask=is_q)
    # rounded as the arrays of a layer are, then as the cache is
    tl.store(to_k, first.to(k.dtype.element_ty).to(k_pool.dtype.element_ty), mask=is_k)
    tl.store(to_k + H, second.to(k.dtype.element_ty).to(k_pool.dtype.element_ty), mask=is_k)
    value = tl.load(v + t * v_t + h * v_k + e, mask=e < V, other=0.0)
    tl.store(v_pool + block * vp_n + offset * vp_p + h * vp_k + e, value.to(v_pool.dtype.element_ty), mask=e < V)


def empty(shape: Any, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def rows_of(x: Tensor) -> Tensor:
    """x as [rows, E] whose rows are evenly spaced."""
    return x.reshape(-1, x.shape[-1])


def norm_warps(size: int) -> int:
    return max(1, min(8, size // 512))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * scale over the last axis."""
    rows, out = rows_of(x), empty(x.shape, x)
    size = next_power_of_2(x.shape[-1])
    norm_kernel[(len(rows),)](
        rows, rows, scale, rows, out, eps, rows.stride(0), 0,
        E=x.shape[-1], B=size, ADD=False, **early(x.device, len(rows)), num_warps=norm_warps(size),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, y: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its norm)."""
    xs, ys, total, out = rows_of(x), rows_of(y), empty(x.shape, x), empty(x.shape, x)
    size = next_power_of_2(x.shape[-1])
    norm_kernel[(len(xs),)](
        xs, ys, scale, total, out, eps, xs.stride(0), ys.stride(0),
        E=x.shape[-1], B=size, ADD=True, **early(x.device, len(xs)), num_warps=norm_warps(size),
    )  # fmt: skip
    return total, out


def qk_norm(q_TKGD: Tensor, k_TKD: Tensor, q_scale: Tensor, k_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm of each head of q and of k."""
    (num_tokens, heads, group, dim), q_out, k_out = q_TKGD.shape, empty(q_TKGD.shape, q_TKGD), empty(k_TKD.shape, k_TKD)
    qk_norm_kernel[(num_tokens, heads)](
        q_TKGD, k_TKD, q_scale, k_scale, q_out, k_out, eps, *q_TKGD.stride()[:3], *k_TKD.stride()[:2],
        K=heads, G=group, D=dim, B=next_power_of_2(dim), GP=next_power_of_2(group + 1), num_warps=1,
        **early(q_TKGD.device, num_tokens * heads),
    )  # fmt: skip
    return q_out, k_out


def gated_mlp_act(x_TXF: Tensor) -> Tensor:
    """silu(gate) * up."""
    x_TXF = x_TXF.contiguous()
    num_tokens, _, size = x_TXF.shape
    out = empty((num_tokens, size), x_TXF)
    tiles = cdiv(size, GATE_TILE)
    gate_kernel[(num_tokens, tiles)](
        x_TXF, out, F=size, B=GATE_TILE, **early(x_TXF.device, num_tokens * tiles), num_warps=4,
    )  # fmt: skip
    return out


def serves(q_TKGD: Tensor, pools: dict[str, Tensor], order: str, rope: Any) -> bool:
    """Whether rope_write knows these arrays: heads that turn and lie together, and pools of nothing but k and v."""
    return rope is not None and set(pools) == {"k", "v"} and order in PLACES and q_TKGD.stride(-1) == 1


def rope_write(
    q_TKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: Any, k: Tensor, v: Tensor, order: str, step: Any,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """q turned; k turned and v put into the pools k and v, in place, at the step's slots.

    `norm` (scales of q and of k, eps): their heads go through rms_norm first.
    """
    n, p, h = PLACES[order]
    (num_tokens, heads, group, dim), out = q_TKGD.shape, empty(q_TKGD.shape, q_TKGD)
    value_dim, half = v_TKD.shape[-1], next_power_of_2(dim // 2)
    q_scale, k_scale, eps = norm or (q_TKGD, q_TKGD, 0.0)
    rope_write_kernel[(num_tokens, heads)](
        q_TKGD, k_TKD, v_TKD, q_scale, k_scale, rope.cos_TD, rope.sin_TD, step.blocks_T, step.offsets_T, out, k, v,
        eps, *q_TKGD.stride()[:3], *k_TKD.stride()[:2], *v_TKD.stride()[:2],
        k.stride(n), k.stride(p), k.stride(h), v.stride(n), v.stride(p), v.stride(h),
        K=heads, G=group, D=dim, V=value_dim,
        GP=next_power_of_2(group + 1), HP=half, VP=next_power_of_2(value_dim),
        NORM=norm is not None, num_warps=1, **early(q_TKGD.device, num_tokens * heads),
    )  # fmt: skip
    return out
