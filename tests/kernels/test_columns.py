"""Products of very few rows in Triton, in the interpreter: against float64, outputs poisoned; and who is for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.engine.backend_torch import TorchBackend
from octavo.kernels_triton import columns
from octavo.kernels_triton.columns import Cut
from octavo.kernels_triton.ops import TorchOps
from octavo.kernels_triton.products import Twofold

pytestmark = pytest.mark.usefixtures("guarded")

# rows, depth, width, what stands around the product, how it is cut
CASES = (
    (1, 64, 48, "", Cut(True, 8, 64, 1, 4)),
    (1, 96, 32, "norm gate", Cut(True, 4, 32, 3, 4)),
    (1, 128, 24, "add", Cut(True, 4, 16, 2, 4)),
    (2, 128, 24, "norm", Cut(True, 8, 16, 4, 4)),
    (3, 64, 48, "norm gate", Cut(True, 4, 32, 1, 4)),
    (4, 96, 20, "add", Cut(True, 4, 32, 3, 4)),
    (1, 128, 32, "norm", Cut(False, 16, 64, 2, 1)),
    (1, 96, 64, "norm gate", Cut(False, 32, 16, 2, 1)),
    (3, 128, 32, "add", Cut(False, 16, 128, 1, 1)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_with_its_neighbours_equals_float64(case: tuple[int, int, int, str, Cut]) -> None:
    num_rows, depth, width, around, cut = case
    rng = np.random.default_rng(num_rows * depth + width)

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    gate = "gate" in around
    # rows of x lie apart, as those of a larger array would
    x, w, scale = random(num_rows, depth + 16)[:, :depth], random(depth, width), random(depth)
    rest, want = random(num_rows, width // (1 + gate)), x.double()
    if "norm" in around:
        want = want * (want.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.double()
    want = want @ w.double()
    if gate:
        a, b = want.chunk(2, -1)
        want = a / (1 + (-a).exp()) * b
    want = want + rest.double() if "add" in around else want
    add, norm = (rest if "add" in around else None), ((scale, 1e-6) if "norm" in around else None)
    out = columns.product(x, w.t().contiguous() if cut.turned else w, cut, norm, gate, add)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))
    assert add is None or out.data_ptr() == add.data_ptr()


def test_a_cut_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide 10 columns and a depth of 64"):
        columns.product(torch.zeros(1, 64), torch.zeros(10, 64), Cut(True, 4, 32, 2, 4), None, False, None)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of one row that is for these kernels, on a CPU that passes for a GPU."""
    monkeypatch.setattr(columns, "CUTS", {"cpu": {1: {(48, 64, True): Cut(True, 8, 16, 3, 4)}}})
    columns.cut_of.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


@pytest.mark.usefixtures("ours")
def test_a_weight_lies_twice_only_for_a_product_of_these_kernels() -> None:
    ops, weight = TorchOps(), torch.randn(48, 2, 32).bfloat16()

    def prepared(w: torch.Tensor, product: str, ops: TorchOps = ops) -> Any:
        return ops.prepare(w, SimpleNamespace(product=product, axes=("embed", None, "mlp")))

    both = prepared(weight, "te,exf->txf")
    assert isinstance(both, Twofold) and torch.equal(both.turned, weight.reshape(48, 64).t())
    assert both.data_ptr() == weight.data_ptr()
    # what is made of it is no such weight
    assert type(both.reshape(48, 64)) is torch.Tensor and type(both + 1) is torch.Tensor
    others = ((weight.float(), "te,exf->txf"), (weight[:40], "te,exf->txf"), (weight.movedim(0, 2), "te,xfe->txf"))
    assert not any(isinstance(prepared(*other), Twofold) for other in others)
    assert not isinstance(prepared(weight, "te,exf->txf", TorchOps(pure=True)), Twofold)
    # the sum over shards of its depth is for torch's product; columns of its own are not
    for axis in ("embed", "mlp"):
        shared = TorchOps(rules={axis: "tp"}, mesh=object())
        assert isinstance(prepared(weight, "te,exf->txf", shared), Twofold) == (axis == "mlp")


