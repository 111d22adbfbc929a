"""Where an implementation first parts from the reference: the taps of one step, in the order of computing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..build import Parts
from ..llm import LLM
from ..plan import Plan
from .errors import TINY, Error

# a fault is an error this many times greater than all before it in the step, and greater than the dtype's noise
JUMP = 10.0
ROUNDED = "rounded"  # in place of a dtype, where the cache rounds: a number between two codes may become either
NOISE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1, "float64": 1e-3, ROUNDED: 3e-1}
NOISE_OF_NORM = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 2e-6}
# a scale is judged by what it was to bring back; codes of 8 bits leave it this uncertain
NOISE_OF_SCALE = 5e-3
OPS_ORDER = (
    *("attn_norm", "qkv", "q_norm", "k_norm", "rope", "rope.#1", "rope.#2", "rope.k", "rope.k_scale"),
    *("rope.v", "rope.v_scale", "show", "attention", "out"),
    *("residual", "mlp_norm", "gate_up", "router", "experts", "experts.weights", "moe"),
    *("shared_gate_up", "gated_mlp_act", "down", "shared_down", "shared_gate"),
)


@dataclass(frozen=True)
class Fault:
    """Where an implementation parts from the reference, first in the order of computing."""

    step: int
    request_id: str
    position: int  # of the token in its sequence
    layer: int | None
    op: str
    error: float  # relative
    before: float  # the greatest relative error of what was computed before it in the step
    block: str | None = None  # which block of the cache holds other content, or which head a wrong scale, if one does

    def __str__(self) -> str:
        where = self.op if self.layer is None else f"layer {self.layer}, {self.op}"
        block = f"; {self.block}" if self.block else ""
        return (
            f"{where}: relative error {self.error:.1e} ({self.before:.1e} before it) at step {self.step}, request "
            f"{self.request_id!r}, token {self.position}{block}"
        )


def compare_taps(
    plan: Plan, mine: dict[str, np.ndarray], wanted: dict[str, np.ndarray], errors: dict[str, Error], kind: str
) -> Fault | None:
    """Adds up the errors of all taps; the first that jumps is a fault. `kind` is a dtype, or ROUNDED."""
    worst, fault = 0.0, None
    # the order of computing is that of the oracle, or of torch: a compiled program returns its taps by name
    for name in sorted(wanted.keys() & mine.keys(), key=order_of):
        error_T = errors.setdefault(name, Error(name)).add(mine[name], wanted[name])
        t = int(error_T.argmax())
        error = float(error_T[t])
        if fault is None and error > max(NOISE[kind], JUMP * worst):
            fault = make_fault(plan, t, name, error, worst)
        worst = max(worst, error)
    return fault


def compare_norms(plan: Plan, mine: dict[str, np.ndarray], oracle: Parts | LLM, dtype: str) -> Fault | None:
    """The first norm that is not what the oracle makes of the same input.

    A wrong epsilon is small beside what rounding has done to the input by then, so a norm is judged by its own.
    """
    before = "embed"
    for n, weights in enumerate(oracle.runner.weights["layers"]):
        for name, source in (("attn_norm", before), ("mlp_norm", f"layer.{n}.residual")):
            tap, scale = f"layer.{n}.{name}", weights.get(name)
            if tap not in mine or scale is None:
                continue
            x = mine[source].astype(np.float64)
            wanted = oracle.backend.ops.rms_norm(x, scale, oracle.backend.ops.epsilons[id(scale)])
            error_T = Error(name).add(mine[tap], wanted)
            t = int(error_T.argmax())
            if error_T[t] > NOISE_OF_NORM[dtype]:
                return make_fault(plan, t, tap, float(error_T[t]), 0.0)
        before = f"layer.{n}"
    return None


def compare_scales(plan: Plan, mine: dict[str, np.ndarray]) -> Fault | None:
    """The first scale of quantised keys by which the codes do not come back as the keys that were to be written.

    Those of a whole row of 64 numbers tell the scale far closer than any one: a least-squares fit. It is judged by the
    implementation's own keys, so that what roundings before it have done does not matter.
    """
    for n in range(sum(f"layer.{n}.rope.k_scale" in mine for n in range(_num_layers(mine)))):
        codes_TKD, scale_TK = (mine[f"layer.{n}.rope.{name}"].astype(np.float64) for name in ("k", "k_scale"))
        keys_TKD = mine.get(f"layer.{n}.rope.#1")
        if mine[f"layer.{n}.rope.k"].dtype.kind != "i" or keys_TKD is None or keys_TKD.shape != codes_TKD.shape:
            continue
        squares_TK = (codes_TKD**2).sum(-1)
        fit_TK = (codes_TKD * keys_TKD).sum(-1) / np.maximum(squares_TK, 1)
        error_TK = np.where(squares_TK > 0, np.abs(scale_TK / np.maximum(np.abs(fit_TK), TINY) - 1), 0.0)
        t, head = np.unravel_index(int(np.nan_to_num(error_TK, nan=np.inf).argmax()), error_TK.shape)
        if not error_TK[t, head] <= NOISE_OF_SCALE:
            fault = make_fault(plan, int(t), f"layer.{n}.rope.k_scale", float(error_TK[t, head]), 0.0)
            return replace(fault, block=f"kv head {head}: codes times scale are not the keys that were written")
    return None


def _num_layers(taps: dict[str, np.ndarray]) -> int:
    return 1 + max((split_name(name)[0] or 0 for name in taps), default=0)


def make_fault(plan: Plan, t: int, name: str, error: float, before: float) -> Fault:
    request_id, position = _token(plan, t)
    layer, op = split_name(name)
    return Fault(plan.step, request_id, position, layer, op or "output", error, before)


def first_fault(a: Fault | None, b: Fault | None) -> Fault | None:
    """The one that comes first in the order of computing."""
    found = [f for f in (a, b) if f is not None]
    return min(found, key=lambda f: _order(f.layer, f.op), default=None)


def order_of(name: str) -> tuple[int, int]:
    """The place of a tap in the order of computing. The rows behind a layer come after all its ops."""
    return _order(*split_name(name))


def _order(layer: int | None, op: str) -> tuple[int, int]:
    if layer is None:
        # before all layers, or behind them
        return (-1, 0) if op == "embed" else (1 << 30, 0)
    if op in ("", "output"):
        return layer, len(OPS_ORDER) + 1
    return layer, OPS_ORDER.index(op) if op in OPS_ORDER else len(OPS_ORDER)


def _token(plan: Plan, t: int) -> tuple[str, int]:
    """Whose the t-th token of a step is, and its position."""
    for c in plan.chunks:
        if t < c.num_tokens:
            return c.request_id, c.start + t
        t -= c.num_tokens
    raise ValueError(f"the step has {t} tokens less than asked for")


def split_name(name: str) -> tuple[int | None, str]:
    """layer.7.rope -> (7, rope); layer.7 -> (7, ""); embed -> (None, embed)."""
    parts = name.split(".", 2)
    if parts[0] != "layer":
        return None, name
    return int(parts[1]), parts[2] if len(parts) > 2 else ""
