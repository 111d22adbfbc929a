"""The registry of attention implementations: what each supports, with a reason, and which one serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import cpu_attention, reference

log = logging.getLogger("octavo")


class Implementation(NamedTuple):
    """function(q, k, v, order, step, spec, sinks, plan) attends; supports(spec, dtype, device) is None, or why not;
    plan(step, spec, block_size) is what all layers of a step with one block table and spec share.
    """

    function: Callable[..., torch.Tensor]
    plan: Callable[[Any, Any, int], Any]
    supports: Callable[[Any, torch.dtype, torch.device], str | None]


def anything(spec: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    return None


IMPLEMENTATIONS = {
    "reference": Implementation(reference.attend, reference.plan, anything),
    "cpu": Implementation(cpu_attention.attend, cpu_attention.plan, cpu_attention.supports),
}
PREFERRED = ("cpu", "reference")  # what "auto" tries, in order


def choose(name: str, spec: Any, dtype: torch.dtype, device: torch.device) -> str:
    """The implementation that serves. Raises NotImplementedError with the reasons when none does."""
    reasons = []
    for candidate in PREFERRED if name == "auto" else (name,):
        reason = IMPLEMENTATIONS[candidate].supports(spec, dtype, device)
        if reason is None:
            if name == "auto":
                log.info("attention: %s (for %s, %s, %s)", candidate, spec, dtype, device)
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise NotImplementedError(f"no attention implementation serves {spec}: {'; '.join(reasons)}")
