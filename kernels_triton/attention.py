"""The registry of attention implementations: what each supports, with a reason, and which one serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from . import cpu_attention, reference, shared_reference

log = logging.getLogger("octavo")


class Implementation(NamedTuple):
    """attend(q, k, v, order, step, spec, sinks, plan) attends; supports(spec, dtype, device, cache) is None, or why
    not, for queries of `dtype` and a cache of the dtype `cache`; plan(step, spec, block_size) is what all layers of a
    step with one block table and spec share. `any_width`: a wider block table costs nothing. `scales`: attend takes
    one more argument, the scales of a quantised cache. `shares`: it reads prefixes once that Step.shared names; others
    read them for each sequence.
    """

    attend: Callable[..., torch.Tensor]
    plan: Callable[[Any, Any, int], Any]
    supports: Callable[[Any, torch.dtype, torch.device, torch.dtype], str | None]
    any_width: bool = False
    scales: bool = False
    shares: bool = False


def supports_everything(spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype) -> str | None:
    """None: the reference serves whatever the cache can hold."""
    return None


def triton_room() -> Any:
    """The module of the Triton kernels: imported when it is first of use, because not everybody has Triton."""
    from . import triton_attention

    return triton_attention


def triton_supports(spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype) -> str | None:
    """None, or why not."""
    return triton_room().supports(spec, dtype, device, cache) if find_spec("triton") else "Triton is not installed"


IMPLEMENTATIONS = {
    "reference": Implementation(shared_reference.attend, reference.plan, supports_everything, scales=True, shares=True),
    "cpu": Implementation(cpu_attention.attend, cpu_attention.plan, cpu_attention.supports, scales=True),
    "triton": Implementation(
        lambda *args: triton_room().attend(*args),
        lambda *args: triton_room().plan(*args),
        triton_supports,
        any_width=True,
        scales=True,
        shares=True,
    ),
}
PREFERENCE = ("cpu", "triton", "reference")  # what "auto" tries, in order


def choose(
    name: str,
    spec: Any,
    dtype: torch.dtype,
    device: torch.device,
    cache: torch.dtype | None = None,
    scaled: bool = False,
) -> str:
    """The implementation that serves; `cache` None: of the queries' dtype.

    Raises NotImplementedError with the reasons when none does.
    """
    reasons = []
    for candidate in PREFERENCE if name == "auto" else (name,):
        reason = IMPLEMENTATIONS[candidate].supports(spec, dtype, device, cache or dtype)
        if scaled and not IMPLEMENTATIONS[candidate].scales:
            reason = "it takes no scales of a quantised cache"
        if reason is None:
            if name == "auto":
                log.info("attention: %s (for %s, %s, %s)", candidate, spec, dtype, device)
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise NotImplementedError(f"no attention implementation serves {spec}: {'; '.join(reasons)}")
