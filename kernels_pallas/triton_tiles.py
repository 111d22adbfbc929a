"""What the kernels lowered through Triton are made of: a tile of keys, loaded and folded into a running softmax.

Letters: M rows of a product (query x head), N keys of a tile, D padded to a power of two in registers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .ragged import LOG2_E
from .reference import HIDDEN

CACHES = ("float32", "bfloat16", "float16")  # dtypes that they read and write


class Sizes(NamedTuple):
    """How a kernel is cut and launched."""

    rows: int  # M
    keys: int  # N
    warps: int
    stages: int


def decode_sizes(spec: Any, itemsize: int) -> Sizes:
    """Of the decode kernel: bound by memory, so what counts is how many loads are in flight."""
    wide = power_of_two(spec.k_dim) * itemsize
    rows = max(16, power_of_two(spec.group_size))
    # measured on an H200 at 256 bytes a key; wider keys want fewer at a time for the same loads in flight
    return Sizes(rows, 64, 2, 3) if wide <= 256 else Sizes(rows, 32 if wide <= 512 else 16, 4, 3)


def prefill_sizes(spec: Any, itemsize: int) -> Sizes:
    """Of the prefill kernel: bound by products, so tiles are as large as registers and shared memory allow."""
    wide = power_of_two(max(spec.k_dim, spec.v_dim)) * itemsize
    if itemsize == 4:
        return Sizes(max(32, power_of_two(spec.group_size)), 32 if wide <= 512 else 16, 4, 2)
    rows = max(128, power_of_two(spec.group_size))
    return Sizes(rows, 128 if wide <= 256 else 32, 8, 2)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16: the least side of a product."""
    return max(16, 1 << (n - 1).bit_length())


class Keys(NamedTuple):
    """Where a program's keys and values are."""

    k_ref: Any
    v_ref: Any
    table_ref: Any
    order: str
    seq: jax.Array
    head: jax.Array

    def load(self, ref: Any, dim: int, key_N: jax.Array, seen_N: jax.Array | None) -> jax.Array:
        """[N, D] rows of the cache, zeros where not seen (None: all are) and beyond `dim`."""
        size = self.k_ref.shape[self.order.split().index("p")]
        other = None if seen_N is None else 0
        block_N = plt.load(self.table_ref.at[self.seq, key_N // size], mask=seen_N, other=other)
        d_D = jnp.arange(power_of_two(dim))
        at = {"n": block_N[:, None], "p": (key_N % size)[:, None], "k": self.head, "d": d_D[None, :]}
        return load(ref.at[tuple(at[a] for a in self.order.split())], seen_N, d_D, dim, key_N.shape[0])


def load(ref: Any, seen_N: jax.Array | None, d_D: jax.Array, dim: int, rows: int) -> jax.Array:
    """[N, D], zeros where a row is not seen or a column is none; without a mask where none is needed."""
    if seen_N is None and d_D.shape[0] == dim:
        return plt.load(ref)
    return plt.load(ref, mask=mask_of(seen_N, d_D, dim, rows), other=0.0)


def mask_of(seen_N: jax.Array | None, d_D: jax.Array, dim: int, rows: int) -> jax.Array:
    column_ND = jnp.broadcast_to((d_D < dim)[None, :], (rows, d_D.shape[0]))
    return column_ND if seen_N is None else jnp.broadcast_to(seen_N[:, None], column_ND.shape) & column_ND


def product(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """a @ b in float32; float32 operands are not rounded on the way."""
    return plt.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def attend_tile(carry: tuple, q_MD: jax.Array, keys: Keys, spec: Any, key_N: jax.Array, seen: Any) -> tuple:
    """One step of the running maximum and sum (arXiv:2205.14135). `seen` is None or (of keys [N], of scores [M, N])."""
    top_M, sum_M, out_MD = carry
    seen_N, seen_MN = seen or (None, None)
    k_ND = keys.load(keys.k_ref, spec.k_dim, key_N, seen_N)
    v_ND = keys.load(keys.v_ref, spec.v_dim, key_N, seen_N)
    scores_MN = product(q_MD, k_ND, trans_b=True)
    if spec.softcap is None:
        scores_MN = scores_MN * (spec.scale * LOG2_E)
    else:
        scores_MN = jnp.tanh(scores_MN * (spec.scale / spec.softcap)) * (spec.softcap * LOG2_E)
    if seen_MN is not None:
        scores_MN = jnp.where(seen_MN, scores_MN, HIDDEN)
    new_M = jnp.maximum(top_M, scores_MN.max(axis=1))
    shrink_M, weight_MN = jnp.exp2(top_M - new_M), jnp.exp2(scores_MN - new_M[:, None])
    added_MD = product(weight_MN.astype(v_ND.dtype), v_ND)
    return new_M, sum_M * shrink_M + weight_MN.sum(axis=1), out_MD * shrink_M[:, None] + added_MD


def start(rows: int, v_dim: int, sink_M: jax.Array | None) -> tuple:
    """Maximum, sum and output before the first key; a sink is a key without a value."""
    out_MD = jnp.zeros((rows, power_of_two(v_dim)), jnp.float32)
    if sink_M is None:
        return jnp.full((rows,), HIDDEN, jnp.float32), jnp.zeros((rows,), jnp.float32), out_MD
    return sink_M.astype(jnp.float32) * LOG2_E, jnp.ones((rows,), jnp.float32), out_MD


def clear_padding(
    end_ref: Any, num_tokens: int, row: jax.Array, num_rows: Any, put: Callable[[jax.Array], None]
) -> None:
    """put(token), which writes zeros, for the tokens behind the last real one that are the share of this row."""
    first = end_ref[0] + row

    def one(i: jax.Array, _: None) -> None:
        put(first + i * num_rows)

    lax.fori_loop(0, pl.cdiv(jnp.maximum(num_tokens - first, 0), num_rows), one, None)


def put_row(out_ref: Any, token_ref: Any, others: Any, make: Callable[[], jax.Array], v_dim: int) -> None:
    """make(), [Dv], written as the output of a program's row, kv head and query head, at the row's token.

    `others` is None, or (lengths of rows, tokens that are real, outputs) where those of other tokens are there already:
    a row that is none is then written nowhere, and padding is cleared.
    """
    row, head, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dv_D = jnp.arange(power_of_two(v_dim))

    def put(at: jax.Array, out_D: jax.Array) -> None:
        plt.store(out_ref.at[at, head, group, dv_D], out_D.astype(out_ref.dtype), mask=dv_D < v_dim)

    if others is None:
        put(token_ref[row], make())
        return
    length_ref, end_ref, _ = others
    zeros_D = jnp.zeros(dv_D.shape, jnp.float32)
    clear_padding(end_ref, out_ref.shape[0], row, pl.num_programs(0), lambda token: put(token, zeros_D))
    pl.when(length_ref[row] > 0)(lambda: put(token_ref[row], make()))


def over_last(arguments: Any) -> dict[int, int]:
    """pallas_call's input_output_aliases where the one output is written over the last array of the arguments."""
    return {len(jax.tree.leaves(arguments)) - 1: 0}
