"""Paged attention for TPUs: one program a sequence, blocks of keys fetched one tile ahead by DMA (arXiv 2604.15464).

Decode and prefill are one loop: over tiles of the sequence's queries, and for each over tiles of its keys. Right in
Pallas' TPU interpreter, races included, and lowered for TPUs in tests; never run on one.
Letters: Q queries of a tile, N keys of a tile, C blocks of a tile, X = Q x G.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .ragged import Plan
from .reference import FAR, HIDDEN

QUERIES = 16
KEYS = 128


def supports(spec: Any, dtype: str, platform: str, mode: str, block_size: int) -> str | None:
    """Why it cannot serve, or None. On a CPU it runs in Pallas' TPU interpreter, when named."""
    if platform not in ("tpu", "cpu"):
        return f"it is for TPUs, not for {platform}"
    if mode == "auto":
        return "the compiler cannot shard a kernel"
    if dtype not in ("float32", "bfloat16"):
        return f"it wants a cache of float32 or bfloat16, not {dtype}"
    if platform == "tpu" and (spec.k_dim % 128 or spec.v_dim % 128):
        return f"a TPU's lanes are 128 wide, the head dims are {spec.k_dim} and {spec.v_dim}"
    if block_size > KEYS:
        return f"a block of {block_size} tokens does not fit a tile of {KEYS} keys"
    return None


def prepare(plan: Plan, spec: Any, itemsize: int) -> None:
    """Nothing: a plan has what this kernel asks of it."""


def attend(
    q_TKGD: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks_KG: Any, plan: Plan
) -> jax.Array:
    """softmax(scale q k^T + mask) v, each query over its sequence's keys up to itself; [T, K, G, Dv].

    Reference: reference.py. Tolerance: 1e-5 absolute in float32, for inputs of unit variance.
    """
    interpret = pltpu.InterpretParams() if jax.default_backend() == "cpu" else False
    out = ragged(
        q_TKGD, k, v, step.block_tables_SB, plan.starts_S, plan.counts_S, plan.lengths_S, sinks_KG,
        order=order, spec=spec, interpret=interpret,
    )  # fmt: skip
    return jnp.where(plan.real_T[:, None, None, None], out, 0)


