"""Mixtures of experts in JAX: every way against float64, and lowered for machines that are not here.

Pallas' interpreter fills what a kernel does not write with nan.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plt
from kernels.test_experts import CASES, case_of
from tolerances import tolerance

from octavo.kernels_pallas import expert_kernels as kernels
from octavo.kernels_pallas import experts

Sizes = kernels.Sizes
# cuts that fit nothing evenly
CUTS = {
    "small": (Sizes(16, 16, 16, 4, 2), Sizes(16, 16, 16, 4, 2)),
    "large": (Sizes(64, 32, 32, 4, 2), Sizes(64, 16, 64, 4, 2)),
}
WAYS = {
    "reference": experts.reference,
    "ragged_dot": experts.by_ragged_dot,
    **{f"kernels-{cut}": partial(kernels.experts, interpret=True, sizes=sizes) for cut, sizes in CUTS.items()},
}


# interpreters take a while
FAST = ("uneven", "some none", "none at all")
PAIRS = [
    pytest.param(case, way, marks=[pytest.mark.slow] * (way.startswith("kernels") and case not in FAST))
    for case in CASES
    for way in WAYS
]


@pytest.mark.parametrize(("case", "way"), PAIRS)
def test_every_way_equals_float64(case: str, way: str) -> None:
    # the others multiply unchosen experts by zero
    x, w, up, down, want = case_of(CASES[case], poisoned=way.startswith("kernels"))
    got = jax.jit(WAYS[way])(x, w, np.array(CASES[case], np.int32), up, down)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "op"))


def beyond(ref: Any, mask: jax.Array) -> jax.Array:
    """Where a place that is not masked lies outside the array. The interpreter would clamp it."""
    ((indices, shape),) = ((t.indices, t.shape) for t in ref.transforms)
    outside = [(i < 0) | (i >= n) for i, n in zip(indices, shape, strict=True)]
    return mask & functools.reduce(jnp.logical_or, outside)


class Poisoned:
    """Pallas' loads and stores: what is read beyond an array is nan or no index, a store beyond one is all nan."""

    CompilerParams = plt.CompilerParams

    def load(self, ref: Any, *, mask: jax.Array, other: Any) -> jax.Array:
        value = plt.load(ref, mask=mask, other=other)
        integers = jnp.issubdtype(value.dtype, jnp.integer)
        return jnp.where(beyond(ref, mask), 1 << 30 if integers else jnp.nan, value)

    def store(self, ref: Any, value: jax.Array, *, mask: jax.Array) -> None:
        plt.store(ref, jnp.where(beyond(ref, mask).any(), jnp.nan, value), mask=mask)


@pytest.mark.parametrize(("case", "size"), [("uneven", 17), ("some none", 40)])
def test_kernels_reach_beyond_no_array(case: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "plt", Poisoned())
    x, w, up, down, want = case_of(CASES[case], size=size, poisoned=True)
    # not what was traced before
    run = partial(kernels.experts.__wrapped__, interpret=True, sizes=CUTS["small"])
    got = jax.jit(run)(x, w, np.array(CASES[case], np.int32), up, down)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("most", [0, kernels.MOST_PAIRS], ids=["argsort", "comparing"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_every_pair_of_an_expert_once(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PAIRS", most)
    monkeypatch.setattr(kernels, "FEW_PAIRS", 0)
    ids = np.array(CASES[case], np.int32)
    blocks = jax.tree.map(np.asarray, jax.jit(partial(kernels.cut, num_experts=5, rows=16))(ids))
    flat, seen = ids.reshape(-1), []
    assert blocks.order_P.tolist() == np.argsort(flat, kind="stable").tolist()
    for expert, first, end in zip(blocks.expert_B, blocks.first_B, blocks.end_B, strict=True):
        if expert >= 0:
            assert 0 < end - first <= 16
            assert (flat[blocks.order_P[first:end]] == expert).all()
            seen += range(first, end)
    assert seen == list(range((flat < 5).sum()))


@pytest.mark.parametrize("few", [0, kernels.FEW_PAIRS], ids=["sorted", "as they are"])
@pytest.mark.parametrize("case", [[[3, 1]], [[2]], [[5, 5]], [[0, 5], [5, 3], [0, 2]]], ids=str)
def test_few_pairs_need_no_sorting(case: list[list[int]], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW_PAIRS", few)
    monkeypatch.setattr(kernels, "plt", Poisoned())
    x, w, up, down, want = case_of(case, poisoned=True)
    run = partial(kernels.experts.__wrapped__, interpret=True, sizes=CUTS["small"])
    got = jax.jit(run)(x, w, np.array(case, np.int32), up, down)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "op"))


def shapes(num_tokens: int, dtype: Any) -> list[Any]:
    """Those of Qwen3-30B-A3B."""
    sizes = ((num_tokens, 2048), dtype), ((num_tokens, 8), jnp.float32), ((num_tokens, 8), jnp.int32)
    return [jax.ShapeDtypeStruct(*s) for s in (*sizes, ((128, 2048, 2, 768), dtype), ((128, 768, 2048), dtype))]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 8192])
def test_kernels_lower_for_cuda(num_tokens: int, dtype: Any) -> None:
    # a newer JAX asks which card it lowers for
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(kernels.experts).trace(*shapes(num_tokens, dtype))
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_tpu_gets_ragged_dot() -> None:
    assert experts.WAYS["tpu"] is experts.by_ragged_dot
    text = jax.jit(experts.by_ragged_dot).trace(*shapes(64, jnp.bfloat16)).lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" in text
