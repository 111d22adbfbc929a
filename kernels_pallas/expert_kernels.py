"""The two products of a mixture of experts in Pallas, lowered through Triton, until JAX drops that.

Rows are sorted by expert and cut into blocks of one expert each. There are as many blocks as shapes alone could need,
and those beyond the last end at once. Sorting and summing are XLA's.
Letters: X experts, C chosen ones of a token, P pairs (token, chosen expert), B blocks, M rows of a block, N columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .triton_tiles import product

FEW_PAIRS = 16  # that are not sorted: two tokens seldom go through the same expert
MOST_PAIRS = 4096  # that are sorted by comparing all with all, which XLA makes one kernel of


class Sizes(NamedTuple):
    """How a product is cut and launched."""

    rows: int  # M
    columns: int  # N
    depth: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """Pairs sorted by expert, those of no expert last; and each block's expert (-1: it is none), first row and end.

    Few pairs stay in their order, each a block.
    """

    order_P: jax.Array
    expert_B: jax.Array
    first_B: jax.Array
    end_B: jax.Array


def product_sizes(num_pairs: int, num_experts: int, itemsize: int) -> tuple[Sizes, Sizes]:
    """How the two products are cut: few rows an expert are bound by memory, many by products."""
    if itemsize == 4:
        return Sizes(16, 32, 32, 4, 2), Sizes(16, 32, 32, 4, 2)
    # as measured on an H200 at Qwen3-30B-A3B's shape, in kernels_triton
    if num_pairs <= 64:
        return Sizes(16, 64, 128, 4, 5), Sizes(16, 64, 128, 4, 4)
    if num_pairs <= 24 * num_experts:
        rows = 16 if num_pairs <= 8 * num_experts else 32
        return Sizes(rows, 128, 64, 4, 3), Sizes(rows, 128, 64, 4, 4)
    if num_pairs <= 96 * num_experts:
        return Sizes(64, 64, 64, 4, 4), Sizes(64, 128, 64, 4, 4)
    return Sizes(128, 128, 64, 8, 3), Sizes(128, 128, 64, 8, 3)


def sort(ids_P: jax.Array) -> jax.Array:
    """The pairs by expert, in their order within one."""
    pair_P = jnp.arange(ids_P.shape[0], dtype=jnp.int32)
    if pair_P.shape[0] > MOST_PAIRS:
        return jnp.argsort(ids_P, stable=True).astype(jnp.int32)
    same_PP = (ids_P[None] == ids_P[:, None]) & (pair_P[None] < pair_P[:, None])
    place_P = ((ids_P[None] < ids_P[:, None]) | same_PP).sum(1, dtype=jnp.int32)
    return jnp.zeros_like(pair_P).at[place_P].set(pair_P, unique_indices=True)


def cut(ids_TC: jax.Array, num_experts: int, rows: int) -> Blocks:
    """The pairs by expert, and blocks of at most `rows` of one expert each."""
    ids_P = ids_TC.reshape(-1)
    num_pairs = ids_P.shape[0]
    pair_P = jnp.arange(num_pairs, dtype=jnp.int32)
    if num_pairs <= FEW_PAIRS:
        return Blocks(pair_P, jnp.where(ids_P < num_experts, ids_P, -1), pair_P, pair_P + 1)
    order_P = sort(ids_P)
    experts_X = jnp.arange(num_experts, dtype=ids_P.dtype)
    start_X = (ids_P[:, None] < experts_X).sum(0, dtype=jnp.int32)
    count_X = (ids_P[:, None] == experts_X).sum(0, dtype=jnp.int32)
    blocks_X = -(-count_X // rows)
    last_X = jnp.cumsum(blocks_X)
    block_B = jnp.arange(num_pairs // rows + min(num_pairs, num_experts), dtype=jnp.int32)
    expert_B = (last_X[None] <= block_B[:, None]).sum(1, dtype=jnp.int32)
    at_B = jnp.minimum(expert_B, num_experts - 1)
    first_B = start_X[at_B] + (block_B - last_X[at_B] + blocks_X[at_B]) * rows
    end_B = jnp.minimum(first_B + rows, start_X[at_B] + count_X[at_B])
    return Blocks(order_P, jnp.where(expert_B < num_experts, expert_B, -1), first_B, end_B)


def part_of(size: int, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a program of a product makes: (block, its columns [N], which of them are among the `size` there are [N])."""
    tiles = pl.cdiv(size, sizes.columns)
    block, tile = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    column_N = tile * sizes.columns + jnp.arange(sizes.columns)
    return block, column_N, column_N < size


