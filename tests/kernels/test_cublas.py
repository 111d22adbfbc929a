"""Which products go to cublasLt with an algorithm of the table, and how it is told; a stand-in for the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels_triton import cublas
from octavo.kernels_triton.cublas_table import TABLE

CONFIG = cublas.Config(66, 20, 1, 0, 1, 35, 3)


class Library:
    """Multiplies as it was told to, in torch."""

    def __init__(self, rows: int, depth: int, width: int, x_r: int, first: bool, device: torch.device):
        self.told = (rows, depth, width, x_r, first)

    def found(self, config: cublas.Config) -> Any:
        return cublas.Found() if config == CONFIG else None

    def launch(self, found: Any, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        rows, depth, width, x_r, first = self.told
        assert x.shape == (rows, depth) and x.stride(0) == x_r
        plain = w.view(depth, width) if first else w.view(width, depth).t()
        out.view(rows, width).copy_(x @ plain + (out.view(rows, width) if add else 0))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    table = {
        (32, 48, True, False): {8: None, 16: CONFIG},
        (32, 48, False, False): {16: CONFIG},
        (32, 48, True, True): {16: CONFIG, 20: (1, *CONFIG[1:])},
    }
    monkeypatch.setattr(cublas, "Plan", Library)
    monkeypatch.setattr(cublas, "device_table", lambda device: table)
    cublas.plan_of.cache_clear()
    yield
    cublas.plan_of.cache_clear()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def test_what_the_table_names_is_multiplied() -> None:
    # rows of x lie apart, as those of a larger array would
    x, w, turned = random(12, 64)[:, :32], random(32, 2, 24), random(48, 32)
    out = cublas.product(x, w, 1, True, None)
    assert out is not None and torch.equal(out, (x @ w.view(32, 48)).view(12, 2, 24))
    out = cublas.product(x.unflatten(1, (4, 8)), turned.view(48, 4, 8), 2, False, None)
    assert out is not None and torch.equal(out, x @ turned.t())
    rest = random(12, 48)
    want = x @ w.view(32, 48) + rest
    assert cublas.product(x, w.view(32, 48), 1, True, rest) is rest and torch.equal(rest, want)


def test_everything_else_is_left_to_torch() -> None:
    w = random(32, 48)
    assert cublas.product(random(8, 32), w, 1, True, None) is None
    assert cublas.product(random(17, 32), w, 1, True, None) is None
    assert cublas.product(random(12, 32), random(32, 64), 1, True, None) is None
    assert cublas.product(random(12, 32).float(), w.float(), 1, True, None) is None
    assert cublas.product(random(12, 32), random(48, 32).t(), 1, True, None) is None
    # rows that do not begin at multiples of 16 bytes, as a whole and one by one
    assert cublas.product(random(12, 33)[:, 1:], w, 1, True, None) is None
    assert cublas.product(random(12, 40)[:, 4:36], w, 1, True, None) is None
    # sums that it would not find: of other numbers, or whose rows lie apart
    assert cublas.product(random(12, 32), w, 1, True, random(12, 48).float()) is None
    assert cublas.product(random(12, 32), w, 1, True, random(12, 64)[:, :48]) is None
    # an algorithm that the library does not take for this product
    assert cublas.product(random(18, 32), w, 1, True, random(18, 48)) is None


def test_a_device_has_the_rules_of_its_name_and_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cublas.device_table(torch.device("cpu")) == {}
    version, names = SimpleNamespace(cublasLtGetVersion=lambda: 7), iter(["it", "it", "another", "it"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    monkeypatch.setattr(cublas, "library", lambda: version)
    table_of, rules = cublas.device_table.__wrapped__, {(32, 48, True, False): {8: CONFIG}}
    for key, found in ((("it", 7), rules), (("it", 8), {}), (("it", 7), {})):
        monkeypatch.setattr(cublas, "TABLE", {key: rules})
        assert table_of(torch.device("cuda")) == found

    def missing() -> None:
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(cublas, "library", missing)
    assert table_of(torch.device("cuda")) == {}


def test_what_the_library_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "library", lambda: SimpleNamespace(cublasLtMatmul=lambda *_: 13))
    with pytest.raises(RuntimeError, match="cublasLtMatmul of 3 rows returned status 13"):
        cublas.call("Matmul", about=" of 3 rows")


def test_the_table_is_in_order_and_whole() -> None:
    for rules in TABLE.values():
        for sizes in rules.values():
            assert list(sizes) == sorted(sizes)
            assert all(config is None or cublas.Config(*config) for config in sizes.values())
