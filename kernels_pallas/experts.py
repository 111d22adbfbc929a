"""Mixtures of experts in JAX: tokens sorted by expert, the MLP of each expert on its own rows, and their weighted sums.

Experts are this shard's: a token's expert that is none of them is `num_experts`, and adds nothing here.
Letters: X experts, C chosen ones of a token, P pairs (token, chosen expert), M rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import expert_kernels, mosaic_experts, mosaic_gpu

MOST_ROWS = 64  # of a block on a CPU
# rows an expert from which Hopper takes Mosaic's kernels: at 512 they save 12 % of a layer, at 4 they cost 6 %, and
# what lies between was not measured (benchmarks/experts_jax.py)
MOSAIC_ROWS = 512


def reference(
    x_TE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, gate_up_XEXF: jax.Array, down_XFE: jax.Array
) -> jax.Array:
    """Every expert on every token, in float32: what the compiler can shard, and what kernels are held to."""
    num_experts = gate_up_XEXF.shape[0]
    share_TX = (jax.nn.one_hot(ids_TC, num_experts) * weights_TC[..., None]).sum(1)

    def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, w.astype(jnp.float32), precision="highest")

    both = product("te,xezf->txzf", x_TE.astype(jnp.float32), gate_up_XEXF)
    act_TXF = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return product("txf,xfe->te", act_TXF * share_TX[..., None], down_XFE)


def sort_pairs(ids_TC: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """(pairs by expert, in their order within one [P]; where each expert's begin, and where the last's end [X + 1])."""
    ids_P = ids_TC.reshape(-1)
    order_P = jnp.argsort(ids_P, stable=True).astype(jnp.int32)
    # by comparing all: half the time to compile of a search
    before_PX = ids_P[:, None] < jnp.arange(num_experts + 1, dtype=ids_P.dtype)
    return order_P, before_PX.sum(0, dtype=jnp.int32)


def combine(
    y_PE: jax.Array, order_P: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, num_experts: int
) -> jax.Array:
    """The rows of sorted pairs, summed for each token by weight: [T, E] in float32."""
    place_P = jnp.zeros_like(order_P).at[order_P].set(jnp.arange(order_P.shape[0], dtype=order_P.dtype))
    return expert_kernels.weighted_sum(y_PE[place_P].reshape(*ids_TC.shape, -1), weights_TC, ids_TC, num_experts)


def by_blocks(
    x_TE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, gate_up_XEXF: jax.Array, down_XFE: jax.Array
) -> jax.Array:
    """A loop over blocks of rows of one expert each, as many as there are: a CPU's way."""
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    num_pairs, chosen = ids_TC.size, ids_TC.shape[1]
    rows = min(MOST_ROWS, 1 << max(0, (num_pairs // num_experts).bit_length() - 1))
    order_P, starts_X1 = sort_pairs(ids_TC, num_experts)
    # a block may reach past its expert's rows: the next block overwrites them, and the last one needs room
    sorted_PE = jnp.pad(x_TE[order_P // chosen].astype(gate_up_XEXF.dtype), ((0, rows), (0, 0)))
    blocks_X = -(-(starts_X1[1:] - starts_X1[:-1]) // rows)
    ends_X = jnp.cumsum(blocks_X)

    def one(block: jax.Array, y_PE: jax.Array) -> jax.Array:
        expert = (ends_X <= block).sum()
        first = ends_X[expert] - blocks_X[expert]
        start = starts_X1[expert] + (block - first) * rows
        x_ME = jax.lax.dynamic_slice_in_dim(sorted_PE, start, rows)
        both_MF = dot(x_ME, gate_up_XEXF[expert].reshape(embed_dim, 2 * size))
        act_MF = jax.nn.silu(both_MF[:, :size]) * both_MF[:, size:]
        y_ME = dot(act_MF.astype(down_XFE.dtype), down_XFE[expert])
        return jax.lax.dynamic_update_slice_in_dim(y_PE, y_ME, start, 0)

    y_PE = jnp.zeros((num_pairs + rows, embed_dim), jnp.float32)
    y_PE = jax.lax.fori_loop(0, ends_X[-1], one, y_PE)[:num_pairs]
    return combine(y_PE, order_P, weights_TC, ids_TC, num_experts)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, precision="highest", preferred_element_type=jnp.float32)


def by_ragged_dot(
    x_TE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, gate_up_XEXF: jax.Array, down_XFE: jax.Array
) -> jax.Array:
    """XLA's own grouped product: a TPU's way."""
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    order_P, starts_X1 = sort_pairs(ids_TC, num_experts)
    sizes_X = starts_X1[1:] - starts_X1[:-1]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes_X, precision="highest", preferred_element_type=jnp.float32)

    sorted_PE = x_TE[order_P // ids_TC.shape[1]].astype(gate_up_XEXF.dtype)
    both_PF = product(sorted_PE, gate_up_XEXF.reshape(num_experts, embed_dim, 2 * size))
    act_PF = jax.nn.silu(both_PF[:, :size]) * both_PF[:, size:]
    y_PE = product(act_PF.astype(down_XFE.dtype), down_XFE)
    return combine(y_PE, order_P, weights_TC, ids_TC, num_experts)


def by_kernels(
    x_TE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, gate_up_XEXF: jax.Array, down_XFE: jax.Array
) -> jax.Array:
    """Mosaic's kernels where they are faster, else those lowered through Triton: a GPU's way."""
    num_experts, args = gate_up_XEXF.shape[0], (x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE)
    many = ids_TC.size >= MOSAIC_ROWS * num_experts
    sizes = mosaic_experts.product_sizes(ids_TC.size, num_experts)
    if many and mosaic_gpu.is_hopper() and mosaic_experts.why_not(gate_up_XEXF, sizes) is None:
        return mosaic_experts.experts(*args, num_programs=jax.local_devices()[0].core_count)
    return expert_kernels.experts(*args)


WAYS: dict[str, Callable[..., jax.Array]] = {
    "cpu": by_blocks,
    "gpu": by_kernels,
    "tpu": by_ragged_dot,
}


def experts(*args: Any, mode: str) -> jax.Array:
    """[T, E] in float32: the weighted sum of each token's experts that are here."""
    # the compiler cannot share out a loop over experts, but it can a product
    return (reference if mode == "auto" else WAYS[jax.default_backend()])(*args)
