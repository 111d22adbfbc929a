"""The two products of a mixture of experts in Pallas Mosaic GPU, for Hopper and many rows an expert.

Rows lie sorted by expert, each expert's from a multiple of 8 on, since TMA moves tiles of 8 rows; XLA gathers them so
and sums what comes back. A block of the grid stays and takes work until there is none: a block of rows of one expert,
and two pieces of columns or four. One warpgroup fetches, two compute, each 64 rows of two pieces: of 128 rows each
takes half, of 64 both take all, with pieces of their own. In the first product the two are columns of gate and of up.
Letters: X experts, C chosen ones of a token, P pairs (token, chosen expert), B blocks, R rows, with gaps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .expert_kernels import sort, weighted_sum

ALIGNED = 8  # rows: where a tile starts is a multiple of that
ROWS = 64  # of a warpgroup
DEPTH = 64  # of a tile, 128 bytes: what TMA swizzles
DTYPES = ("bfloat16", "float16")


class Sizes(NamedTuple):
    """How both products are cut."""

    rows: int  # of a block: 64 or 128
    columns: int  # of a piece
    stages: int  # tiles in shared memory

    @property
    def sharers(self) -> int:
        """Warpgroups that compute on the same rows."""
        return 2 * ROWS // self.rows


# by what shared memory holds beside a piece of outputs of each warpgroup: 224 and 216 of 227 KB
SMALL, LARGE = Sizes(64, 64, 5), Sizes(128, 128, 4)


class Layout(NamedTuple):
    """Rows by expert: the token of each, the row of each pair, and blocks; of these the first `count` are real."""

    token_R: jax.Array
    row_P: jax.Array
    expert_B: jax.Array
    first_B: jax.Array
    end_B: jax.Array
    count_1: jax.Array


def product_sizes(num_pairs: int, num_experts: int) -> Sizes:
    """As the kernels lowered through Triton change from 64 rows to 128."""
    return SMALL if num_pairs <= 96 * num_experts else LARGE


def why_not(gate_up_XEXF: Any, sizes: Sizes) -> str | None:
    """Why these weights cannot be multiplied, or None."""
    embed_dim, size = gate_up_XEXF.shape[1], gate_up_XEXF.shape[3]
    inside, outside = sizes.sharers * sizes.columns, 2 * sizes.sharers * sizes.columns
    if gate_up_XEXF.dtype.name not in DTYPES:
        return f"wgmma wants weights of {' or '.join(DTYPES)}, not {gate_up_XEXF.dtype.name}"
    if size % inside or embed_dim % outside:
        return f"sizes of {embed_dim} and {size} are not multiples of {outside} and {inside}"
    return None


def lay_out(ids_TC: jax.Array, num_experts: int, rows: int) -> Layout:
    """The pairs by expert, and blocks of at most `rows` of one expert each. Shapes alone say how many of either."""
    ids_P, experts_X = ids_TC.reshape(-1), jnp.arange(num_experts, dtype=ids_TC.dtype)
    num_pairs = ids_P.shape[0]
    order_P = sort(ids_P)
    count_X = (ids_P[:, None] == experts_X).sum(0, dtype=jnp.int32)
    room_X, blocks_X = -(-count_X // ALIGNED) * ALIGNED, -(-count_X // rows)
    start_X, last_X = jnp.cumsum(room_X) - room_X, jnp.cumsum(blocks_X)

    # behind the last expert's a whole block can be read
    most = min(num_pairs, num_experts)
    num_rows = -(-(num_pairs + (ALIGNED - 1) * most) // ALIGNED) * ALIGNED + rows
    # how far each pair moves from its place among the sorted
    gap_X, sorted_P = start_X - (jnp.cumsum(count_X) - count_X), ids_P[order_P]
    row_P = jnp.arange(num_pairs, dtype=jnp.int32) + gap_X[jnp.minimum(sorted_P, num_experts - 1)]
    row_P = jnp.where(sorted_P < num_experts, row_P, num_rows)
    token_R = jnp.zeros((num_rows,), jnp.int32).at[row_P].set(order_P // ids_TC.shape[1], mode="drop")
    row_P = jnp.zeros_like(order_P).at[order_P].set(jnp.minimum(row_P, num_rows - 1), unique_indices=True)

    block_B = jnp.arange(num_pairs // rows + most, dtype=jnp.int32)
    expert_B = jnp.minimum((last_X <= block_B[:, None]).sum(1, dtype=jnp.int32), num_experts - 1)
    first_B = start_X[expert_B] + (block_B - last_X[expert_B] + blocks_X[expert_B]) * rows
    end_B = jnp.minimum(first_B + rows, start_X[expert_B] + count_X[expert_B])
    return Layout(token_R, row_P, expert_B, first_B, end_B, last_X[-1:])


# a program of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("sizes", "interpret", "num_programs"))
def experts(
    x_TE: jax.Array,
    weights_TC: jax.Array,
    ids_TC: jax.Array,
    gate_up_XEXF: jax.Array,
    down_XFE: jax.Array,
    *,
    sizes: Sizes | None = None,
    interpret: Any = None,
    num_programs: int = 132,
) -> jax.Array:
    """[T, E] in float32: the weighted sum of each token's experts. Reference: experts.py.

    Sums are in float32; what either product makes is rounded to the weights' dtype. `num_programs` is the number of
    multiprocessors; `interpret` an InterpretGPUParams.
    """
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    sizes = sizes or product_sizes(ids_TC.size, num_experts)
    if reason := why_not(gate_up_XEXF, sizes):
        raise NotImplementedError(f"experts in Mosaic GPU: {reason}")
    rows = lay_out(ids_TC, num_experts, sizes.rows)
    call = functools.partial(product, rows=rows, sizes=sizes, interpret=interpret, num_programs=num_programs)
    x_RE = x_TE.astype(gate_up_XEXF.dtype)[rows.token_R]
    act_RF = call(x_RE, gate_up_XEXF.reshape(num_experts, embed_dim, 2 * size), gated=True)
    y_RE = call(act_RF, down_XFE, gated=False)
    return weighted_sum(y_RE[rows.row_P].reshape(*ids_TC.shape, embed_dim), weights_TC, ids_TC, num_experts)


def product(
    x: jax.Array, w: jax.Array, *, gated: bool, rows: Layout, sizes: Sizes, interpret: Any, num_programs: int
) -> jax.Array:
    """x w of each row's expert, or silu(x gate) * (x up). Rows of no block's are not written."""
    sharers, columns, stages = sizes.sharers, sizes.columns, sizes.stages
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = 2 // sharers + 2 * sharers
    scratch = {
        "xs": plgpu.SMEM((stages, 2 // sharers, ROWS, DEPTH), x.dtype, transforms=tiled),
        "ws": plgpu.SMEM((stages, 2 * sharers, DEPTH, columns), x.dtype, transforms=tiled),
        "outs": plgpu.SMEM((2, ROWS, columns), x.dtype, transforms=tiled),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    return plgpu.kernel(
        functools.partial(kernel, gated=gated, sizes=sizes, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((x.shape[0], w.shape[2] // (1 + gated)), x.dtype),
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(rows.expert_B, rows.first_B, rows.end_B, rows.count_1, x, w)


def kernel(expert_ref: Any, first_ref: Any, end_ref: Any, count_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any, *,
           gated: bool, sizes: Sizes, num_programs: int, xs: Any, ws: Any, outs: Any, full: Any,
           free: Any) -> None:  # fmt: skip
    """The program: takes tile after tile, in turn with the others; all columns of a block before the next."""
    sharers, columns, stages = sizes.sharers, sizes.columns, sizes.stages
    pieces, steps = 2 * sharers, x_ref.shape[1] // DEPTH
    tiles = w_ref.shape[2] // (pieces * columns)
    program, wg = lax.axis_index("program"), lax.axis_index("wg")
    work = count_ref[0] * tiles
    mine = lax.div(jnp.maximum(work - program + (num_programs - 1), 0), jnp.int32(num_programs))

    def tile_of(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = program + i * num_programs
        return lax.div(at, jnp.int32(tiles)), lax.rem(at, jnp.int32(tiles))

    def column_of(tile: jax.Array, piece: int) -> jax.Array:
        """Of the weights: pieces of gate and of up take turns."""
        if gated:
            return (tile * sharers + piece // 2) * columns + piece % 2 * out_ref.shape[1]
        return (tile * pieces + piece) * columns

    def slot_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(stages))

    def fetch(i: jax.Array, _: None) -> None:
        block, tile = tile_of(i)
        expert, first = expert_ref[block], first_ref[block]

        def one(k: jax.Array, _: None) -> None:
            ahead = i * steps + k
            slot, deep = slot_of(ahead), pl.ds(k * DEPTH, DEPTH)
            pl.when(ahead >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            for half in range(2 // sharers):
                source = x_ref.at[pl.ds(first + half * ROWS, ROWS), deep]
                plgpu.copy_gmem_to_smem(source, xs.at[slot, half], full.at[slot])
            for piece in range(pieces):
                source = w_ref.at[expert, deep, pl.ds(column_of(tile, piece), columns)]
                plgpu.copy_gmem_to_smem(source, ws.at[slot, piece], full.at[slot])

        lax.fori_loop(0, steps, one, None)

    # of this warpgroup, of two
    half, own = (wg, 0) if sharers == 1 else (0, 2 * wg)

    def compute(i: jax.Array, _: None) -> None:
        block, tile = tile_of(i)
        first = first_ref[block] + half * ROWS
        count = end_ref[block] - first

        def multiply(k: Any, one: Any, two: Any) -> None:
            slot = slot_of(i * steps + k)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(one, xs.at[slot, half], ws.at[slot, own])
            plgpu.wgmma(two, xs.at[slot, half], ws.at[slot, own + 1])

        def both(one: Any, two: Any) -> tuple[jax.Array, jax.Array]:
            multiply(0, one, two)

            def step(k: jax.Array, _: None) -> None:
                multiply(k, one, two)
                # the step before has read its slot
                plgpu.wgmma_wait(2)
                plgpu.barrier_arrive(free.at[slot_of(i * steps + k - 1)])

            lax.fori_loop(1, steps, step, None)
            return one[...], two[...]

        @pl.when(count > 0)
        def _multiply() -> None:
            acc = plgpu.ACC((ROWS, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            one, two = pl.run_scoped(both, acc, acc)
            plgpu.barrier_arrive(free.at[slot_of(i * steps + steps - 1)])
            if gated:
                act = one / (1 + jnp.exp(-one)) * two
                store(act, outs.at[wg], out_ref, first, count, (tile * sharers + own // 2) * columns)
            else:
                at = (tile * pieces + own) * columns
                store(one, outs.at[wg], out_ref, first, count, at)
                store(two, outs.at[wg], out_ref, first, count, at + columns)

        @pl.when(count <= 0)
        def _let_go() -> None:
            def one(k: jax.Array, _: None) -> None:
                slot = slot_of(i * steps + k)
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(0, steps, one, None)

    @pl.when(wg < 2)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, mine, compute, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        lax.fori_loop(0, mine, fetch, None)
        seen = mine * steps

        def drain(t: jax.Array, _: None) -> None:
            plgpu.barrier_wait(free.at[slot_of(t)])

        lax.fori_loop(jnp.maximum(seen - stages, 0), seen, drain, None)


def store(value: jax.Array, smem: Any, out_ref: Any, first: jax.Array, count: jax.Array, column: jax.Array) -> None:
    """Writes the first `count` of 64 rows, rounded up to eights: those behind an expert's last are nobody's."""
    width = value.shape[1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem[...] = value.astype(smem.dtype)
    plgpu.commit_smem()

    def copy(low: int, size: int) -> None:
        target = out_ref.at[pl.ds(first + low, size), pl.ds(column, width)]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(low, size)], target)

    whole = count > ROWS - ALIGNED
    pl.when(whole)(lambda: copy(0, ROWS))
    for low in range(0, ROWS - ALIGNED, ALIGNED):
        pl.when(jnp.logical_not(whole) & (low < count))(functools.partial(copy, low, ALIGNED))
