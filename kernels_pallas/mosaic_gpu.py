"""Paged attention for Hopper: prefill by Mosaic GPU (mosaic_prefill.py), decode by the kernel of triton_lowered.py.

Decode is bound by memory, and that kernel reads as fast as one with TMA and wgmma did (kernels.md: 3,990 against 3,920
GB/s at 64 x 4096); prefill is bound by products, and only wgmma with warpgroups taking turns comes near their limit.
"""

from __future__ import annotations

from typing import Any

import jax

from . import mosaic_prefill, triton_lowered
from .ragged import Plan, Several

DIMS = (64, 128)
CACHES = ("bfloat16", "float16")

LOWERS = jax.__version_info__ < (0, 12)  # tried: 0.10.2, 0.11.2; not 0.12.0


def supports(spec: Any, dtype: str, platform: str, mode: str, block_size: int) -> str | None:
    """Why it cannot serve, or None. On a CPU it runs in Pallas' GPU interpreter, when named."""
    keys = mosaic_prefill.tile_keys(spec.k_dim)
    if platform not in ("gpu", "cpu"):
        return f"it is for GPUs, not for {platform}"
    if platform == "gpu" and not is_hopper():
        return "it is for Hopper, whose wgmma it uses"
    if platform == "gpu" and not LOWERS:
        return f"JAX {jax.__version__} does not lower its prefill (TransferPlanDerivationError); 0.10 and 0.11 do"
    if dtype not in CACHES:
        return f"wgmma wants a cache of {' or '.join(CACHES)}, not {dtype}"
    if mode == "auto":
        return "the compiler cannot shard a kernel"
    if spec.k_dim != spec.v_dim or spec.k_dim not in DIMS:
        return f"it serves head dims of {' and '.join(map(str, DIMS))}, not {spec.k_dim} and {spec.v_dim}"
    if block_size % 8 or keys % block_size:
        return f"blocks of {block_size} tokens are not a multiple of 8 that divides a tile of {keys} keys"
    return None


def is_hopper() -> bool:
    return str(getattr(jax.local_devices()[0], "compute_capability", "")).startswith("9.")


def attend(
    q_TKGD: jax.Array, k: jax.Array, v: jax.Array, order: str, step: Any, spec: Any, sinks_KG: Any, plan: Plan
) -> jax.Array:
    """softmax(scale q k^T + mask) v, each query over its sequence's keys up to itself; [T, K, G, Dv].

    Reference: reference.py. Tolerance: 2e-2 absolute, for inputs of unit variance.
    """
    on_cpu, table, several = jax.default_backend() == "cpu", step.block_tables_SB, None
    if not plan.decode:
        out = mosaic_prefill.prefill(
            q_TKGD,
            k,
            v,
            table,
            _pairs(plan, spec),
            sinks_KG,
            order=order,
            spec=spec,
            interpret=mosaic_prefill.interpreter() if on_cpu else None,
            num_programs=_programs(on_cpu),
        )
        several = Several(out, plan.end_1)
    return triton_lowered.decode(
        q_TKGD, k, v, table, plan.rows, sinks_KG, plan.prefixes, several, order=order, spec=spec, interpret=on_cpu
    )


def prepare(plan: Plan, spec: Any, itemsize: int) -> None:
    """Has the plan make what layers of this spec will ask of it."""
    if not plan.decode:
        _pairs(plan, spec)


def _pairs(plan: Plan, spec: Any) -> mosaic_prefill.Pairs:
    return plan.once(("pairs", spec.group_size), lambda: mosaic_prefill.pairs_of(plan, spec.group_size))


def _programs(on_cpu: bool) -> int:
    """Multiprocessors of the GPU. Few in the interpreter, which runs them one after the other."""
    return 3 if on_cpu else jax.local_devices()[0].core_count
