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

from octavo.kernels_triton import expert_blocks, expert_router
from octavo.kernels_triton import expert_kernels as kernels
from octavo.kernels_triton.arrivals import counters

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


def test_shapes_that_fit_a_tile_evenly_equal_float64() -> None:
    for case in FAST:
        out, want = run(CASES[case], "small", torch.float32, True, embed_dim=32, size=32)
        np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("few", [0, expert_blocks.FEW_PAIRS], ids=["sorted", "direct"])
@pytest.mark.parametrize("case", [[[3, 1]], [[2]], [[5, 5]], [[0, 5], [5, 3], [0, 2]]], ids=str)
def test_few_pairs_need_no_sorting(case: list[list[int]], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_blocks, "FEW_PAIRS", few)
    for add in (False, True):
        out, want = run(case, "small", torch.float32, add)
        np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "op"))
    assert not counters(torch.device("cpu")).any()


RANDOM = np.random.default_rng(4).integers(0, 6, (300, 4)).tolist()


@pytest.mark.parametrize("way", ["by comparing", "by counting", "by counting chunks"])
@pytest.mark.parametrize("case", [*CASES, "several chunks"])
def test_blocks_hold_every_pair_of_an_expert_once(case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_blocks, "MOST_PAIRS", expert_blocks.MOST_PAIRS if way == "by comparing" else 0)
    monkeypatch.setattr(expert_blocks, "FEW_PAIRS", 0)
    if way == "by counting chunks":
        monkeypatch.setattr(expert_blocks, "CHUNK", 256)
        monkeypatch.setattr(expert_blocks, "ADDED", 2)
        monkeypatch.setattr(expert_blocks, "COMPARED", 128)
    ids = np.array(CASES.get(case, RANDOM), np.int32)
    assert not counters(torch.device("cpu")).any()
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
@pytest.mark.parametrize("routing", [name for name, r in ROUTINGS.items() if expert_router.routes(r)])
def test_route_equals_float64(routing: str, biased: bool) -> None:
    rng, spec = np.random.default_rng(2), ROUTINGS[routing]
    logits = rng.standard_normal((9, 12)).astype(np.float32)
    bias = rng.uniform(-0.2, 0.2, 12).astype(np.float32) if biased else None
    placed = None if bias is None else torch.from_numpy(bias)
    weights, ids = expert_router.route(torch.from_numpy(logits), spec, placed, torch.arange(9) < 8)
    assert (ids[8] == 12).all()
    for t, row in enumerate(logits[:8].astype(np.float64)):
        want = oracle.chosen(spec, row, 0 if bias is None else bias)
        assert ids[t].tolist() == [expert for expert, _ in want]
        np.testing.assert_allclose(weights[t], [w for _, w in want], rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("routing", [name for name, r in ROUTINGS.items() if expert_router.routes(r)])
@pytest.mark.parametrize("normed", [False, True], ids=["as they are", "normed"])
def test_few_tokens_choose_as_float64(
    routing: str, biased: bool, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lie apart, of which the last is padding; five programs of a token, the last of them half empty."""
    monkeypatch.setattr(expert_router, "TILE", 128)
    rng, spec = np.random.default_rng(5), ROUTINGS[routing]
    x, router = rng.standard_normal((5, 60)).astype(np.float32)[:, :40], rng.standard_normal((12, 40)) * 40**-0.5
    router, scale = router.astype(np.float32), rng.uniform(0.5, 1.5, 40).astype(np.float32)
    bias = rng.uniform(-0.2, 0.2, 12).astype(np.float32) if biased else None
    norm = (torch.from_numpy(scale), 1e-6) if normed else None
    placed = None if bias is None else torch.from_numpy(bias)
    at = torch.from_numpy(x), norm, torch.from_numpy(router), spec, placed, torch.arange(5) < 4
    h, weights, ids = expert_router.choose(*at)
    rows = oracle.norm(x.astype(np.float64), scale.astype(np.float64), 1e-6) if normed else x.astype(np.float64)
    np.testing.assert_allclose(h, rows, rtol=0, atol=tolerance("float32", "op"))
    assert (ids[4] == 12).all() and weights.isfinite().all()
    for t, row in enumerate(rows[:4] @ router.astype(np.float64).T):
        want = oracle.chosen(spec, row, 0 if bias is None else bias)
        assert ids[t].tolist() == [expert for expert, _ in want]
        np.testing.assert_allclose(weights[t], [w for _, w in want], rtol=0, atol=tolerance("float32", "op"))
    assert not counters(torch.device("cpu")).any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_that_is_no_number_still_chooses_experts() -> None:
    x = torch.full((1, 32), float("nan"))
    _, _, ids = expert_router.choose(x, None, torch.ones(12, 32), ROUTINGS["softmax"], None, torch.ones(1).bool())
    assert ids[0].tolist() == [0, 1, 2]


def test_equals_of_few_tokens_are_chosen_in_order() -> None:
    router = torch.zeros(12, 32)
    router[[3, 7, 9], 0] = 1.0
    _, _, ids = expert_router.choose(torch.ones(1, 32), None, router, ROUTINGS["softmax"], None, torch.ones(1).bool())
    assert ids[0].tolist() == [3, 7, 9]


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
    _, ids = expert_router.route(logits, ROUTINGS["softmax"], None, torch.ones(1, dtype=torch.bool))
    assert ids[0].tolist() == [3, 7, 9]


def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own: here Triton is the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).parent / "compile_experts.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split() for line in done.stdout.splitlines())
    kernels = {"route", "choose", "sort", "count", "place", "up", "down", "sum"}
    assert {name.split("-")[0] for name in sizes} == kernels
    # a program may have 227 KiB of shared memory there
    assert all(int(shared) <= 227 * 1024 for shared in sizes.values()), sizes
