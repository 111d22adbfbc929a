"""What the torch room's CPU attention promises beyond the shared table of cases: its plan, views, dtypes, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels_triton import attention, cpu_attention
from octavo.kernels_triton.ops import TorchOps
from octavo.models.interface import AttentionSpec, Step

SPEC = AttentionSpec(2, 3, 16, 16, 0.25)
BLOCK = 8


def _make_step(computed: list[int], counts: list[int], *, padding: int = 0, ordered: bool = False) -> Step:
    """A step over sequences whose blocks lie in random order, or one after the other."""
    lengths = np.array(computed) + counts
    widths = -(-lengths // BLOCK)
    ids = 1 + (np.arange(sum(widths)) if ordered else np.random.default_rng(0).permutation(sum(widths)))
    tables = np.zeros((len(counts), max(widths)), np.int32)
    for row, width, end in zip(tables, widths, np.cumsum(widths), strict=True):
        row[:width] = ids[end - width : end]
    starts = np.concatenate([[0], np.cumsum(counts)])
    seq = np.concatenate([np.repeat(np.arange(len(counts)), counts), np.full(padding, len(counts) - 1)])
    token = np.arange(len(seq))
    real = token < starts[-1]
    positions = np.where(real, np.array(computed)[seq] + token - starts[seq], 0)

    def put(x: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x).astype(np.int32))

    return Step(
        put(0 * token), put(positions), put(seq), torch.from_numpy(real), put(0 * token), put(0 * token), put(lengths),
        put(starts), put(tables), max(counts) <= 1, {}, {},
    )  # fmt: skip


def _make_arrays(step: Step, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng, blocks = np.random.default_rng(seed), int(step.block_tables_SB.max()) + 1
    shapes = (len(step.seq_ids_T), 2, 3, 16), (blocks, BLOCK, 2, 16), (blocks, BLOCK, 2, 16)
    q, k, v = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in shapes)
    return q, k, v


def _run(name: str, step: Step, arrays: Sequence[torch.Tensor], spec: AttentionSpec = SPEC) -> torch.Tensor:
    q, k, v = arrays
    return TorchOps(attention=name).for_step([step]).attention(q, k, v, "n p k d", step, spec)


@pytest.mark.parametrize("ordered", [True, False], ids=["one run of blocks", "scattered"])
@pytest.mark.parametrize(
    ("computed", "counts"),
    [([29], [1]), ([0], [50]), ([29, 3, 16], [1, 40, 1]), ([7] * 5, [1] * 5)],
    ids=["one row", "one prompt", "mixed", "rows of one length"],
)
def test_the_pool_is_not_changed(computed, counts, ordered):
    """Whether its blocks are copied or viewed: keys that nobody sees are zeroed in the copy alone."""
    step = _make_step(computed, counts, ordered=ordered)
    q, k, v = _make_arrays(step)
    kept = k.clone(), v.clone()
    out = _run("cpu", step, (q, k, v))
    torch.testing.assert_close(out, _run("reference", step, (q, k, v)), rtol=0, atol=2e-6)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])


def test_a_run_of_blocks_is_not_copied():
    for ordered in (True, False):
        step = _make_step([29], [1], ordered=ordered)
        plan = cpu_attention.plan(step, SPEC, BLOCK)
        _, k, _ = _make_arrays(step)
        found = cpu_attention.gather(k, "n p k d", plan.units[0])
        assert (found.data_ptr() == k[1].data_ptr()) == ordered


def test_every_real_token_is_planned_once_and_copies_stay_small():
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 2, 200).tolist() + [5, 300]
    step = _make_step(rng.integers(1, 4000, len(counts)).tolist(), counts, padding=9)
    plan = cpu_attention.plan(step, SPEC, BLOCK)
    tokens = [unit.tokens_W.numpy() for unit in plan.units if unit.tokens_W is not None]
    tokens += [np.arange(t.tokens.start, t.tokens.stop) for unit in plan.units for t in unit.tiles]
    assert np.array_equal(np.sort(np.concatenate(tokens)), np.arange(sum(counts)))
    assert plan.num_real == sum(counts)
    several = [unit.blocks_WB.size * BLOCK * 2 * 16 for unit in plan.units if len(unit.blocks_WB) > 1]
    assert several
    assert max(several) <= cpu_attention.MEMORY
    assert len(plan.units) < 60


def test_a_window_copies_only_its_blocks():
    step = _make_step([500, 37], [1, 20])
    plan = cpu_attention.plan(step, replace(SPEC, window=9), BLOCK)
    assert [unit.blocks_WB.shape for unit in plan.units] == [(1, 2), (1, 5)]
    full = cpu_attention.plan(step, SPEC, BLOCK)
    assert [unit.blocks_WB.shape for unit in full.units] == [(1, 63), (1, 8)]


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 6, 0]], ids=["decode", "mixed"])
def test_padding_comes_out_as_zero(counts):
    step = _make_step([9, 4, 17], counts, padding=4)
    out = _run("cpu", step, _make_arrays(step))
    assert not out[sum(counts) :].any()
    assert out[: sum(counts)].any(-1).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_dtypes_round_only_what_goes_in_and_out(dtype, softcap):
    step, spec = _make_step([40, 3, 90], [1, 20, 1]), replace(SPEC, softcap=softcap)
    arrays = tuple(x.to(dtype) for x in _make_arrays(step))
    want = _run("reference", step, tuple(x.float() for x in arrays), spec)
    for name in ("reference", "cpu"):
        out = _run(name, step, arrays, spec)
        assert out.dtype == dtype
        # the weights of keys may be rounded too before they meet the values
        torch.testing.assert_close(out.float(), want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_a_cache_of_another_dtype_is_widened():
    step = _make_step([40, 3, 90], [1, 20, 1])
    q, k, v = _make_arrays(step)
    k, v = k.bfloat16(), v.bfloat16()
    want = _run("reference", step, (q, k.float(), v.float()))
    for name in ("reference", "cpu"):
        torch.testing.assert_close(_run(name, step, (q, k, v)), want, rtol=0, atol=2e-6)


def test_a_step_is_planned_once_for_all_layers(monkeypatch):
    made = []
    implementation = attention.IMPLEMENTATIONS["cpu"]

    def counting(*args: Any) -> Any:
        made.append(args)
        return implementation.plan(*args)

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "cpu", implementation._replace(plan=counting))
    steps = [_make_step([29, 5], [1, 1]), _make_step([29, 5], [1, 1])]
    ops = TorchOps(attention="cpu").for_step(steps)
    for _ in range(3):
        for step in steps:
            ops.attention(*_make_arrays(step), "n p k d", step, replace(SPEC))
    assert len(made) == 2
    ops.attention(*_make_arrays(steps[0]), "n p k d", steps[0], replace(SPEC, window=3))
    assert len(made) == 3


def test_ops_outside_a_step_remember_no_plan():
    ops = TorchOps(attention="cpu")
    for computed in ([29, 5], [11, 60]):
        step = _make_step(computed, [1, 1])
        arrays = _make_arrays(step)
        out = ops.attention(*arrays, "n p k d", step, SPEC)
        torch.testing.assert_close(out, _run("reference", step, arrays), rtol=0, atol=2e-6)


def test_a_named_implementation_that_cannot_serve_says_why():
    with pytest.raises(NotImplementedError, match="cpu: it reads lengths on the host, and the cache is on cuda"):
        attention.choose("cpu", SPEC, torch.float32, torch.device("cuda"))


def test_auto_passes_over_what_cannot_serve(monkeypatch):
    assert attention.choose("auto", SPEC, torch.float32, torch.device("cpu")) == "cpu"
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert attention.choose("auto", SPEC, torch.float32, torch.device("cuda")) == "reference"


def test_an_order_that_cpu_attention_does_not_know_is_refused():
    step = _make_step([3], [1])
    q, k, v = _make_arrays(step)
    with pytest.raises(NotImplementedError, match="order 'p n k d'"):
        TorchOps(attention="cpu").attention(q, k.transpose(0, 1), v.transpose(0, 1), "p n k d", step, SPEC)
