"""The Triton kernels of mixtures of experts: in the interpreter against float64, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from kernels.test_experts import CASES, ROUTINGS, case_of
from tolerances import tolerance

from octavo.kernels_triton import expert_kernels as kernels

pytestmark = pytest.mark.usefixtures("guarded")

Sizes = kernels.Sizes
# cuts that fit nothing evenly
CUTS = {
    "small": (Sizes(16, 16, 16, 4, 2), Sizes(16, 16, 16, 4, 2)),
    "large": (Sizes(64, 32, 32, 4, 2), Sizes(64, 16, 64, 4, 2)),
}


def run(case: list[list[int]], cut: str, dtype: torch.dtype, add: bool, **sizes: int) -> tuple[Any, Any]:
    x, w, up, down, want = case_of(case, poisoned=True, **sizes)
    x, w, up, down = (torch.from_numpy(a) for a in (x, w, up, down))
    ids = torch.tensor(case, dtype=torch.int32)
    more = torch.randn(x.shape, generator=torch.manual_seed(0)) if add else None
    halves = (a.to(dtype) for a in (x, up, down))
    x, up, down = halves
    out = kernels.experts(x, w, ids, up, down, more, torch.float32, CUTS[cut])
    return out.numpy(), want if more is None else want + more.numpy()


# interpreters take a while
FAST = ("uneven", "some none", "none at all")


@pytest.mark.parametrize("cut", ["small", pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_experts_equal_float64(case: str, cut: str) -> None:
    out, want = run(CASES[case], cut, torch.float32, add=cut == "large")
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "op"))


def test_experts_in_half_precision() -> None:
    """The interpreter multiplies bfloat16 wrongly; float16 has the same path."""
    out, want = run(CASES["uneven"], "small", torch.float16, add=True, embed_dim=40, size=33)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("few", [0, kernels.FEW_PAIRS], ids=["sorted", "direct"])
@pytest.mark.parametrize("case", [[[3, 1]], [[2]], [[5, 5]], [[0, 5], [5, 3], [0, 2]]], ids=str)
def test_few_pairs_need_no_sorting(case: list[list[int]], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW_PAIRS", few)
    out, want = run(case, "small", torch.float32, add=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("most", [0, kernels.MOST_PAIRS], ids=["sorted by torch", "sorted by comparing"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_every_pair_of_an_expert_once(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PAIRS", most)
    monkeypatch.setattr(kernels, "FEW_PAIRS", 0)
    ids = np.array(CASES[case], np.int32)
    blocks = kernels.sort_pairs(torch.from_numpy(ids), 5, 16)
    order, flat = blocks.order_P.numpy(), ids.reshape(-1)
    assert order.tolist() == np.argsort(flat, kind="stable").tolist()
    seen = []
    for expert, first, end in blocks.table.tolist():
        if expert >= 0:
            assert end - first <= 16
            assert (flat[order[first:end]] == expert).all()
            seen += list(range(first, end))
    assert seen == list(range((flat < 5).sum()))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("routing", [name for name, r in ROUTINGS.items() if kernels.routes(r)])
def test_route_equals_float64(routing: str, biased: bool) -> None:
    rng, spec = np.random.default_rng(2), ROUTINGS[routing]
    logits = rng.standard_normal((9, 12)).astype(np.float32)
    bias = rng.uniform(-0.2, 0.2, 12).astype(np.float32) if biased else None
    placed = None if bias is None else torch.from_numpy(bias)
    weights, ids = kernels.route(torch.from_numpy(logits), spec, placed, torch.arange(9) < 8)
    assert (ids[8] == 12).all()
    for t, row in enumerate(logits[:8].astype(np.float64)):
        want = oracle.chosen(spec, row, 0 if bias is None else bias)
        assert ids[t].tolist() == [expert for expert, _ in want]
        np.testing.assert_allclose(weights[t], [w for _, w in want], rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("real", [0.0, 0.6, 1.0], ids=["padding", "some real", "all real"])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 32])
def test_a_small_mixture_reads_nothing_beyond_its_arrays(num_tokens: int, real: float) -> None:
    """As the tiny engine runs it on a GPU, with its own cuts: fewer columns than a tile, blocks that are none."""
    rng, experts, chosen = np.random.default_rng(num_tokens), 8, 2
    ids = np.argsort(rng.random((num_tokens, experts)))[:, :chosen]
    ids[rng.random(num_tokens) >= real] = experts
    x, w, up, down, want = case_of(ids.tolist(), embed_dim=32, size=24, num_experts=experts, poisoned=True)
    x, w, up, down = (torch.from_numpy(a) for a in (x, w, up, down))
    out = kernels.experts(x, w, torch.from_numpy(ids.astype(np.int32)), up, down, None, torch.float32)
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "op"))


def test_route_takes_the_first_of_equals() -> None:
    logits = torch.zeros((1, 12))
    logits[0, [3, 7, 9]] = 1.0
    _, ids = kernels.route(logits, ROUTINGS["softmax"], None, torch.ones(1, dtype=torch.bool))
    assert ids[0].tolist() == [3, 7, 9]


def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own: here Triton is the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).parent / "compile_experts.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert {name.split("-")[0] for name in sizes} == {"route", "sort", "table", "up", "down", "sum"}
    # a program may have 227 KiB of shared memory there
    assert all(int(shared) <= 227 * 1024 for shared in sizes.values()), sizes
