"""The norm of hidden rows in Pallas, lowered through Triton: of 64 rows of 4,096 XLA's own takes a third longer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .triton_tiles import CACHES, power_of_two

FEW = 8  # rows up to which XLA pads them for a product, and norms them meanwhile


def serves(x: jax.Array) -> bool:
    """Whether rms_norm knows such rows."""
    return x.ndim == 2 and x.shape[0] > FEW and x.dtype.name in CACHES


def kernel(x_ref: Any, scale_ref: Any, out_ref: Any, *, eps: float) -> None:
    """One row, its columns padded to a power of two."""
    row, size = pl.program_id(0), x_ref.shape[1]
    e_E = jnp.arange(power_of_two(size))
    inside_E, other = (None, None) if e_E.shape[0] == size else (e_E < size, 0.0)
    x_E, scale_E = (
        plt.load(at, mask=inside_E, other=other).astype(jnp.float32) for at in (x_ref.at[row, e_E], scale_ref.at[e_E])
    )
    normed_E = x_E * lax.rsqrt(jnp.sum(x_E * x_E, axis=0) / size + eps) * scale_E
    plt.store(out_ref.at[row, e_E], normed_E.astype(out_ref.dtype), mask=inside_E)


# a program of its own, so that a step's layers are traced and lowered once
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(x_TE: jax.Array, scale_E: jax.Array, *, eps: float, interpret: bool) -> jax.Array:
    """x / rms(x) * scale over the last axis, float32 inside. Reference: JaxOps.rms_norm, to the last rounding."""
    warps = min(max(power_of_two(x_TE.shape[1]) // 256, 1), 8)
    return pl.pallas_call(
        functools.partial(kernel, eps=eps),
        grid=(x_TE.shape[0],),
        out_shape=jax.ShapeDtypeStruct(x_TE.shape, x_TE.dtype),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name="rms_norm",
    )(x_TE, scale_E)
