"""The op table in float64 numpy: slow, and obvious enough to be believed. The oracle that backends are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


class NumpyOps:
    """Every op that models and layouts call, without noise: the oracle draws nothing."""

    xp = np

    def __init__(self) -> None:
        self.epsilons: dict[int, float] = {}  # what each norm was called with, by the id of its scale

    def for_step(self, steps: Sequence[Any]) -> NumpyOps:
        return self

    def places(self, fn: Callable, *args: Any) -> dict[str, Array]:
        return fn(*args, self)

    def last_rows(self, fn: Callable, *args: Any) -> Array:
        return fn(*args, self)

    def layer(self, fn: Callable) -> Callable:
        return fn

    def constrain(self, x: Array, now: tuple, then: tuple) -> Array:
        return x

    def prepare(self, weight: Array, spec: Any) -> Array:
        return weight

    def einsum(
        self, spec: str, x: Array, w: Array, out: tuple, reduce: str | None = None,
        *, norm: tuple | None = None, gate: bool = False, add: Array | None = None,
    ) -> Array:  # fmt: skip
        x = self.rms_norm(x, *norm) if norm else x
        y = np.einsum(spec, x, w, optimize=True)
        y = self.gated_mlp_act(y) if gate else y
        return y if add is None else add + y

    def embed(self, table_VE: Array, ids_T: Array) -> Array:
        return table_VE[ids_T]

    def rms_norm(self, x: Array, scale: Array, eps: float) -> Array:
        self.epsilons[id(scale)] = eps
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

    def add_rms_norm(self, x: Array, y: Array, scale: Array, eps: float) -> tuple[Array, Array]:
        return x + y, self.rms_norm(x + y, scale, eps)

    def qk_norm(self, q: Array, k: Array, q_scale: Array, k_scale: Array, eps: float) -> tuple[Array, Array]:
        return self.rms_norm(q, q_scale, eps), self.rms_norm(k, k_scale, eps)

    def gated_mlp_act(self, x_TXF: Array) -> Array:
        gate_TF = x_TXF[:, 0]
        return gate_TF / (1 + np.exp(-gate_TF)) * x_TXF[:, 1]

    def router(self, fn: Callable, *args: Any) -> tuple[Array, Array, Array]:
        return fn(*args, self)

    def route(
        self, fn: Callable, logits_TX: Array, routing: Any, bias_X: Array | None, real_T: Array
    ) -> tuple[Array, Array]:
        return fn(logits_TX, routing, bias_X, real_T, self)

    def moe(
        self, x_TE: Array, weights_TC: Array, ids_TC: Array, gate_up_XEXF: Array, down_XFE: Array,
        *, add: Array | None = None,
    ) -> Array:  # fmt: skip
        """Token by token and expert by expert. An id that no expert has adds nothing."""
        out = np.zeros_like(x_TE) if add is None else add.copy()
        for t, c in zip(*np.nonzero(ids_TC < len(down_XFE)), strict=True):
            x = ids_TC[t, c]
            h_1XF = np.einsum("te,exf->txf", x_TE[t : t + 1], gate_up_XEXF[x])
            out[t] += weights_TC[t, c] * (self.gated_mlp_act(h_1XF)[0] @ down_XFE[x])
        return out

    def rope_table(self, positions_T: Array, inv_freq_D: Array) -> tuple[Array, Array]:
        angle_TD = positions_T[:, None] * inv_freq_D
        return np.cos(angle_TD), np.sin(angle_TD)

    def rope(self, x: Array, rope: Any) -> Array:
        shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1] // 2)
        cos, sin = rope.cos_TD.reshape(shape), rope.sin_TD.reshape(shape)
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attend_new(self, fn: Callable, *args: Any) -> tuple[Any, Any]:
        """fn of these and ops: rope_write, then attention."""
        return fn(*args, self)

    def rope_write(
        self, q_TKGD: Array, new: dict[str, Array], rope: Any, pools: dict[str, Array], order: str, step: Any,
        norm: tuple[Array, Array, float] | None = None,
    ) -> tuple[Array, dict[str, Array]]:  # fmt: skip
        if norm is not None:
            q_TKGD, k_TKD = self.qk_norm(q_TKGD, new["k"], *norm)
            new = new | {"k": k_TKD}
        if rope is not None:
            q_TKGD, new = self.rope(q_TKGD, rope), new | {"k": self.rope(new["k"], rope)}
        at = tuple({"n": step.blocks_T, "p": step.offsets_T}.get(a, slice(None)) for a in order.split()[:-1])
        return q_TKGD, {name: self.scatter(pools[name], at, new[name]) for name in pools}

    def attention(
        self,
        q_TKGD: Array,
        k: Array,
        v: Array,
        order: str,
        step: Any,
        spec: Any,
        sinks: Array | None = None,
        scales: tuple[Array, Array] | None = None,
    ) -> Array:
        """Token by token, over the keys that its sequence's block table names."""
        k, v = (x.astype(np.float64) for x in (k, v))
        if scales is not None:
            k, v = (x * scale[..., None] for x, scale in zip((k, v), scales, strict=True))
        out = np.zeros((*q_TKGD.shape[:3], v.shape[order.split().index("d")]))
        to_npkd = [order.split().index(axis) for axis in "npkd"]
        k, v = k.transpose(to_npkd), v.transpose(to_npkd)
        for t in np.flatnonzero(step.is_real_T):
            position, table_B = step.positions_T[t], step.block_tables_SB[step.seq_ids_T[t]]
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            at = np.arange(first, position + 1)
            blocks, offsets = table_B[at // k.shape[1]], at % k.shape[1]
            scores_KGM = np.einsum("kgd,mkd->kgm", q_TKGD[t], k[blocks, offsets]) * spec.scale
            if spec.softcap is not None:
                scores_KGM = spec.softcap * np.tanh(scores_KGM / spec.softcap)
            if sinks is not None:
                scores_KGM = np.concatenate([scores_KGM, sinks[..., None]], -1)
            weights_KGM = np.exp(scores_KGM - scores_KGM.max(-1, keepdims=True))
            weights_KGM /= weights_KGM.sum(-1, keepdims=True)
            out[t] = np.einsum("kgm,mkd->kgd", weights_KGM[..., : len(at)], v[blocks, offsets])
        return out

    def dot(self, spec: str, a: Array, b: Array) -> Array:
        return np.einsum(spec, a.astype(np.float64), b.astype(np.float64), optimize=True)

    def map_tiles(self, fn: Callable[..., tuple], arrays: tuple[Array, ...], at_once: int) -> tuple:
        return fn(*arrays)

    def show(self, name: str, x: Array) -> Array:
        return x

    def arange(self, n: int, like: Array) -> Array:
        return np.arange(n, dtype=like.dtype)

    def scatter(self, dest: Array, at: tuple, values: Array) -> Array:
        dest = dest.copy()
        dest[at] = values
        return dest

    def leaving(self, axis: str) -> NumpyOps:
        return self

    def argmax(self, x: Array, axis: str | None = None) -> Array:
        return x.argmax(-1).astype(np.int32)

    def logsumexp(self, x: Array) -> Array:
        top = x.max(-1, keepdims=True)
        return np.log(np.exp(x - top).sum(-1)) + top[..., 0]

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        ids = np.argsort(-x, -1, kind="stable")[..., :k]
        return np.take_along_axis(x, ids, -1), ids.astype(np.int32)
