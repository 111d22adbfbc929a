"""The registry of attention implementations. Each says, with a reason, what it does not serve."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from . import cpu_attention, reference

logger = logging.getLogger("octavo")


class Implementation(NamedTuple):
    """plan(step) is made once a step and cache group; attend(q, k, v, order, step, spec, sinks, plan) once a layer.

    supports(spec, dtype, platform, mode) is None, or the reason why not.
    """

    attend: Callable[..., jax.Array]
    supports: Callable[..., str | None]
    plan: Callable[[Any], Any]


def supports_everything(spec: Any, dtype: str, platform: str, mode: str) -> str | None:
    """None: the reference serves whatever the cache can hold."""
    return None


IMPLEMENTATIONS = {
    "cpu": Implementation(cpu_attention.attend, cpu_attention.supports, cpu_attention.plan),
    "reference": Implementation(reference.attend, supports_everything, reference.query_tiles),
}
PREFERENCE = ("cpu", "reference")  # of "auto", best first


class AttentionOp:
    """The implementation that was asked for. `for_step` returns a copy in which the layers of a step share plans."""

    def __init__(self, name: str, mode: str) -> None:
        if name != "auto" and name not in IMPLEMENTATIONS:
            raise ValueError(f"attention {name!r} is none of auto, {', '.join(IMPLEMENTATIONS)}")
        self.name, self.mode = name, mode
        self.steps: Sequence = ()
        self.plans: dict[tuple[str, int], Any] = {}
        self.chosen: dict[Any, str] = {}

    def for_step(self, steps: Sequence) -> AttentionOp:
        op = copy.copy(self)
        op.steps, op.plans = steps, {}
        return op

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks: Any) -> Any:
        name = self.choose(spec, k.dtype.name, jax.default_backend())
        implementation = IMPLEMENTATIONS[name]
        return implementation.attend(q, k, v, order, step, spec, sinks, self.plan(name, step))

    def plan(self, name: str, step: Any) -> Any:
        group = next((g for g, s in enumerate(self.steps) if s.block_tables_SB is step.block_tables_SB), None)
        if group is None:
            return IMPLEMENTATIONS[name].plan(step)
        if (name, group) not in self.plans:
            self.plans[name, group] = IMPLEMENTATIONS[name].plan(step)
        return self.plans[name, group]

    def choose(self, spec: Any, dtype: str, platform: str) -> str:
        """The implementation for this layer. Raises NotImplementedError if a named one cannot serve it."""
        if self.name != "auto":
            reason = IMPLEMENTATIONS[self.name].supports(spec, dtype, platform, self.mode)
            if reason:
                raise NotImplementedError(f"attention {self.name!r}: {reason}")
            return self.name
        key = (spec, dtype, platform)
        if key not in self.chosen:
            refused = {n: IMPLEMENTATIONS[n].supports(spec, dtype, platform, self.mode) for n in PREFERENCE}
            self.chosen[key] = next(n for n, reason in refused.items() if reason is None)
            why = "; ".join(f"{n}: {reason}" for n, reason in refused.items() if reason)
            logger.info("attention: %s for %s%s", self.chosen[key], spec, f" ({why})" if why else "")
        return self.chosen[key]
