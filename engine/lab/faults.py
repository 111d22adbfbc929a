"""Where an implementation first parts from the reference: the taps of one step, in the order of computing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..build import Parts
from ..llm import LLM
from ..plan import Plan
from .errors import Error

# a fault is an error this many times greater than all before it in the step, and greater than the dtype's noise
JUMP = 10.0
NOISE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1, "float64": 1e-3}
NOISE_OF_NORM = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 2e-6}
OPS_ORDER = (
    *("attn_norm", "qkv", "q_norm", "k_norm", "rope", "rope.k", "rope.v", "attention", "out"),
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
    block: str | None = None  # which block of the cache holds other content, if one does

    def __str__(self) -> str:
        where = self.op if self.layer is None else f"layer {self.layer}, {self.op}"
        block = f"; {self.block}" if self.block else ""
        return (
            f"{where}: relative error {self.error:.1e} ({self.before:.1e} before it) at step {self.step}, request "
            f"{self.request_id!r}, token {self.position}{block}"
        )


def compare_taps(
    plan: Plan, mine: dict[str, np.ndarray], wanted: dict[str, np.ndarray], errors: dict[str, Error], dtype: str
) -> Fault | None:
    """Adds up the errors of all taps; the first that jumps is a fault."""
    worst, fault = 0.0, None
    # the order of computing is that of the oracle, or of torch: a compiled program returns its taps by name
    for name in sorted(wanted.keys() & mine.keys(), key=order_of):
        error_T = errors.setdefault(name, Error(name)).add(mine[name], wanted[name])
        t = int(error_T.argmax())
        error = float(error_T[t])
        if fault is None and error > max(NOISE[dtype], JUMP * worst):
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