@pytest.mark.usefixtures("ours")
def test_einsum_leaves_other_rows_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    # the interpreter rounds bfloat16 otherwise: only who is asked counts here
    def product(x: torch.Tensor, turned: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(x.shape)
        return torch.zeros(len(x), 32, dtype=x.dtype)

    monkeypatch.setattr(columns, "product", product)
    ops, norm = TorchOps(), (torch.ones(48).bfloat16(), 1e-6)
    w = ops.prepare(torch.randn(48, 2, 32).bfloat16(), SimpleNamespace(product="te,exf->txf", axes=(None,) * 3))
    out = ops.einsum("te,exf->txf", torch.ones(1, 48).bfloat16(), w, (None,), norm=norm, gate=True)
    assert out.shape == (1, 32) and seen == [(1, 48)]
    monkeypatch.setattr(ops, "rms_norm", lambda x, *_: x)
    monkeypatch.setattr(ops, "gated_mlp_act", lambda x: x[:, 0])
    ops.einsum("te,exf->txf", torch.ones(2, 48).bfloat16(), w, (None,), norm=norm, gate=True)
    ops.einsum("te,exf->txf", torch.ones(1, 48).bfloat16(), w, (None,))
    assert len(seen) == 1


@pytest.mark.usefixtures("ours")
def test_a_sum_whose_rows_lie_apart_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write into it take its rows to lie behind one another."""
    monkeypatch.setattr(columns, "CUTS", {"cpu": {2: {(48, 64, False): Cut(True, 8, 16, 3, 4)}}})
    x, w, whole = torch.ones(2, 48).bfloat16(), torch.ones(48, 64).bfloat16(), torch.zeros(2, 80).bfloat16()
    y = TorchOps().einsum("te,ef->tf", x, Twofold.of(w, 48), (None,), add=whole[:, :64])
    assert (y == 48).all() and (whole[:, :64] == 48).all() and not whole[:, 64:].any()


def test_a_weight_that_slept_lies_twice_again() -> None:
    backend, weight = TorchBackend(dtype="bfloat16"), torch.randn(4, 6).bfloat16()
    tree = {"a": Twofold.of(weight.clone(), 4), "b": weight.clone()}
    both = tree["a"]
    # nor does anything keep the memory that it gives back
    assert both._base is None
    stored = backend.offload(tree)
    assert not both.numel() and not hasattr(both, "turned")
    back = backend.restore(stored)
    assert isinstance(back["a"], Twofold) and torch.equal(back["a"].turned, weight.t())
    assert torch.equal(back["a"] + 0, weight) and type(back["b"]) is torch.Tensor


def test_copies_are_counted_as_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 8B shape all but gate_up: 6.4 GB, as an H200 was seen to hold (benchmarks/H200.md)."""
    from octavo.engine.bench.workloads import CONFIGS
    from octavo.models.interface import leaves
    from octavo.models.registry import spec_from_hf

    monkeypatch.setattr(columns, "device_name", lambda device: "NVIDIA H200")
    columns.cut_of.cache_clear()
    ops, cuda = TorchOps(), torch.device("cuda")
    specs = [s for s in leaves(spec_from_hf(CONFIGS["llama-8b"]).weights) if s.product]

    def count(dtype: torch.dtype, device: torch.device) -> int:
        return sum(ops.bytes_beside(s, s.shape, dtype, device) for s in specs)

    assert count(torch.bfloat16, cuda) == 32 * 2 * 4096 * (6144 + 4096 + 14336)
    assert count(torch.float16, cuda) == count(torch.bfloat16, torch.device("cpu")) == 0
    odd = SimpleNamespace(product="te,ef->tf", axes=(None, None))
    assert ops.bytes_beside(odd, (2048, 28672), torch.bfloat16, cuda) == 0
    # shards of that shape: of columns, and of a depth over which partial sums are added up
    shared = TorchOps(rules={"mlp": "tp"}, mesh=object())
    for product, axes, turned in (("te,ef->tf", (None, "mlp"), True), ("tf,fe->te", ("mlp", None), False)):
        spec = SimpleNamespace(product=product, axes=axes)
        assert bool(shared.bytes_beside(spec, (4096, 4096), torch.bfloat16, cuda)) == turned
    columns.cut_of.cache_clear()
