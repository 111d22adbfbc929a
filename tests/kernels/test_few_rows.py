"""Products of few rows in Triton, in the interpreter: against float64, over odd shapes, outputs poisoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels_triton import few_rows
from octavo.kernels_triton.arrivals import counters
from octavo.kernels_triton.few_rows import Tiling
from octavo.kernels_triton.few_rows_table import TABLE

pytestmark = pytest.mark.usefixtures("guarded")

# rows, depth, width, what stands around the product, tiles
CASES = (
    (1, 64, 48, "", Tiling(16, 16, 16, 1, 4, 2, 0)),
    (1, 80, 96, "gate", Tiling(16, 32, 32, 4, 4, 2, 0)),
    (1, 80, 50, "add", Tiling(16, 32, 16, 2, 4, 2, 0)),
    (5, 80, 96, "gate", Tiling(16, 32, 32, 2, 4, 2, 0)),
    (16, 96, 50, "add", Tiling(16, 32, 32, 1, 4, 2, 0)),
    (3, 100, 60, "add", Tiling(16, 16, 16, 4, 4, 2, 0)),
    (2, 48, 32, "", Tiling(16, 32, 16, 8, 4, 2, 0)),
    (33, 64, 64, "gate", Tiling(64, 16, 16, 2, 4, 2, 0)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_with_its_neighbours_equals_float64(case: tuple[int, int, int, str, Tiling]) -> None:
    num_rows, depth, width, around, tile = case
    rng = np.random.default_rng(num_rows * depth + width)

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    gate = "gate" in around
    # rows of x lie apart, as those of a larger array would
    x, w = random(num_rows, depth + 16)[:, :depth], random(depth, width)
    rest, want = random(num_rows, width // (1 + gate)), x.double() @ w.double()
    if gate:
        a, b = want.chunk(2, -1)
        want = a / (1 + (-a).exp()) * b
    want = want + rest.double() if "add" in around else want
    for _ in range(2):
        add = rest.clone() if "add" in around else None
        out = few_rows.product(x, w, tile, gate, add)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))
        assert add is None or out.data_ptr() == add.data_ptr()
    assert not counters(x.device).any()


def test_einsum_knows_which_products_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def einsum(spec: str, x: torch.Tensor, w: torch.Tensor, **more: Any) -> torch.Tensor | None:
        return few_rows.einsum(spec, x, w, more.get("gate", False), more.get("add"))

    monkeypatch.setitem(TABLE, "cpu", {4: {(48, 64, True): (16, 16, 16, 2, 4, 2, 0)}})
    few_rows.tiling_of.cache_clear()
    # the interpreter multiplies bfloat16 wrongly: only whether it serves is asked here
    monkeypatch.setattr(few_rows, "product", lambda x, w, *_: torch.zeros(len(x), w.shape[1] // 2))
    x, w = torch.zeros(4, 48, dtype=torch.bfloat16), torch.zeros(48, 2, 32, dtype=torch.bfloat16)
    found = einsum("te,exf->txf", x, w, gate=True)
    assert found is not None and found.shape == (4, 32)
    assert einsum("te,exf->txf", x, w) is None
    assert einsum("te,exf->txf", torch.zeros(5, 48, dtype=torch.bfloat16), w, gate=True) is None
    assert einsum("te,exf->txf", x.float(), w.float(), gate=True) is None
    assert einsum("te,xfe->txf", x, w.movedim(0, -1).contiguous(), gate=True) is None
    few_rows.tiling_of.cache_clear()
