"""A prefix that sequences share, read once for all of them, and joined with what each has of its own (Pallas, Triton).

The queries of a tile's members are rows of one product with the first blocks of the first member: high reuse, where
decode would read those blocks once a sequence. Letters: W tiles, C members of a tile, Z parts; see triton_tiles.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .ragged import Prefixes, split_count
from .reference import HIDDEN
from .triton_tiles import (
    Keys,
    Sizes,
    attend_tile,
    load,
    mask_of,
    over_last,
    power_of_two,
    prefill_sizes,
    put_row,
    start,
)

FILL = 256  # programs that keep the device busy


def kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, member_ref: Any, length_ref: Any, token_ref: Any,
    out_ref: Any, top_ref: Any, sum_ref: Any, *, spec: Any, order: str, sizes: Sizes, queries: int,
) -> None:  # fmt: skip
    """Some members of a tile, one kv head, one part of the shared keys: partial outputs, in their sequences' places."""
    head, part, groups, n = pl.program_id(1), pl.program_id(2), spec.group_size, sizes.keys
    size, num_seqs = member_ref.shape[1], token_ref.shape[0]
    pieces = pl.cdiv(size, queries)
    tile, first = pl.program_id(0) // pieces, pl.program_id(0) % pieces * queries
    row_M, d_D = jnp.arange(sizes.rows), jnp.arange(power_of_two(spec.k_dim))
    place_M, group_M = first + row_M // groups, row_M % groups
    inside_M = (row_M // groups < queries) & (place_M < size)
    seq_M = plt.load(member_ref.at[tile, place_M], mask=inside_M, other=-1)
    real_M = inside_M & (seq_M >= 0)
    token_M = plt.load(token_ref.at[seq_M], mask=real_M, other=0)
    at = q_ref.at[token_M[:, None], head, group_M[:, None], d_D[None, :]]
    q_MD = load(at, real_M, d_D, spec.k_dim, sizes.rows)
    # where masked, past the end: the interpreter writes a masked element back, which must not meet a real one
    seq_M = jnp.where(real_M, seq_M, num_seqs)
    keys = Keys(k_ref, v_ref, table_ref, order, jnp.maximum(member_ref[tile, 0], 0), head)
    # a piece of a tile without members reads nothing
    length = jnp.where(member_ref[tile, first] >= 0, length_ref[tile], 0)
    share = pl.cdiv(pl.cdiv(length, pl.num_programs(2)), n) * n
    low = part * share
    high = jnp.minimum(low + share, length)

    def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
        key_N = low + j * n + jnp.arange(n)
        seen_N = key_N < high
        seen = (seen_N, jnp.broadcast_to(seen_N[None, :], (sizes.rows, n))) if masked else None
        return attend_tile(carry, q_MD, keys, spec, key_N, seen)

    count = jnp.maximum(high - low, 0)
    carry = start(sizes.rows, spec.v_dim, None)
    carry = lax.fori_loop(0, count // n, functools.partial(step, masked=False), carry)
    top_M, sum_M, out_MD = lax.fori_loop(count // n, pl.cdiv(count, n), functools.partial(step, masked=True), carry)
    dv_D = jnp.arange(power_of_two(spec.v_dim))
    mask_MD = mask_of(real_M, dv_D, spec.v_dim, sizes.rows)
    plt.store(out_ref.at[seq_M[:, None], head, part, group_M[:, None], dv_D[None, :]], out_MD, mask=mask_MD)
    plt.store(top_ref.at[seq_M, head, part, group_M], top_M, mask=real_M)
    plt.store(sum_ref.at[seq_M, head, part, group_M], sum_M, mask=real_M)


def attend(
    q_TKGD: jax.Array, k: jax.Array, v: jax.Array, table_SB: jax.Array, prefixes: Prefixes, *, order: str, spec: Any,
    interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Outputs [S, K, Z, G, Dv] not yet divided, maxima and sums [S, K, Z, G]. Of who shares nothing, never written."""
    (num_tiles, size), num_heads, groups = prefixes.members_WC.shape, *q_TKGD.shape[1:3]
    sizes = prefill_sizes(spec, k.dtype.itemsize)
    sizes = sizes._replace(rows=min(sizes.rows, power_of_two(size * groups)))
    queries = min(size, sizes.rows // groups)
    num_seqs = prefixes.token_S.shape[0]
    parts = split_count(pl.cdiv(num_seqs, queries), num_heads, FILL, 16)
    some = (num_seqs, num_heads, parts, groups)
    return pl.pallas_call(
        functools.partial(kernel, spec=spec, order=order, sizes=sizes, queries=queries),
        grid=(num_tiles * pl.cdiv(size, queries), num_heads, parts),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*some, spec.v_dim), some, some)],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="shared_prefix",
    )(q_TKGD, k, v, table_SB, *prefixes[:3])


def join_kernel(own: Any, once: Any, shared: Any, token_ref: Any, others: Any, out_ref: Any, *, v_dim: int) -> None:
    """One row, kv head and query head: its own parts and, where it shares keys, those of the shared ones."""
    seq_ref, prefix_ref = shared
    row, head, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dv_D = jnp.arange(power_of_two(v_dim))

    def joined() -> jax.Array:
        shares, found = prefix_ref[row] > 0, []
        for (out, top, total), at, is_there in ((own, row, None), (once, seq_ref[row], shares)):
            part_Z = jnp.arange(top.shape[2])
            there_Z = None if is_there is None else jnp.broadcast_to(is_there, part_Z.shape)
            top_Z, sum_Z = (
                plt.load(x.at[at, head, part_Z, group], mask=there_Z, other=None if there_Z is None else fill)
                for x, fill in ((top, HIDDEN), (total, 0.0))
            )
            at_ZD = out.at[at, head, part_Z[:, None], group, dv_D[None, :]]
            found.append((top_Z, sum_Z, load(at_ZD, there_Z, dv_D, v_dim, part_Z.shape[0])))
        highest = jnp.maximum(*(jnp.max(top_Z, axis=0) for top_Z, _, _ in found))
        total, out_D = jnp.float32(0), jnp.zeros(dv_D.shape, jnp.float32)
        for top_Z, sum_Z, out_ZD in found:
            weight_Z = jnp.exp2(top_Z - highest)
            total = total + jnp.sum(sum_Z * weight_Z, axis=0)
            out_D = out_D + jnp.sum(out_ZD * weight_Z[:, None], axis=0)
        return out_D / jnp.where(total > 0, total, 1.0)

    put_row(out_ref, token_ref, others, joined, v_dim)


def join(
    own: list[jax.Array], once: list[jax.Array], shared: tuple[jax.Array, jax.Array], token_I: jax.Array, others: Any,
    out: jax.ShapeDtypeStruct, *, interpret: bool,
) -> jax.Array:  # fmt: skip
    """The rows' own parts and, where they share keys, their sequences' parts of those, made one; `out` at their tokens.

    `shared`: the rows' sequences, and how many keys they share. `others`: as put_row takes them, to put these among.
    """
    arguments = (own, once, shared, token_I, others)
    num_rows, num_heads, _, groups = own[1].shape
    return pl.pallas_call(
        functools.partial(join_kernel, v_dim=out.shape[-1]),
        grid=(num_rows, num_heads, groups),
        out_shape=out,
        input_output_aliases={} if others is None else over_last(arguments),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="shared_prefix_join",
    )(*arguments)
