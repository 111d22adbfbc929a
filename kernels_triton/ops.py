"""The torch op table. scatter writes in place, or into a copy in pure mode; the backend voids what was consumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from . import cpu_attention, noise, xp
from .attention import IMPLEMENTATIONS, Implementation, choose
from .blocked import Blocked
from .collectives import HIDDEN, WHOLE, Collectives
from .experts import experts
from .native import Native
from .products import Packed, Twofold, adds, contraction, look_up, matmul, matmul_add, pack

if find_spec("triton"):
    from . import arrivals, columns, derive, expert_router, few_rows, fused, greatest, lone_token
else:
    arrivals = columns = derive = expert_router = few_rows = fused = greatest = lone_token = None

Tensor = torch.Tensor
BLOCK = 256  # of argmax


class TorchOps(Collectives):
    """The ops of models/, in torch. `attention` names an implementation, or "auto".

    `mesh` is this process's place among others (sharding/mesh_torch.py); `rules` map logical axes to its axes. `native`
    has kernels compiled for this CPU.
    """

    xp = xp

    def __init__(
        self, pure: bool = False, attention: str = "auto", rules: Mapping[str, Any] | None = None, mesh: Any = None,
        experts_in_turn: bool = False, least_tokens: int = 1, native: Native | None = None,
    ):  # fmt: skip
        if attention != "auto" and attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention {attention!r} is none of auto, {', '.join(IMPLEMENTATIONS)}")
        super().__init__(rules, mesh, least_tokens)
        self.pure, self.wanted = pure, attention
        self.experts_in_turn, self.native = experts_in_turn, native
        self.chosen: dict[Any, Implementation] = {}
        self.known: dict[Any, tuple[Any, Implementation]] = {}
        self.steps: Sequence[Any] = ()
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.tables: list[tuple[Any, tuple[Tensor, Tensor]]] = []

    def for_step(self, steps: Sequence[Any]) -> TorchOps:
        """A copy that remembers, for each group's step, what attention derives from it once for all layers."""
        ops = copy.copy(self)
        ops.steps, ops.plans, ops.tables = steps, {}, []
        if self.tokens:
            ops.rules = self.rules_of(steps[0].token_ids_T.shape[0])
        return ops

    def prepare(self, weight: Tensor, spec: Any) -> Tensor | Packed:
        """The weight as its product reads it fastest."""
        if arrivals and weight.is_cuda:
            arrivals.counters(weight.device)
        if self.native and spec.product and Blocked.serves(weight, spec.product, self.native):
            return Blocked(weight, spec.product, self.native)
        if weight.is_cuda and spec.product and self.turns(spec, weight.shape, weight.dtype, weight.device):
            return Twofold.of(weight, weight.shape[: contraction(spec.product)[0]].numel())
        return pack(weight, spec.product)

    def bytes_beside(self, spec: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that `prepare` keeps on a GPU beside a weight of this spec, of which a device has this shape."""
        turned = device.type == "cuda" and self.turns(spec, shape, dtype, device)
        return math.prod(shape) * dtype.itemsize if turned else 0

    def turns(self, spec: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a weight lies turned as well: for products of very few rows, but those that are parts of a sum."""
        if not columns or self.pure or self.shards(*spec.axes[: contraction(spec.product)[0]]):
            return False
        return columns.is_kept_turned(shape, spec.product, dtype, device)

    def einsum(
        self, spec: str, x: Tensor, w: Tensor | Packed, out: tuple, reduce: str | None = None,
        *, norm: tuple[Tensor, float] | None = None, gate: bool = False, add: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The matrix product `spec`; `reduce` is the contracted axis if that one may be sharded.

        With `norm` (scale, eps) x, hidden rows, goes through rms_norm first; with `gate` the product goes through
        gated_mlp_act; `add` is added to the result, and consumed. Partial sums are rounded to x's dtype before they
        are added up, as vLLM's are.
        """
        if norm and self.shards("tokens"):
            x, norm = self.constrain(self.rms_norm(x, *norm), HIDDEN, WHOLE), None
        apart = self.shards(reduce, *out[:1])
        if isinstance(w, Blocked) and not apart and (w.gates or not gate):
            w.check(spec)
            return w.times(x, norm, gate, add)
        ours = x.is_cuda and isinstance(w, Tensor) and not (self.pure or apart)
        ours = ours and (add is None or add.is_contiguous())
        if columns and ours:
            y = columns.einsum(spec, x, w, norm, gate, add)
            if y is not None:
                return y
        x = self.rms_norm(x, *norm) if norm else x
        if few_rows and ours:
            y = few_rows.einsum(spec, x, w, gate, add)
            if y is not None:
                return y
        if add is not None and not (gate or self.pure or apart) and adds(x, w):
            return matmul_add(spec, x, w, add)
        y = self.psum_to(matmul(spec, x, w), (reduce,), out)
        y = self.gated_mlp_act(y) if gate else y
        return y if add is None else add + y

    def embed(self, table_VE: Tensor | Packed, ids_T: Tensor) -> Tensor:
        """Hidden rows: those of the table, which may be sharded over "vocab"."""
        if not self.shards("vocab"):
            return look_up(table_VE, self.constrain(ids_T, (None,), HIDDEN[:1]))
        local_T = ids_T - self.axis_index("vocab") * table_VE.shape[0]
        mine_T = (local_T >= 0) & (local_T < table_VE.shape[0])
        found_TE = look_up(table_VE, torch.where(mine_T, local_T, 0))
        return self.psum_to(torch.where(mine_T[:, None], found_TE, 0), ("vocab",), HIDDEN)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean x^2 + eps) * scale over the last axis, fp32 inside."""
        if fused and x.is_cuda:
            return fused.rms_norm(x, scale, eps)
        if self.native and self.native.norms(x, scale):
            return self.native.rms_norm(x, scale, eps)
        return F.rms_norm(x.float(), x.shape[-1:], scale.float(), eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, y: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + y, its norm)."""
        if fused and x.is_cuda:
            return fused.add_rms_norm(x, y, scale, eps)
        z = x + y
        return z, self.rms_norm(z, scale, eps)

    def qk_norm(self, q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """rms_norm of each head of q and of k."""
        if fused and q.is_cuda:
            return fused.qk_norm(q, k, q_scale, k_scale, eps)
        return self.rms_norm(q, q_scale, eps), self.rms_norm(k, k_scale, eps)

    def gated_mlp_act(self, x_TXF: Tensor) -> Tensor:
        """silu(gate) * up, fp32 inside."""
        if fused and x_TXF.is_cuda:
            return fused.gated_mlp_act(x_TXF)
        if self.native and x_TXF.dtype is self.native.dtype:
            return self.native.gated_mlp_act(x_TXF)
        return F.silu(x_TXF[:, 0].float()).mul_(x_TXF[:, 1]).to(x_TXF.dtype)

    def router(
        self, fn: Callable, x_TE: Tensor, norm: tuple[Tensor, float] | None, router_XE: Tensor | Packed,
        routing: Any, bias_X: Tensor | None, real_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """fn of these and ops: (normed rows [T, E], weights [T, C], experts [T, C]), experts X for padding."""
        alone = x_TE.is_cuda and not self.shards("tokens")
        if expert_router and alone and expert_router.chooses(x_TE, router_XE, routing):
            return expert_router.choose(x_TE, norm, router_XE, routing, bias_X, real_T)
        return fn(x_TE, norm, router_XE, routing, bias_X, real_T, self)

    def route(
        self, fn: Callable, logits_TX: Tensor, routing: Any, bias_X: Tensor | None, real_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """fn of these and ops: (weights [T, C], experts [T, C]) of each token, experts X for padding."""
        if expert_router and logits_TX.is_cuda and expert_router.routes(routing):
            return expert_router.route(logits_TX, routing, bias_X, real_T)
        return fn(logits_TX, routing, bias_X, real_T, self)

    def moe(
        self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_XEXF: Tensor, down_XFE: Tensor,
        *, add: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Each token through its experts' MLPs, summed by weight; `add` is added to that. An id of no expert is none.

        Experts may be shared out over "experts", and the inside of each over "expert_mlp": also over mesh axes along
        which tokens are others ("replicas"), whose tokens all meet here. Takes all tokens, and returns hidden rows.
        """
        dtype, spread = x_TE.dtype, self.shards("experts", "expert_mlp")
        if not spread and not self.shards("tokens"):
            return experts(x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE, add, dtype)
        apart = tuple(name for name in spread if name in self.shards("replicas"))
        if apart:
            x_TE = self.mesh.all_gather(x_TE, apart, 0)
            # as one array: what it costs is to talk at all
            both_T2C = self.mesh.all_gather(torch.cat([weights_TC.view(torch.int32), ids_TC.int()], 1), apart, 0)
            # kernels take the weights of one token behind those of another
            weights_TC, ids_TC = (x.contiguous() for x in both_T2C.tensor_split(2, 1))
            weights_TC = weights_TC.view(torch.float32)
        if self.shards("experts"):
            ids_TC = self._local_experts(ids_TC, len(gate_up_XEXF))
        y_TE = experts(x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE, None, torch.float32)
        if apart:
            y_TE = self.mesh.reduce_scatter(y_TE, apart)
        y_TE = self.sum_to(y_TE, tuple(name for name in spread if name not in apart), HIDDEN).to(dtype)
        return y_TE if add is None else add + y_TE

    def _local_experts(self, ids_TC: Tensor, here: int) -> Tensor:
        """Which of the `here` experts of this shard; `here` for one of another shard."""
        at = self.axis_index("experts")
        if self.experts_in_turn:
            n = self.axis_size("experts")
            return torch.where((ids_TC % n == at) & (ids_TC // n < here), ids_TC // n, here)
        local_TC = ids_TC - at * here
        return torch.where((local_TC >= 0) & (local_TC < here), local_TC, here)

    def rope_table(self, positions_T: Tensor, inv_freq_D: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of position x frequency, fp32."""
        angle_TD = positions_T.float()[:, None] * inv_freq_D
        return torch.cos(angle_TD), torch.sin(angle_TD)

    def rope(self, x: Tensor, rope: Any) -> Tensor:
        """x [T, ..., D] with each pair (i, i + D/2) turned by its angle, in fp32."""
        cos_TD, sin_TD = self._whole_tables(rope)
        shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
        x32, half = x.float(), x.shape[-1] // 2
        turned = (x32 * cos_TD.view(shape)).addcmul_(torch.roll(x32, half, -1), sin_TD.view(shape))
        return turned.to(x.dtype)

    def _whole_tables(self, rope: Any) -> tuple[Tensor, Tensor]:
        """cos and signed sin for both halves of the axis; made once a step, where for_step said that it is one."""
        for known, tables in self.tables:
            if known is rope:
                return tables
        tables = torch.cat([rope.cos_TD, rope.cos_TD], -1), torch.cat([-rope.sin_TD, rope.sin_TD], -1)
        if self.steps:
            self.tables.append((rope, tables))
        return tables

    def rope_write(
        self, q_TKGD: Tensor, new: dict[str, Tensor], rope: Any, pools: dict[str, Tensor], order: str, step: Any,
        norm: tuple[Tensor, Tensor, float] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """q and new["k"] turned by `rope` (None: as they are); new["k"] and new["v"] put at the step's slots.

        With `norm` (scales of q and of k, eps) q and new["k"] go through qk_norm first. Returns q and the pools, which
        lie in `order` ("n p k d", "n k p d"). Consumes the pools.
        """
        if fused and q_TKGD.is_cuda and fused.serves(q_TKGD, pools, order, rope):
            pools = {name: x.clone() for name, x in pools.items()} if self.pure else pools
            return fused.rope_write(q_TKGD, new["k"], new["v"], rope, pools["k"], pools["v"], order, step, norm), pools
        if norm is not None:
            q_TKGD, k_TKD = self.qk_norm(q_TKGD, new["k"], *norm)
            new = new | {"k": k_TKD}
        if self.native and self.native.writes(q_TKGD, new, pools, order, rope):
            pools = {name: x.clone() for name, x in pools.items()} if self.pure else pools
            return self.native.rope_write(q_TKGD, new["k"], new["v"], rope, pools["k"], pools["v"], order, step), pools
        if rope is not None:
            q_TKGD, new = self.rope(q_TKGD, rope), new | {"k": self.rope(new["k"], rope)}
        at = tuple({"n": step.blocks_T, "p": step.offsets_T}.get(a, slice(None)) for a in order.split()[:-1])
        return q_TKGD, {name: self.scatter(pools[name], at, new[name]) for name in pools}

    def attend_new(
        self, fn: Callable, q_TKGD: Tensor, new: dict[str, Tensor], rope: Any, pools: dict[str, Tensor], order: str,
        step: Any, spec: Any, norm: tuple[Tensor, Tensor, float] | None, sinks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """fn of these and ops: rope_write, then attention of these tokens. Consumes the pools."""
        if (
            lone_token
            and q_TKGD.is_cuda
            and not self.pure
            and lone_token.serves(q_TKGD, new, rope, pools, order, step, spec, sinks)
            and self._implementation(q_TKGD, spec, pools["k"].dtype, False) is IMPLEMENTATIONS["triton"]
        ):
            return lone_token.attend(q_TKGD, new, rope, pools, order, step, spec, norm), pools
        return fn(q_TKGD, new, rope, pools, order, step, spec, norm, sinks, self)

    def places(self, fn: Callable, rows: dict[str, Tensor], inputs: Any, group: int, size: int) -> dict[str, Tensor]:
        """fn(rows, inputs, group, block_size, ops): where a step's tokens belong."""
        if derive and rows["tokens"].is_cuda:
            return derive.derive(rows, inputs, group, size)
        return fn(rows, inputs, group, size, self)

    def last_rows(self, fn: Callable, x_TE: Tensor, inputs: Any, max_num_seqs: int) -> Tensor:
        """fn(x_TE, inputs, max_num_seqs, ops): the last row of each sequence."""
        if derive and x_TE.is_cuda:
            return derive.last_rows(x_TE, inputs, max_num_seqs)
        return fn(x_TE, inputs, max_num_seqs, self)

    def layer(self, fn: Callable) -> Callable:
        """A ModelSpec's `layer` as it is: torch traces nothing."""
        return fn

    def attention(
        self,
        q_TKGD: Tensor,
        k: Tensor,
        v: Tensor,
        order: str,
        step: Any,
        spec: Any,
        sinks: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Causal attention of each token over its sequence's cache. Returns [T, K, G, Dv].

        `scales` are those of a quantised k and v, in `order` without d.
        """
        implementation = self._implementation(q_TKGD, spec, k.dtype, scales is not None)
        more = () if scales is None else (scales,)
        block_size, native = k.shape[order.split().index("p")], self.native
        if (
            native
            and implementation is IMPLEMENTATIONS["cpu"]
            and native.attends(q_TKGD, k, v, order, spec, plain=sinks is None and scales is None)
        ):
            out_TKGD = native.attend(q_TKGD, k, v, order, step, spec)
            if not step.decode:
                plan = self._plan(cpu_attention.plan_long, step, spec, block_size)
                cpu_attention.attend_units(out_TKGD, q_TKGD, ((k, None), (v, None)), order, spec, None, plan.units)
            return out_TKGD
        plan = self._plan(implementation.plan, step, spec, block_size)
        return implementation.attend(q_TKGD, k, v, order, step, spec, sinks, plan, *more)

    def _plan(self, make: Callable, step: Any, spec: Any, block_size: int) -> Any:
        """make(step, spec, block_size), once for all layers of a step that for_step was told."""
        group = next((g for g, s in enumerate(self.steps) if s.block_tables_SB is step.block_tables_SB), None)
        key = (group, spec.window, make)
        plan = None if group is None else self.plans.get(key)
        if plan is None:
            plan = make(step, spec, block_size)
        if group is not None:
            self.plans[key] = plan
        return plan

    def any_width(self, spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype, scaled: bool) -> bool:
        """Whether attention of that spec costs the same with a wider block table."""
        return self._chosen((spec, dtype, device, cache, scaled)).any_width

    def shares_prefixes(
        self, spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype, scaled: bool
    ) -> bool:
        """Whether attention of that spec reads prefixes once that sequences share."""
        return self._chosen((spec, dtype, device, cache, scaled)).shares

    def _implementation(self, q: Tensor, spec: Any, cache: torch.dtype, scaled: bool) -> Implementation:
        # by identity first: a spec's hash costs as much as a small kernel. It is kept, so that its id stays its own
        key = (id(spec), q.dtype, q.device, cache, scaled)
        if key not in self.known:
            self.known[key] = spec, self._chosen((spec, *key[1:]))
        return self.known[key][1]

    def _chosen(self, key: tuple[Any, torch.dtype, torch.device, torch.dtype, bool]) -> Implementation:
        if key not in self.chosen:
            self.chosen[key] = IMPLEMENTATIONS[choose(self.wanted, *key)]
        return self.chosen[key]

    def dot(self, spec: str, a: Tensor, b: Tensor) -> Tensor:
        """The einsum of two arrays of activations, in float32."""
        return torch.einsum(spec, a.float(), b.float())

    def map_tiles(self, fn: Callable[..., tuple], arrays: tuple[Tensor, ...], at_once: int) -> tuple:
        """fn(*arrays), whose results have their leading axis, `at_once` rows at a time."""
        pieces = zip(*(x.split(at_once) for x in arrays), strict=True)
        found = [fn(*piece) for piece in pieces]
        return found[0] if len(found) == 1 else tuple(torch.cat(x) for x in zip(*found, strict=True))

    def show(self, name: str, x: Tensor) -> Tensor:
        """x, under this name among the taps: for what no op returns as it is."""
        return x

    def arange(self, n: int, like: Tensor) -> Tensor:
        """0 .. n - 1 in the dtype and place of `like`."""
        return torch.arange(n, dtype=like.dtype, device=like.device)

    def scatter(self, dest: Tensor, at: tuple[Tensor | slice, ...], values: Tensor) -> Tensor:
        """dest with dest[at] = values. Consumes dest."""
        dest = dest.clone() if self.pure else dest
        dest[at] = values.to(dest.dtype)
        return dest

    def tally(self, ids_RM: Tensor, values_RM: Tensor, size: int, used: Tensor | None = None) -> Tensor:
        """[R, size]: at each id the sum of its values in that row. Ids below 0, and from size on, count nowhere.

        `used` (a scalar) promises that columns from it on hold none that count.
        """
        # on a GPU, reading it would cost more than the columns
        if used is not None and ids_RM.device.type == "cpu":
            ids_RM, values_RM = ids_RM[:, : int(used)], values_RM[:, : int(used)]
        counts_RM = (ids_RM >= 0) & (ids_RM < size)
        values_RM = torch.where(counts_RM, values_RM, 0).to(values_RM.dtype)
        sum_RV = torch.zeros((len(ids_RM), size), dtype=values_RM.dtype, device=ids_RM.device)
        return sum_RV.scatter_add_(1, torch.where(counts_RM, ids_RM, 0).long(), values_RM)

    def argmax(self, x: Tensor, axis: str | None = None) -> Tensor:
        """int32 place of the greatest of the last axis, the logical `axis`; the first of equals."""
        if axis is None or axis != self.left:
            return self._argmax(x)
        at_R = self._argmax(x)
        best_R = self.ordered_bits(x.gather(-1, at_R[:, None].long())[:, 0].float())
        mine = torch.stack([best_R, at_R + self.axis_index(axis) * x.shape[-1]], -1)[None]
        best_NR, at_NR = self.all_gather(mine, axis, 0).unbind(-1)
        return at_NR.gather(0, best_NR.argmax(0)[None])[0]

    def _argmax(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if greatest and x.is_cuda and x.ndim == 2 and x.stride(1) == 1:
            return greatest.argmax(x)
        if x.device.type != "cpu" or x.ndim != 2 or size % BLOCK:
            return torch.argmax(x, -1).to(torch.int32)
        # torch's argmax is not vectorised on the CPU, amax is: find the first block of the greatest, then look inside
        blocks = x.reshape(-1, size // BLOCK, BLOCK)
        block_R = blocks.amax(-1).argmax(-1)
        rows_R = torch.arange(len(block_R))
        return (block_R * BLOCK + blocks[rows_R, block_R].argmax(-1)).to(torch.int32)

    def logsumexp(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x, -1)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k greatest of the last axis, falling, and their int32 places."""
        values, ids = torch.topk(x, k, -1)
        return values, ids.to(torch.int32)

    def ordered_bits(self, x: Tensor) -> Tensor:
        """float32 as int32 of the same order."""
        bits = x.view(torch.int32)
        return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def bisect(self, holds: Callable[[Tensor], Tensor]) -> Tensor:
        """The greatest int32 of each row that holds, for a condition that holds up to some value and not beyond."""
        low = torch.full_like(holds(torch.tensor(-(2**31), dtype=torch.int32)), -(2**31), dtype=torch.int32)
        for bit in range(31, -1, -1):
            tried = low + noise.signed(1 << bit)
            low = torch.where(holds(tried), tried, low)
        return low

    def gumbel(self, keys_R2: Tensor, index_R: Tensor, size: int, axis: str | None = None) -> Tensor:
        """[R, size] Gumbel noise from a row's key and output index, and the token id. The same bits in both rooms.

        Of a logical axis that was left, that of this shard's ids.
        """
        return noise.gumbel(keys_R2, index_R, size, self.axis_index(axis) * size if axis and axis == self.left else 0)

    def digest(self, logits_RV: Tensor) -> Tensor:
        """An int32 hash of each row's fp32 bits, the same in both rooms."""
        return noise.digest(logits_RV)

    def loop(self, condition: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
        """body applied to state while the condition holds."""
        while bool(condition(state)):
            state = body(state)
        return state
