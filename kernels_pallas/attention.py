"""The registry of attention implementations. Each says, with a reason, what it does not serve."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from . import cpu_attention, mosaic_gpu, mosaic_tpu, ragged, reference, shared_reference, triton_lowered

logger = logging.getLogger("octavo")


class Implementation(NamedTuple):
    """plan(step) is made once a step and cache group; attend(q, k, v, order, step, spec, sinks, plan) once a layer.

    `scales`: attend takes one more argument, the scales of a quantised cache.

    supports(spec, dtype, platform, mode, block_size) is None, or the reason why not. `any_width`: a wider
    block table costs nothing. prepare(plan, spec, itemsize) completes a plan that is a pytree; None: it is none.
    `shares`: it reads prefixes once that Step.shared names; others read them for each sequence.
    """

    attend: Callable[..., jax.Array]
    supports: Callable[..., str | None]
    plan: Callable[[Any], Any]
    any_width: bool = False
    prepare: Callable[[Any, Any, int], None] | None = None
    scales: bool = False
    shares: bool = False


def supports_everything(spec: Any, dtype: str, platform: str, mode: str, block_size: int) -> str | None:
    """None: the reference serves whatever the cache can hold."""
    return None


IMPLEMENTATIONS = {
    "cpu": Implementation(cpu_attention.attend, cpu_attention.supports, cpu_attention.plan),
    "mosaic_gpu": Implementation(
        mosaic_gpu.attend, mosaic_gpu.supports, ragged.Plan, True, mosaic_gpu.prepare, shares=True
    ),
    "mosaic_tpu": Implementation(mosaic_tpu.attend, mosaic_tpu.supports, ragged.Plan, True, mosaic_tpu.prepare),
    "triton_lowered": Implementation(
        triton_lowered.attend, triton_lowered.supports, ragged.Plan, True, triton_lowered.prepare, shares=True
    ),
    "reference": Implementation(
        shared_reference.attend, supports_everything, reference.query_tiles, scales=True, shares=True
    ),
}
# of "auto", best first, by JAX's name of the platform: interpreters are for those who name them
PREFERENCE = {
    "cpu": ("cpu", "reference"),
    "gpu": ("mosaic_gpu", "triton_lowered", "reference"),
    "tpu": ("mosaic_tpu", "reference"),
}


def why_not(name: str, spec: Any, dtype: str, platform: str, mode: str, block_size: int, scaled: bool) -> str | None:
    """Why an implementation cannot serve, or None."""
    if scaled and not IMPLEMENTATIONS[name].scales:
        return "it takes no scales of a quantised cache"
    return IMPLEMENTATIONS[name].supports(spec, dtype, platform, mode, block_size)


class AttentionOp:
    """The implementation that was asked for. `for_step` returns a copy in which the layers of a step share plans."""

    def __init__(self, name: str, mode: str) -> None:
        if name != "auto" and name not in IMPLEMENTATIONS:
            raise ValueError(f"attention {name!r} is none of auto, {', '.join(IMPLEMENTATIONS)}")
        self.name, self.mode = name, mode
        self.steps: Sequence = ()
        self.plans: dict[tuple[str, int], Any] = {}
        self.held: Any = None
        self.told: set[Any] = set()  # which choices were logged

    def for_step(self, steps: Sequence) -> AttentionOp:
        op = copy.copy(self)
        op.steps, op.plans = steps, {}
        return op

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks: Any, scales: Any
    ) -> jax.Array:
        block_size = k.shape[order.split().index("p")]
        name = self.choose(spec, k.dtype.name, block_size, scales is not None)
        more = () if scales is None else (scales,)
        return IMPLEMENTATIONS[name].attend(q, k, v, order, step, spec, sinks, self.plan(name, step), *more)

    def holding(self, plan: Any) -> AttentionOp:
        """A copy for which every layer's plan is this one."""
        op = copy.copy(self)
        op.held = plan
        return op

    def prepared(self, step: Any, spec: Any, dtype: Any, block_size: int, scaled: bool) -> Any:
        """The plan of a layer, complete and a pytree; None if nobody serves it, or has no such plan.

        Says nothing and refuses nothing: a layer that gathers its keys by itself never asks for attention.
        """
        name, _ = self.find(spec, dtype.name, block_size, scaled)
        if name is None or (prepare := IMPLEMENTATIONS[name].prepare) is None:
            return None
        plan = self.plan(name, step)
        prepare(plan, spec, dtype.itemsize)
        return plan

    def plan(self, name: str, step: Any) -> Any:
        if self.held is not None:
            return self.held
        group = next((g for g, s in enumerate(self.steps) if s.block_tables_SB is step.block_tables_SB), None)
        if group is None:
            return IMPLEMENTATIONS[name].plan(step)
        if (name, group) not in self.plans:
            self.plans[name, group] = IMPLEMENTATIONS[name].plan(step)
        return self.plans[name, group]

    def any_width(self, specs: Iterable, dtype: str, scaled: bool) -> bool:
        """Whether for all these layers a wider block table costs nothing."""
        return all(n is not None and n.any_width for n in self.likely(specs, dtype, scaled))

    def shares_prefixes(self, specs: Iterable, dtype: str, scaled: bool) -> bool:
        """Whether for all these layers a prefix that sequences share is read once."""
        return all(n is not None and n.shares for n in self.likely(specs, dtype, scaled))

    def likely(self, specs: Iterable, dtype: str, scaled: bool) -> list[Implementation | None]:
        """What will serve these layers, asked before there is a cache: with blocks of the usual size."""
        names = [self.find(spec, dtype, 16, scaled)[0] for spec in specs]
        return [None if n is None else IMPLEMENTATIONS[n] for n in names]

    def find(self, spec: Any, dtype: str, block_size: int, scaled: bool) -> tuple[str | None, dict[str, str]]:
        """The implementation for a cache of `dtype`, with scales or not (None: there is none); why not those before."""
        platform, refused = jax.default_backend(), {}
        for name in PREFERENCE[platform] if self.name == "auto" else (self.name,):
            reason = why_not(name, spec, dtype, platform, self.mode, block_size, scaled)
            if reason is None:
                return name, refused
            refused[name] = reason
        return None, refused

    def choose(self, spec: Any, dtype: str, block_size: int, scaled: bool) -> str:
        """As `find`, and tells what "auto" found. Raises NotImplementedError if there is none."""
        name, refused = self.find(spec, dtype, block_size, scaled)
        if name is None:
            # only of a named one: the reference, the last of "auto", serves everything
            raise NotImplementedError(f"attention {self.name!r}: {refused[self.name]}")
        why = "; ".join(f"{n}: {reason}" for n, reason in refused.items())
        if self.name == "auto" and (question := (name, spec, why)) not in self.told:
            self.told.add(question)
            logger.info("attention: %s for %s%s", name, spec, f" ({why})" if why else "")
        return name