def rows_of(order_ref: Any, first: jax.Array, end: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(places among the sorted [M], which of them are the block's [M], their pairs [M])."""
    place_M = first + jnp.arange(rows)
    live_M = place_M < end
    # where masked, past the end: the interpreter writes a masked element back, which must not meet a real one
    place_M = jnp.where(live_M, place_M, order_ref.shape[0])
    return place_M, live_M, plt.load(order_ref.at[place_M], mask=live_M, other=0)


def load(ref: Any, row_M: jax.Array, column_N: jax.Array, row_mask: Any, column_mask: Any) -> jax.Array:
    return plt.load(ref.at[row_M[:, None], column_N[None, :]], mask=row_mask[:, None] & column_mask[None, :], other=0.0)


def up_kernel(order_ref, expert_ref, first_ref, end_ref, x_ref, w_ref, act_ref, *, chosen: int, sizes: Sizes) -> None:
    """act = silu(x gate) * (x up), rows in sorted order. One block of rows, N columns of both products."""
    depth, (block, column_N, inside_N) = x_ref.shape[1], part_of(act_ref.shape[1], sizes)
    expert = expert_ref[block]

    @pl.when(expert >= 0)
    def _() -> None:
        place_M, live_M, pair_M = rows_of(order_ref, first_ref[block], end_ref[block], sizes.rows)

        def step(j: jax.Array, carry: tuple) -> tuple:
            k = j * sizes.depth + jnp.arange(sizes.depth)
            a = load(x_ref, pair_M // chosen, k, live_M, k < depth)
            mask = (k < depth)[:, None] & inside_N[None, :]
            gate, up = (
                plt.load(w_ref.at[expert, k[:, None], i, column_N[None, :]], mask=mask, other=0.0) for i in (0, 1)
            )
            return carry[0] + product(a, gate), carry[1] + product(a, up)

        zeros = jnp.zeros((sizes.rows, sizes.columns), jnp.float32)
        gate, up = lax.fori_loop(0, pl.cdiv(depth, sizes.depth), step, (zeros, zeros))
        act = gate / (1 + jnp.exp(-gate)) * up
        at = act_ref.at[place_M[:, None], column_N[None, :]]
        plt.store(at, act.astype(act_ref.dtype), mask=live_M[:, None] & inside_N[None, :])


def down_kernel(order_ref, expert_ref, first_ref, end_ref, act_ref, w_ref, y_ref, *, sizes: Sizes) -> None:
    """y = act down, a row a pair, in the order of pairs. One block of rows, N columns."""
    depth, (block, column_N, inside_N) = act_ref.shape[1], part_of(y_ref.shape[1], sizes)
    expert = expert_ref[block]

    @pl.when(expert >= 0)
    def _() -> None:
        place_M, live_M, pair_M = rows_of(order_ref, first_ref[block], end_ref[block], sizes.rows)

        def step(j: jax.Array, total: jax.Array) -> jax.Array:
            k = j * sizes.depth + jnp.arange(sizes.depth)
            a = load(act_ref, place_M, k, live_M, k < depth)
            mask = (k < depth)[:, None] & inside_N[None, :]
            return total + product(a, plt.load(w_ref.at[expert, k[:, None], column_N[None, :]], mask=mask, other=0.0))

        zeros = jnp.zeros((sizes.rows, sizes.columns), jnp.float32)
        y = lax.fori_loop(0, pl.cdiv(depth, sizes.depth), step, zeros)
        pair_M = jnp.where(live_M, pair_M, y_ref.shape[0])
        at = y_ref.at[pair_M[:, None], column_N[None, :]]
        plt.store(at, y.astype(y_ref.dtype), mask=live_M[:, None] & inside_N[None, :])


# a program of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("interpret", "sizes"))
def experts(
    x_TE: jax.Array,
    weights_TC: jax.Array,
    ids_TC: jax.Array,
    gate_up_XEXF: jax.Array,
    down_XFE: jax.Array,
    *,
    interpret: bool = False,
    sizes: tuple[Sizes, Sizes] | None = None,
) -> jax.Array:
    """[T, E] in float32: the weighted sum of each token's experts. Reference: experts.py.

    Sums are in float32; what an expert makes of a token is rounded to the weights' dtype before it is added up.
    """
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    (num_tokens, chosen), num_pairs, dtype = ids_TC.shape, ids_TC.size, gate_up_XEXF.dtype
    first, second = sizes or product_sizes(num_pairs, num_experts, dtype.itemsize)
    assert first.rows == second.rows
    blocks = cut(ids_TC, num_experts, first.rows)

    def call(kernel: Any, s: Sizes, columns: int, *arrays: jax.Array) -> jax.Array:
        return pl.pallas_call(
            functools.partial(kernel, sizes=s),
            grid=(blocks.expert_B.shape[0] * pl.cdiv(columns, s.columns),),
            out_shape=jax.ShapeDtypeStruct((num_pairs, columns), dtype),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=s.warps, num_stages=s.stages),
            name=f"experts_{'up' if columns == size else 'down'}",
        )(*blocks, *arrays)

    act_PF = call(functools.partial(up_kernel, chosen=chosen), first, size, x_TE.astype(dtype), gate_up_XEXF)
    y_TCE = call(down_kernel, second, embed_dim, act_PF, down_XFE).reshape(num_tokens, chosen, embed_dim)
    return weighted_sum(y_TCE, weights_TC, ids_TC, num_experts)


def weighted_sum(y_TCE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, num_experts: int) -> jax.Array:
    """[T, E] in float32: what a token's experts made of it, by weight. Of no expert, it may be anything."""
    here_TC1 = (ids_TC < num_experts)[..., None]
    return jnp.where(here_TC1, y_TCE.astype(jnp.float32) * weights_TC[..., None], 0).sum(1)