@functools.partial(jax.jit, static_argnames=("order", "spec", "interpret"))
def ragged(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_SB: jax.Array,
    starts_S: jax.Array,
    counts_S: jax.Array,
    lengths_S: jax.Array,
    sinks_KG: jax.Array | None,
    *,
    order: str,
    spec: Any,
    interpret: Any = False,
) -> jax.Array:
    """Outputs of all tokens of the step, [T, K, G, Dv]; anything where a token belongs to no sequence."""
    num_tokens, num_heads, groups, dim = q_TKGD.shape
    size, dtype = k.shape[order.split().index("p")], q_TKGD.dtype
    blocks = max(1, KEYS // size)
    # a tile may reach beyond the last token
    q = jnp.pad(q_TKGD, ((0, QUERIES), (0, 0), (0, 0), (0, 0)))
    sinks = jnp.full((num_heads, groups), HIDDEN, jnp.float32) if sinks_KG is None else sinks_KG.astype(jnp.float32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def buffer(x: jax.Array) -> Any:
        return pltpu.VMEM((2, blocks, *x.shape[1:]), x.dtype)

    out = pl.pallas_call(
        functools.partial(kernel, order=order, spec=spec, size=size, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(table_SB.shape[0],),
            in_specs=[anywhere, anywhere, anywhere, pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((QUERIES, num_heads, groups, dim), dtype),
                buffer(k),
                buffer(v),
                pltpu.VMEM((QUERIES, num_heads, groups, spec.v_dim), dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:3], spec.v_dim), dtype),
        interpret=interpret,
        # a tile's last rows are the next sequence's first: sequences are written in their order
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="ragged_paged",
    )(table_SB, starts_S, counts_S, lengths_S, q, k, v, sinks)
    return out[:num_tokens]


def kernel(
    table_ref: Any, start_ref: Any, count_ref: Any, length_ref: Any, q_hbm: Any, k_hbm: Any, v_hbm: Any, sinks_ref: Any,
    o_hbm: Any, q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, q_sem: Any, kv_sem: Any, o_sem: Any,
    *, order: str, spec: Any, size: int, blocks: int,
) -> None:  # fmt: skip
    """One sequence."""
    seq, groups, n = pl.program_id(0), spec.group_size, size * blocks
    start, count, length = start_ref[seq], count_ref[seq], length_ref[seq]
    last_block = jnp.maximum(pl.cdiv(length, size) - 1, 0)

    def copies(tile: jax.Array, slot: jax.Array) -> list[Any]:
        ids = [table_ref[seq, jnp.minimum(tile * blocks + c, last_block)] for c in range(blocks)]
        pairs = ((0, k_hbm, k_ref), (1, v_hbm, v_ref))
        return [
            pltpu.make_async_copy(hbm.at[block], ref.at[slot, c], kv_sem.at[i, slot])
            for i, hbm, ref in pairs
            for c, block in enumerate(ids)
        ]

    def head_of(ref: Any, slot: jax.Array, head: int) -> jax.Array:
        # [C, P, K, D] or [C, K, P, D]
        x = ref[slot]
        x = x[:, :, head] if order == "n p k d" else x[:, head]
        return x.astype(jnp.float32).reshape(n, -1)

    @pl.loop(0, pl.cdiv(count, QUERIES))
    def _(i: jax.Array) -> None:
        load = pltpu.make_async_copy(q_hbm.at[pl.ds(start + i * QUERIES, QUERIES)], q_ref, q_sem)
        load.start()
        first = length - count + i * QUERIES
        tiles = pl.cdiv(jnp.minimum(first + QUERIES, length), n)
        low = jnp.maximum(first + 1 - (spec.window or FAR), 0) // n
        for copy in copies(low, jnp.int32(0)):
            copy.start()
        load.wait()
        position_X1 = first + lax.broadcasted_iota(jnp.int32, (QUERIES * groups, 1), 0) // groups

        def attend_tile(j: jax.Array, carry: tuple) -> tuple:
            slot = lax.rem(j - low, 2)

            @pl.when(j + 1 < tiles)
            def _() -> None:
                for copy in copies(j + 1, 1 - slot):
                    copy.start()

            for copy in copies(j, slot):
                copy.wait()
            key_1N = j * n + lax.broadcasted_iota(jnp.int32, (1, n), 1)
            behind_XN = position_X1 - key_1N
            seen_XN = (behind_XN >= 0) & (behind_XN < (spec.window or FAR)) & (key_1N < length)
            written_N1 = j * n + lax.broadcasted_iota(jnp.int32, (n, 1), 0) < length
            found = []
            for head, (top_X1, sum_X1, out_XD) in enumerate(carry):
                q_XD = q_ref[:, head].astype(jnp.float32).reshape(QUERIES * groups, -1) * spec.scale
                scores_XN = jnp.dot(q_XD, head_of(k_ref, slot, head).T, preferred_element_type=jnp.float32,
                                    precision=lax.Precision.HIGHEST)  # fmt: skip
                if spec.softcap is not None:
                    scores_XN = spec.softcap * jnp.tanh(scores_XN / spec.softcap)
                scores_XN = jnp.where(seen_XN, scores_XN, HIDDEN)
                new_X1 = jnp.maximum(top_X1, scores_XN.max(-1, keepdims=True))
                shrink_X1, weight_XN = jnp.exp(top_X1 - new_X1), jnp.exp(scores_XN - new_X1)
                # weight zero times what an unwritten slot holds would still be a nan, if that is one
                v_ND = jnp.where(written_N1, head_of(v_ref, slot, head), 0)
                added_XD = jnp.dot(weight_XN, v_ND, preferred_element_type=jnp.float32,
                                   precision=lax.Precision.HIGHEST)  # fmt: skip
                sum_X1 = sum_X1 * shrink_X1 + weight_XN.sum(-1, keepdims=True)
                found.append((new_X1, sum_X1, out_XD * shrink_X1 + added_XD))
            return tuple(found)

        def begin(head: int) -> tuple:
            # without sinks these are far below any score, and then count for nothing
            sink_X1 = jnp.tile(sinks_ref[head][None], (QUERIES, 1)).reshape(QUERIES * groups, 1)
            one_X1 = jnp.where(sink_X1 > HIDDEN, 1.0, 0.0)
            return sink_X1, one_X1, jnp.zeros((QUERIES * groups, spec.v_dim), jnp.float32)

        carry = lax.fori_loop(low, tiles, attend_tile, tuple(begin(head) for head in range(spec.num_kv_heads)))
        for head, (_, sum_X1, out_XD) in enumerate(carry):
            out_XD = out_XD / jnp.where(sum_X1 > 0, sum_X1, 1.0)
            o_ref[:, head] = out_XD.reshape(QUERIES, groups, spec.v_dim).astype(o_ref.dtype)
        store = pltpu.make_async_copy(o_ref, o_hbm.at[pl.ds(start + i * QUERIES, QUERIES)], o_sem)
        store.start()
        store.wait()
