"""What the kernels lowered through Triton are made of: a tile of keys, loaded and folded into a running softmax.

Letters: M rows of a product (query x head), N keys of a tile, D padded to a power of two in registers only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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
