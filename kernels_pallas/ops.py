"""The JAX op table. Collectives act here: `mode` says who moves data between shards (collectives.py).

The same model lines run under all three.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from . import fused, norm
from .attention import AttentionOp
from .collectives import HIDDEN, WHOLE, Axes, Collectives
from .experts import experts
from .noise import digest, gumbel
from .tally import tally

HALVES = ("bfloat16", "float16")


def product(spec: str, x: jax.Array, w: jax.Array, out: Any = jnp.float32) -> jax.Array:
    """einsum in float32, rounded to `out`. Operands of 16 bits go to the matrix units as they are, at any precision.

    Several contracted axes ("tkgd,kgde->te") become one: XLA:CPU would transpose the weight.
    """
    operands, result = spec.split("->")
    x_axes, w_axes = operands.split(",")
    inner = "".join(axis for axis in x_axes if axis in w_axes and axis not in result)
    if len(inner) > 1 and x_axes.endswith(inner) and w_axes.startswith(inner):
        x, w = x.reshape(*x.shape[: -len(inner)], -1), w.reshape(-1, *w.shape[len(inner) :])
        spec = spec.replace(inner, inner[0])
    precision = None if w.dtype.name in HALVES else "highest"
    return jnp.einsum(spec, x, w, precision=precision, preferred_element_type=out)


class JaxOps(Collectives):
    """Every op that models and layouts call. Frozen after construction; a copy of `for_step` knows the step."""

    xp = jnp

    def __init__(
        self, mode: str = "local", rules: Mapping | None = None, mesh: Any = None, attention: str = "auto",
        experts_in_turn: bool = False, least_tokens: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(mode, rules, mesh, least_tokens)
        self.experts_in_turn = experts_in_turn
        self._attention = AttentionOp(attention, mode)
        self._layers: dict[Any, tuple[Callable, set[str]]] = {}
        self._in_place = False

    def for_step(self, steps: Sequence) -> JaxOps:
        """The same ops, holding what attention derives once a step for all layers."""
        ops = copy.copy(self)
        ops._attention, ops._layers = self._attention.for_step(steps), {}
        if self.tokens:
            ops.rules = self.rules_of(steps[0].token_ids_T.shape[0])
        return ops

    def places(self, fn: Callable, *args: Any) -> dict[str, jax.Array]:
        """fn(rows, inputs, group, block_size, ops): where a step's tokens belong."""
        return fn(*args, self)

    def last_rows(self, fn: Callable, *args: Any) -> jax.Array:
        """fn(x_TE, inputs, max_num_seqs, ops): the last row of each sequence."""
        return fn(*args, self)

    def layer(self, fn: Callable) -> Callable:
        """A ModelSpec's `layer` as a program within the step's, so that layers alike are traced and lowered once.

        As it is where nothing is traced, or where attention's plan cannot be handed to a program.
        """

        def call(w: Any, cache: Any, x_TE: jax.Array, step: Any, spec: Any, ops: JaxOps, layout: Any) -> Any:
            plan = None
            if isinstance(x_TE, Tracer):
                dtype, scaled = next(iter(cache.values())).dtype, "k_scale" in cache
                plan = self._attention.prepared(step, spec, dtype, layout.block_size, scaled)
            if plan is None:
                return fn(w, cache, x_TE, step, spec, ops, layout)
            if (spec, layout) not in self._layers:
                stays: set[str] = set()

                def program(w: Any, cache: Any, x_TE: jax.Array, step: Any, plan: Any) -> Any:
                    held = copy.copy(ops)
                    held._attention = ops._attention.holding(plan)
                    x_TE, changed = fn(w, cache, x_TE, step, spec, held, layout)
                    stays.update(name for name, x in changed.items() if x is cache[name])
                    return x_TE, changed

                self._layers[spec, layout] = jax.jit(program), stays
            program, stays = self._layers[spec, layout]
            x_TE, changed = program(w, cache, x_TE, step, plan)
            # what stays is the very array that was given, also for who looks from outside the program
            return x_TE, {name: cache[name] if name in stays else x for name, x in changed.items()}

        return call

    def attention(
        self,
        q_TKGD: jax.Array,
        k: jax.Array,
        v: jax.Array,
        order: str,
        step: Any,
        spec: Any,
        sinks: Any = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Causal attention of the step's queries over their sequences' cached keys; [T, K, G, Dv].

        `order` is the physical order of k and v: "n p k d" or "n k p d". `sinks` [K, G] are logits that take part in
        the softmax's denominator alone. `scales` are those of a quantised k and v, in `order` without d.
        """
        return self._attention(q_TKGD, k, v, order, step, spec, sinks, scales)

    def any_width(self, specs: Iterable, dtype: str, scaled: bool) -> bool:
        """Whether attention with all these specs, over a cache of dtype, costs the same under a wider block table."""
        return self._attention.any_width(specs, dtype, scaled)

    def shares_prefixes(self, specs: Iterable, dtype: str, scaled: bool) -> bool:
        """Whether attention with all these specs reads prefixes once that sequences share."""
        return self._attention.shares_prefixes(specs, dtype, scaled)

    def prepare(self, weight: jax.Array, spec: Any) -> jax.Array:
        """The weight as `einsum` and `embed` like it best."""
        return weight

    def einsum(
        self, spec: str, x: jax.Array, w: jax.Array, out: Axes, reduce: str | None = None,
        *, norm: tuple[jax.Array, float] | None = None, gate: bool = False, add: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """The only matrix product. Multiplies in w's dtype, accumulates in float32, returns x's dtype.

        `out` are the product's logical axes; `reduce` is the contracted axis if that one is sharded. With `norm`
        (scale, eps) x, hidden rows, goes through rms_norm first; with `gate` the product goes through gated_mlp_act;
        `add` is added to the result, and consumed.
        """
        x = self.constrain(self._normed(x, *norm), HIDDEN, WHOLE) if norm else x
        sums = self.shards(reduce)
        # a float32 result would be written, read and rounded by another kernel
        half = w.dtype.name in HALVES and not sums
        y = product(spec, x.astype(w.dtype), w, w.dtype if half else jnp.float32)
        y = self.constrain(self.psum_to(y, (reduce,), out).astype(x.dtype), out, out)
        y = self.gated_mlp_act(y) if gate else y
        return y if add is None else add + y

    def _normed(self, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        """rms_norm, in a kernel of ours where that is faster."""
        if self._fuses() and norm.serves(x):
            return norm.rms_norm(x, scale, eps=eps, interpret=jax.default_backend() == "cpu")
        return self.rms_norm(x, scale, eps)

    def embed(self, table_VE: jax.Array, ids_T: jax.Array) -> jax.Array:
        """Hidden rows: those of the table, which may be sharded over "vocab"."""
        if not self.shards("vocab"):
            return self.constrain(table_VE[self.constrain(ids_T, (None,), HIDDEN[:1])], HIDDEN, HIDDEN)
        local_T = ids_T - self.axis_index("vocab") * table_VE.shape[0]
        mine_T = (local_T >= 0) & (local_T < table_VE.shape[0])
        found_TE = jnp.where(mine_T[:, None], table_VE[jnp.where(mine_T, local_T, 0)], 0)
        return self.psum_to(found_TE, ("vocab",), HIDDEN)

    def rms_norm(self, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        """x / rms(x) * scale over the last axis, float32 inside."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps)
        return (normed * scale.astype(jnp.float32)).astype(x.dtype)

    def add_rms_norm(self, x: jax.Array, y: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
        """(x + y, rms_norm(x + y)): the residual and what the next layer reads."""
        total = x + y
        return total, self.rms_norm(total, scale, eps)

    def gated_mlp_act(self, x_TXF: jax.Array) -> jax.Array:
        """silu(gate) * up, where x holds gate and up along its second axis."""
        gate_TF, up_TF = x_TXF[:, 0].astype(jnp.float32), x_TXF[:, 1].astype(jnp.float32)
        return (jax.nn.silu(gate_TF) * up_TF).astype(x_TXF.dtype)

    def router(self, fn: Callable, *args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """fn of these and ops: (normed rows [T, E], weights [T, C], experts [T, C]), experts X for padding."""
        return fn(*args, self)

    def route(
        self, fn: Callable, logits_TX: jax.Array, routing: Any, bias_X: jax.Array | None, real_T: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """fn of these and ops: (weights [T, C], experts [T, C]) of each token, experts X for padding."""
        return fn(logits_TX, routing, bias_X, real_T, self)

    def moe(
        self, x_TE: jax.Array, weights_TC: jax.Array, ids_TC: jax.Array, gate_up_XEXF: jax.Array, down_XFE: jax.Array,
        *, add: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Each token through its experts' MLPs, summed by weight; `add` is added to that. An id of no expert is none.

        Experts may be shared out over "experts", and the inside of each over "expert_mlp": also over mesh axes along
        which tokens are others ("replicas"), whose tokens all meet here. Takes all tokens, and returns hidden rows.
        """
        dtype, spread = x_TE.dtype, self.shards("experts", "expert_mlp")
        apart = tuple(name for name in spread if name in self.shards("replicas"))
        if apart:
            x_TE = jax.lax.all_gather(x_TE, apart, tiled=True)
            # as one array: what it costs is to talk at all
            both_T2C = jnp.concatenate([jax.lax.bitcast_convert_type(weights_TC, jnp.int32), ids_TC], 1)
            both_T2C = jax.lax.all_gather(both_T2C, apart, tiled=True)
            weights_TC, ids_TC = jnp.split(both_T2C, 2, 1)
            weights_TC = jax.lax.bitcast_convert_type(weights_TC, jnp.float32)
        if self.shards("experts"):
            ids_TC = self._local_experts(ids_TC, gate_up_XEXF.shape[0])
        y_TE = experts(x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE, mode=self.mode)
        if apart:
            y_TE = jax.lax.psum_scatter(y_TE, apart, tiled=True)
        y_TE = self.sum_to(y_TE, tuple(name for name in spread if name not in apart), HIDDEN)
        y_TE = self.constrain(y_TE.astype(dtype), HIDDEN, HIDDEN)
        return y_TE if add is None else add + y_TE

    def _local_experts(self, ids_TC: jax.Array, here: int) -> jax.Array:
        """Which of the `here` experts of this shard; `here` for one of another shard."""
        at = self.axis_index("experts")
        if self.experts_in_turn:
            n = self.axis_size("experts")
            return jnp.where((ids_TC % n == at) & (ids_TC // n < here), ids_TC // n, here)
        local_TC = ids_TC - at * here
        return jnp.where((local_TC >= 0) & (local_TC < here), local_TC, here)

    def rope_table(self, positions_T: jax.Array, inv_freq_D: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(cos, sin) of position times frequency, float32."""
        angle_TD = positions_T.astype(jnp.float32)[:, None] * inv_freq_D.astype(jnp.float32)
        return jnp.cos(angle_TD), jnp.sin(angle_TD)

    def rope(self, x: jax.Array, rope: Any) -> jax.Array:
        """x [T, ..., D] rotated along its last axis, first half against second half as Hugging Face does."""
        shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1] // 2)
        cos, sin = rope.cos_TD.reshape(shape), rope.sin_TD.reshape(shape)
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attend_new(self, fn: Callable, *args: Any) -> tuple[Any, Any]:
        """fn of these and ops: rope_write, then attention."""
        return fn(*args, self)

    def rope_write(
        self,
        q_TKGD: jax.Array,
        new: dict[str, jax.Array],
        rope: Any,
        pools: dict[str, jax.Array],
        order: str,
        step: Any,
        norm: tuple[jax.Array, jax.Array, float] | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """q and new["k"] turned by `rope` (None: as they are); new["k"] and new["v"] put at the step's slots.

        With `norm` (scales of q and of k, eps) q and new["k"] go through qk_norm first. Returns q and the pools, which
        lie in `order` ("n p k d", "n k p d"). Consumes the pools.
        """
        if self._fuses() and fused.serves(q_TKGD, new, pools, order, rope):
            scales, eps = (norm[:2], norm[2]) if norm else (None, None)
            qkv_TKXD, interpret = fused.joined(q_TKGD, new["k"], new["v"]), jax.default_backend() == "cpu"
            return fused.rope_write(qkv_TKXD, rope.cos_TD, rope.sin_TD, pools, step.blocks_T, step.offsets_T,
                                    scales, order=order, eps=eps, interpret=interpret,
                                    in_place=self._in_place and not interpret)  # fmt: skip
        if norm is not None:
            q_TKGD, k_TKD = self.qk_norm(q_TKGD, new["k"], *norm)
            new = new | {"k": k_TKD}
        if rope is not None:
            q_TKGD, new = self.rope(q_TKGD, rope), new | {"k": self.rope(new["k"], rope)}
        at = tuple({"n": step.blocks_T, "p": step.offsets_T}.get(a, slice(None)) for a in order.split()[:-1])
        return q_TKGD, {name: self.scatter(pools[name], at, new[name]) for name in pools}

    def in_place(self) -> JaxOps:
        """The same ops for programs whose caller gives the cache away: kernels may change it behind XLA's back."""
        ops = copy.copy(self)
        ops._in_place = True
        return ops

    def _fuses(self) -> bool:
        """Whether small kernels of ours take the place of XLA's: on a GPU, or where attention's are interpreted too."""
        on_cpu, names = jax.default_backend() == "cpu", ("triton_lowered", "mosaic_gpu")
        return self.mode != "auto" and (self._attention.name in names if on_cpu else jax.default_backend() == "gpu")

    def qk_norm(
        self, q: jax.Array, k: jax.Array, q_scale: jax.Array, k_scale: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """rms_norm of each head of q and of k."""
        return self.rms_norm(q, q_scale, eps), self.rms_norm(k, k_scale, eps)

    def dot(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """The einsum of two arrays of activations, in float32."""
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=jnp.float32)

    def map_tiles(self, fn: Callable[..., tuple], arrays: tuple[jax.Array, ...], at_once: int) -> tuple:
        """fn(*arrays), whose results have their leading axis, `at_once` rows at a time."""
        size = arrays[0].shape[0]
        if at_once >= size:
            return fn(*arrays)
        pad = -size % at_once
        pieces = [jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), mode="edge") for x in arrays]
        found = jax.lax.map(lambda xs: fn(*xs), [x.reshape(-1, at_once, *x.shape[1:]) for x in pieces])
        return tuple(x.reshape(-1, *x.shape[2:])[:size] for x in found)

    def show(self, name: str, x: jax.Array) -> jax.Array:
        """x, under this name among the taps: for what no op returns as it is."""
        return x

    def arange(self, n: int, like: jax.Array) -> jax.Array:
        """0..n-1 in the dtype of `like`."""
        return jnp.arange(n, dtype=like.dtype)

    def scatter(self, dest: jax.Array, at: tuple, values: jax.Array) -> jax.Array:
        """dest with dest[at] = values. Consumes dest; where `at` repeats a place, any of its values stays."""
        return dest.at[at].set(values.astype(dest.dtype))

    def tally(self, ids_RM: jax.Array, values_RM: jax.Array, size: int, used: Any = None) -> jax.Array:
        """[R, size]: at each id the sum of its values in that row. Ids below 0, and from size on, count nowhere.

        `used` (a scalar) promises that columns from it on hold none that count.
        """
        return tally(ids_RM, values_RM, size, used)

    def argmax(self, x: jax.Array, axis: str | None = None) -> jax.Array:
        """int32 index of the greatest along the last axis, the logical `axis`; the first of equals."""
        at = jnp.argmax(x, -1).astype(jnp.int32)
        if axis is None or axis != self.left:
            return at
        best = self.ordered_bits(jnp.max(x, -1).astype(jnp.float32))
        mine = jnp.stack([best, at + self.axis_index(axis) * x.shape[-1]], -1)[None]
        best, at = jnp.moveaxis(self.all_gather(mine, axis, 0), -1, 0)
        return jnp.take_along_axis(at, jnp.argmax(best, 0)[None], 0)[0]

    def logsumexp(self, x: jax.Array) -> jax.Array:
        """log of the sum of exponentials over the last axis."""
        return jax.nn.logsumexp(x, -1)

    def top_k(self, x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k greatest along the last axis, in falling order, and their int32 ids."""
        values, ids = jax.lax.top_k(x, k)
        return values, ids.astype(jnp.int32)

    def ordered_bits(self, x: jax.Array) -> jax.Array:
        """float32 -> int32 of the same order."""
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def bisect(self, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The greatest int32 of each row that holds, for a condition that holds up to some value and not beyond."""

        def body(i: jax.Array, low: jax.Array) -> jax.Array:
            tried = low + jax.lax.shift_left(jnp.int32(1), 31 - i)
            return jnp.where(holds(tried), tried, low)

        least = jnp.int32(-(2**31))
        return jax.lax.fori_loop(0, 32, body, jnp.full(jax.eval_shape(holds, least).shape, least))

    def gumbel(self, keys_R2: jax.Array, index_R: jax.Array, size: int, axis: str | None = None) -> jax.Array:
        """[R, size] noise for (request key, output index, token id), the same in any batch and in both rooms.

        Of a logical axis that was left, that of this shard's ids.
        """
        return gumbel(keys_R2, index_R, size, self.axis_index(axis) * size if axis and axis == self.left else 0)

    def digest(self, logits_RV: jax.Array) -> jax.Array:
        """int32 hash of each row's float32 bits, equal in both rooms."""
        return digest(logits_RV)

    def loop(self, condition: Callable, body: Callable, state: Any) -> Any:
        """`while condition(state): state = body(state)` on the device."""
        return jax.lax.while_loop(condition, body, state)
