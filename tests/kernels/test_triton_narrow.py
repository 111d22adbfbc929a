"""Caches of 8 bits in the Triton kernels, in the interpreter: ragged cases against float64 of what is held."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_batches import Batch, backend_of, expected, make_batch, make_step
from kernels.test_triton_kernels import CASES as OWN
from shapes import CASES, SHARED, Ragged
from tolerances import tolerance

from octavo.engine.backend import Backend
from octavo.kernels_triton import triton_attention

pytestmark = pytest.mark.usefixtures("guarded")

RAGGED = (CASES[0], *CASES[3::9], *OWN[1:3], SHARED[0], SHARED[6])
FP8 = torch.float8_e4m3fn


def narrowed(x: np.ndarray, dtype: torch.dtype, scaled: bool) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(codes, scales, what they stand for) of an array that is nan where nobody wrote. Garbage is there then."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    wide, written = torch.from_numpy(np.nan_to_num(x)), torch.from_numpy(~np.isnan(x[..., 0]))
    scale = wide.abs().amax(-1) / largest if scaled else torch.ones(x.shape[:-1])
    codes = wide / torch.where(scale > 0, scale, 1.0)[..., None]
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    held = codes.double() * scale.double()[..., None]
    codes = torch.where(written[..., None], codes.float(), 99.0 if dtype == torch.int8 else float("nan")).to(dtype)
    held = torch.where(written[..., None], held, float("nan"))
    return codes, torch.where(written, scale, float("nan")), held.numpy()


def check(
    case: Ragged, order: str, dtype: torch.dtype, scaled: bool, on: Backend | None = None, near: float | None = None,
    zeros: bool = False,
) -> None:  # fmt: skip
    """On a backend's device, with queries of its dtype; in the interpreter, in fp32. `zeros`: some values are 0."""
    batch: Batch = make_batch(case)
    if zeros:
        batch.v[:, ::3] *= 0
    on = on or backend_of("torch", "triton")
    (k, k_scale, k_held), (v, v_scale, v_held) = (narrowed(x, dtype, scaled) for x in (batch.k, batch.v))
    step, spec, device = make_step(batch, on), batch.spec, on.device

    def turn(x: torch.Tensor) -> torch.Tensor:
        return (x if order == "n p k d" else x.transpose(1, 2).contiguous()).to(device)

    sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks).to(device)
    plan = triton_attention.plan(step, spec, case.block_size)
    scales = (turn(k_scale), turn(v_scale)) if scaled else None
    q = torch.from_numpy(batch.q).to(device, getattr(torch, on.dtype))
    out = triton_attention.attend(q, turn(k), turn(v), order, step, spec, sinks, plan, scales)
    want = expected(replace(batch, k=k_held, v=v_held))
    out, near = out.float().cpu(), near or tolerance("float32", "attention")
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=near, err_msg=case.name)
    assert not out[len(want) :].any()


@pytest.mark.parametrize("case", RAGGED, ids=lambda c: c.name)
def test_int8(case: Ragged) -> None:
    check(case, ("n p k d", "n k p d")[RAGGED.index(case) % 2], torch.int8, scaled=True)


@pytest.mark.parametrize("scaled", [True, False], ids=["scales", "plain"])
@pytest.mark.parametrize("case", RAGGED[::4], ids=lambda c: c.name)
def test_fp8(case: Ragged, scaled: bool) -> None:
    check(case, "n p k d", FP8, scaled)


def test_a_value_of_zeros_weighs_as_much_as_any() -> None:
    check(CASES[0], "n p k d", torch.int8, scaled=True, zeros=True)


@pytest.mark.parametrize(
    ("dims", "dtype", "reason"), [(33, torch.float32, "33 .* are not even"), (32, torch.float16, "runs no assembly")]
)
def test_what_it_does_not_read_it_refuses(dims: int, dtype: torch.dtype, reason: str) -> None:
    spec = replace(make_batch(CASES[0]).spec, k_dim=dims)
    assert re.search(reason, triton_attention.supports(spec, dtype, torch.device("cpu"), torch.int8) or "")


def test_scales_that_lie_otherwise_are_refused() -> None:
    batch = make_batch(CASES[0])
    codes, scale, _ = narrowed(batch.k, torch.int8, True)
    step, q = make_step(batch, backend_of("torch", "triton")), torch.from_numpy(batch.q)
    turned = scale.transpose(1, 2).contiguous().transpose(1, 2)
    plan = triton_attention.plan(step, batch.spec, 8)
    with pytest.raises(NotImplementedError, match="scales as its cache lies"):
        triton_attention.attend(q, codes, codes, "n p k d", step, batch.spec, None, plan, (turned, turned))
