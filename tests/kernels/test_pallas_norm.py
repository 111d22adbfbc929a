"""The norm of hidden rows in Pallas: interpreted, against numpy in float64, and lowered for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

from octavo.kernels_pallas import norm


@pytest.mark.parametrize("size", [64, 96, 1024])
def test_norm_equals_float64(size):
    rng = np.random.default_rng(size)
    x, scale = rng.normal(size=(9, size)), rng.normal(size=size)
    out = norm.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), eps=1e-5, interpret=True)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [80, 1024, 4096])
def test_norm_lowers_for_cuda(size, dtype):
    x, scale = (jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in ((64, size), (size,)))
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(partial(norm.rms_norm, eps=1e-5, interpret=False)).trace(x, scale)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_few_rows_are_left_to_xla():
    assert [norm.serves(jnp.zeros(shape)) for shape in ((8, 64), (9, 64), (9, 2, 64))] == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1024, 4096, 5120])
def test_norm_equals_float64_on_a_gpu(size):
    rng = np.random.default_rng(size)
    x, scale = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((65, size), size))
    out = norm.rms_norm(x, scale, eps=1e-5, interpret=False).astype(jnp.float32)
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    # rounded to 8 bits
    np.testing.assert_allclose(out, want, rtol=2**-7, atol=0)
