"""Norms of q and k, rope, and the write of keys and values as one kernel, in Pallas lowered through Triton.

XLA makes eight kernels a layer of them: two slices of the fused projection, two norms, two rotations, two scatters.
Letters: M rows (token x head of a group: its queries, then its key), H half a head dim, padded to a power of two.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .triton_tiles import CACHES, power_of_two

ORDERS = ("n p k d", "n k p d")
ROWS = 16  # of a program, at most, if a group has no more
FEW = 256  # tokens: up to so many, a program takes one, to keep the device busy


def serves(q_TKGD: jax.Array, new: dict[str, jax.Array], pools: dict[str, jax.Array], order: str, rope: Any) -> bool:
    """Whether rope_write knows these arrays: the plain pools, and whole heads that turn."""
    plain = set(pools) == {"k", "v"} and order in ORDERS and all(x.dtype.name in CACHES for x in pools.values())
    turns = rope is not None and 2 * rope.cos_TD.shape[-1] == q_TKGD.shape[-1]
    return plain and turns and new["v"].shape[-1] == q_TKGD.shape[-1]


def kernel(*refs: Any, order: str, groups: int, tokens: int, eps: float | None, in_place: bool) -> None:
    """Some tokens and one kv head. The pools are the last arguments, and behind q results too if not `in_place`."""
    qkv_ref, cos_ref, sin_ref, block_ref, offset_ref = refs[:5]
    k_pool_ref, v_pool_ref, q_out_ref = refs[-3:] if in_place else (refs[-2], refs[-1], refs[-3])
    num_tokens, dim, head = qkv_ref.shape[0], qkv_ref.shape[-1], pl.program_id(1)
    half, size = dim // 2, power_of_two(dim // 2)
    heads = rows_of(groups)
    row_M, d_H = jnp.arange(tokens * heads), jnp.arange(size)
    token_M, x_M = pl.program_id(0) * tokens + row_M // heads, row_M % heads
    inside_M = token_M < num_tokens
    d_MH, shape = d_H[None, :], (tokens * heads, size)

    def mask(rows_M: jax.Array) -> jax.Array:
        return jnp.broadcast_to(rows_M[:, None], shape) & jnp.broadcast_to(d_MH < half, shape)

    def at(rows_M: jax.Array) -> jax.Array:
        # where masked, past the end: the interpreter writes a masked element back, which must not meet a real one
        return jnp.where(rows_M, token_M, num_tokens)[:, None]

    def both(ref: Any, index: Any, mask_MH: jax.Array) -> list[jax.Array]:
        return [plt.load(ref.at[(*index, d_MH + shift)], mask=mask_MH, other=0.0) for shift in (0, half)]

    is_q_M, is_k_M, is_v_M = inside_M & (x_M < groups), inside_M & (x_M == groups), inside_M & (x_M == groups + 1)
    turned_M = is_q_M | is_k_M
    pair = both(qkv_ref, (at(turned_M), head, x_M[:, None]), mask(turned_M))
    a_MH, b_MH = (x.astype(jnp.float32) for x in pair)
    if eps is not None:
        inverse_M1 = lax.rsqrt(((a_MH * a_MH).sum(1) + (b_MH * b_MH).sum(1)) / dim + eps)[:, None]
        scales = []
        for shift in (0, half):
            q_H, k_H = (
                plt.load(ref.at[d_H + shift], mask=d_H < half, other=0.0).astype(jnp.float32) for ref in refs[5:7]
            )
            scales.append(jnp.where((x_M == groups)[:, None], k_H[None, :], q_H[None, :]))
        # rounded as a norm of its own would
        a_MH, b_MH = ((x * inverse_M1 * s).astype(qkv_ref.dtype).astype(jnp.float32)
                      for x, s in zip((a_MH, b_MH), scales, strict=True))  # fmt: skip
    cos_MH, sin_MH = (
        plt.load(ref.at[at(turned_M), d_MH], mask=mask(turned_M), other=0.0) for ref in (cos_ref, sin_ref)
    )
    turned = a_MH * cos_MH - b_MH * sin_MH, b_MH * cos_MH + a_MH * sin_MH
    block_M, offset_M = (
        plt.load(ref.at[jnp.where(inside_M, token_M, num_tokens)], mask=inside_M, other=0)
        for ref in (block_ref, offset_ref)
    )

    def write(ref: Any, rows_M: jax.Array, values: Any) -> None:
        blocks = ref.shape[order.split().index("n")]
        place = {"n": jnp.where(rows_M, block_M, blocks)[:, None], "p": offset_M[:, None], "k": head}
        index = tuple(place[a] for a in order.split()[:-1])
        for shift, x_MH in zip((0, half), values, strict=True):
            # rounded as the arrays of a layer are, then as the cache is
            plt.store(ref.at[(*index, d_MH + shift)], x_MH.astype(qkv_ref.dtype).astype(ref.dtype), mask=mask(rows_M))

    for shift, x_MH in zip((0, half), turned, strict=True):
        place = q_out_ref.at[at(is_q_M), head, x_M[:, None], d_MH + shift]
        plt.store(place, x_MH.astype(q_out_ref.dtype), mask=mask(is_q_M))
    write(k_pool_ref, is_k_M, turned)
    write(v_pool_ref, is_v_M, both(qkv_ref, (at(is_v_M), head, x_M[:, None]), mask(is_v_M)))


def rows_of(groups: int) -> int:
    """Rows of a token: room for its queries, its key and its value."""
    return 1 << (groups + 1).bit_length()


def rope_write(
    qkv_TKXD: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    pools: dict[str, jax.Array],
    blocks_T: jax.Array,
    offsets_T: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    *,
    order: str,
    eps: float | None,
    interpret: bool = False,
    in_place: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """q [T, K, G, D] turned, and the pools with keys (turned) and values at their slots. Consumes the pools.

    `qkv_TKXD` holds of each kv head its queries, its key, its value. With `scales` (of q, of k), q and k are normed
    first, with `eps`. Reference: JaxOps.qk_norm and the plain JaxOps.rope_write; the same to the last rounding.

    `in_place` is not known to XLA: the pools that come back are those that were given, and the kernel has changed them.
    Right only where nobody reads them before q is there, and nobody wants the old ones. Arrays that go in and come out
    of a program cost the host more than anything else in a step (decision 022).
    """
    q, *changed = _launch(
        qkv_TKXD, cos_TH, sin_TH, pools["k"], pools["v"], blocks_T, offsets_T, scales,
        order=order, eps=eps, interpret=interpret, in_place=in_place,
    )  # fmt: skip
    return q, pools if in_place else dict(zip(("k", "v"), changed, strict=True))


# a program of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("order", "eps", "interpret", "in_place"))
def _launch(
    qkv_TKXD: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array, k_pool: jax.Array, v_pool: jax.Array,
    blocks_T: jax.Array, offsets_T: jax.Array, scales: Any, *, order: str, eps: float | None, interpret: bool,
    in_place: bool,
) -> Any:  # fmt: skip
    """q, and if not `in_place` both pools."""
    num_tokens, num_heads, groups, dim = (*qkv_TKXD.shape[:2], qkv_TKXD.shape[2] - 2, qkv_TKXD.shape[3])
    rows = rows_of(groups)
    tokens = 1 if num_tokens <= FEW else max(1, ROWS // rows)
    body = functools.partial(
        kernel, order=order, groups=groups, tokens=tokens, eps=eps if scales else None, in_place=in_place
    )
    arguments = [qkv_TKXD, cos_TH, sin_TH, blocks_T, offsets_T, *(scales or ())]
    at = len(arguments)
    q_out = jax.ShapeDtypeStruct((num_tokens, num_heads, groups, dim), qkv_TKXD.dtype)
    pool_outs = () if in_place else tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pool, v_pool))
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(num_tokens, tokens), num_heads),
        out_shape=(q_out, *pool_outs),
        input_output_aliases={} if in_place else {at: 1, at + 1: 2},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1 if tokens * rows <= 8 else 4, num_stages=1),
        name="rope_write",
    )(*arguments, k_pool, v_pool)


def joined(q_TKGD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array) -> jax.Array:
    """[T, K, G + 2, D]: where the parts were slices of such an array, XLA takes that one and copies nothing."""
    return jnp.concatenate([q_TKGD, k_TKD[:, :, None], v_TKD[:, :, None]], 2)
