"""Norms, rope and writes in one Pallas kernel: interpreted, against numpy in float64, and lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_batches import ORDERS
from tolerances import tolerance

from octavo.kernels_pallas import fused

BLOCKS, BLOCK, KV = 7, 4, 2


def arrays(num_tokens: int, groups: int, dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(BLOCKS * BLOCK)[:num_tokens]
    angle = rng.uniform(0, 6, (num_tokens, dim // 2))
    return {
        "qkv": rng.normal(size=(num_tokens, KV, groups + 2, dim)),
        "cos": np.cos(angle), "sin": np.sin(angle),
        "blocks": slots // BLOCK, "offsets": slots % BLOCK,
        "pools": rng.normal(size=(2, BLOCKS, BLOCK, KV, dim)),
        "scales": rng.normal(size=(2, dim)),
    }  # fmt: skip


def expected(a: dict[str, np.ndarray], eps: float | None) -> tuple[np.ndarray, np.ndarray]:
    """q turned, and the pools as [2, N, P, K, D], in float64."""
    q, k, v = a["qkv"][:, :, :-2], a["qkv"][:, :, -2], a["qkv"][:, :, -1]
    if eps is not None:
        q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * s for x, s in zip((q, k), a["scales"], strict=True))

    def turn(x: np.ndarray) -> np.ndarray:
        cos, sin = (a[n].reshape(len(x), *(1,) * (x.ndim - 2), -1) for n in ("cos", "sin"))
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    pools = a["pools"].copy()
    pools[0, a["blocks"], a["offsets"]], pools[1, a["blocks"], a["offsets"]] = turn(k), v
    return turn(q), pools


def run(
    a: dict[str, Any], eps: float | None, order: str, dtype: Any = jnp.float32, **how: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel makes of it, as `expected` returns it."""
    moved = order == ORDERS[1]
    k_pool, v_pool = (jnp.asarray(p.swapaxes(1, 2) if moved else p, dtype) for p in a["pools"])
    scales = None if eps is None else tuple(jnp.asarray(s, dtype) for s in a["scales"])
    places = (jnp.asarray(a[n], jnp.int32) for n in ("blocks", "offsets"))
    q, pools = fused.rope_write(
        jnp.asarray(a["qkv"], dtype), jnp.asarray(a["cos"], jnp.float32), jnp.asarray(a["sin"], jnp.float32),
        {"k": k_pool, "v": v_pool}, *places, scales, order=order, eps=eps,
        **({"interpret": True} | how),
    )  # fmt: skip
    # what is changed in place is not waited for
    q.block_until_ready()
    out = np.stack([np.asarray(pools[n], np.float64) for n in ("k", "v")])
    return np.asarray(q, np.float64), out.swapaxes(2, 3) if moved else out


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize(("groups", "dim"), [(1, 64), (4, 80), (7, 96)])
def test_rope_write_equals_float64(groups, dim, eps):
    a, order = arrays(5, groups, dim), ORDERS[groups % 2]
    for found, want in zip(run(a, eps, order), expected(a, eps), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.parametrize("groups", [1, 5])
def test_programs_of_several_tokens_stop_at_the_last(groups, monkeypatch):
    """As in a prefill; 11 tokens are no multiple of what a program takes."""
    monkeypatch.setattr(fused, "FEW", 0)
    a = arrays(11, groups, 64)
    for found, want in zip(run(a, 1e-5, ORDERS[0]), expected(a, 1e-5), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("groups", "dim", "eps"), [(4, 128, None), (2, 128, 1e-6), (7, 80, 1e-6)])
def test_rope_write_equals_float64_on_a_gpu(groups, dim, eps, dtype, order, in_place, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BLOCKS", 80)
    for num_tokens in (3, 64, 301):
        a = arrays(num_tokens, groups, dim)
        if dtype == "bfloat16":
            a |= {n: a[n].astype(jnp.bfloat16).astype(np.float64) for n in ("qkv", "pools", "scales")}
        out = run(a, eps, order, dtype, interpret=False, in_place=in_place)
        for found, want in zip(out, expected(a, eps), strict=True):
            # rounded to 8 bits: after the norm, and at the end
            near = 1e-5 if dtype == "float32" else 2**-7 * np.abs(want).max()
            np.testing.assert_allclose(found, want, rtol=0, atol=near)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("groups", "dim", "eps"), [(4, 128, None), (2, 128, 1e-6), (3, 80, 1e-6)])
def test_rope_write_lowers_for_cuda_in_place(groups, dim, eps, order):
    def of(*shape: int, kind: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    def program(pools: Any, *args: Any) -> Any:
        qkv, cos, sin, blocks, offsets, scales = args
        return fused.rope_write(qkv, cos, sin, pools, blocks, offsets, scales, order=order, eps=eps)

    pool = of(64, *((16, 8) if order == ORDERS[0] else (8, 16)), dim)
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    for num_tokens in (64, 1024):
        angles, ids = of(num_tokens, dim // 2, kind="float32"), of(num_tokens, kind="int32")
        scales = (of(dim), of(dim)) if eps else None
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(program, donate_argnums=0).trace(
                {"k": pool, "v": pool}, of(num_tokens, 8, groups + 2, dim), angles, angles, ids, ids, scales
            )
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" in text
        assert text.count("#stablehlo.output_operand_alias<") == 2
