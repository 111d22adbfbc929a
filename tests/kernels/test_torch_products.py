"""Weights packed for oneDNN: the same products, the same numbers, and the weight can be had back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels_triton import products
from octavo.kernels_triton.ops import TorchOps
from octavo.models.interface import ArraySpec

PRODUCTS = {
    "te,ekxd->tkxd": ((7, 13), (13, 3, 5, 4)),
    "tkgd,kgde->te": ((7, 3, 2, 5), (3, 2, 5, 11)),
    "te,exf->txf": ((7, 13), (13, 2, 9)),
    "tf,fe->te": ((7, 17), (17, 6)),
    "re,ve->rv": ((7, 13), (101, 13)),
}


def _make(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


def _spec(w: torch.Tensor, product: str | None) -> ArraySpec:
    return ArraySpec(tuple(w.shape), (None,) * w.ndim, product=product)


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 130])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_equal_float64(product, rows):
    ops, (x_shape, w_shape) = TorchOps(), PRODUCTS[product]
    x, w = _make((rows, *x_shape[1:]), 1), _make(w_shape, 2)
    want = np.einsum(product, x.numpy().astype(np.float64), w.numpy().astype(np.float64))
    packed = ops.prepare(w, _spec(w, product))
    assert isinstance(packed, products.Packed)
    for weight in (w, packed):
        got = ops.einsum(product, x, weight, ())
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_view_of_a_wider_array_is_multiplied_as_it_is(product):
    ops, (x_shape, w_shape) = TorchOps(), PRODUCTS[product]
    wide, w = _make((x_shape[0], 3, *x_shape[1:]), 3), _make(w_shape, 4)
    x = wide[:, 1]
    want = np.einsum(product, x.numpy().astype(np.float64), w.numpy().astype(np.float64))
    got = ops.einsum(product, x, ops.prepare(w, _spec(w, product)), ())
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_packed_weight_gives_itself_back(product):
    w = _make(PRODUCTS[product][1], 5)
    packed = products.Packed(w, product)
    assert torch.equal(packed.dense(), w)
    assert packed.nbytes == w.nbytes


def test_a_tied_table_is_looked_up_in_too():
    ops, table = TorchOps(), _make((101, 13), 6)
    packed, ids = ops.prepare(table, _spec(table, "re,ve->rv")), torch.tensor([0, 100, 3, 3], dtype=torch.int32)
    assert torch.equal(ops.embed(packed, ids), table[ids])
    assert torch.equal(ops.embed(table, ids), table[ids])
    assert packed.nbytes == 2 * table.nbytes


def test_a_weight_without_a_product_is_left_alone():
    w = _make((5, 6), 7)
    assert TorchOps().prepare(w, _spec(w, None)) is w


def test_a_dtype_that_onednn_lacks_is_left_alone():
    w = _make((13, 6), 7, torch.float16)
    assert TorchOps().prepare(w, _spec(w, "tf,fe->te")) is w


@pytest.mark.parametrize("product", PRODUCTS)
def test_bfloat16_rounds_only_the_result(product):
    """Products of bfloat16 values are summed in float32: one rounding of the sum is all that is lost."""
    ops, (x_shape, w_shape) = TorchOps(), PRODUCTS[product]
    x, w = _make(x_shape, 8, torch.bfloat16), _make(w_shape, 9, torch.bfloat16)
    want = np.einsum(product, x.double().numpy(), w.double().numpy())
    got = ops.einsum(product, x, ops.prepare(w, _spec(w, product)), ())
    assert got.dtype == torch.bfloat16
    np.testing.assert_allclose(got.double().numpy(), want, rtol=2**-8, atol=1e-4)


def test_a_weight_packed_for_another_product_is_refused():
    ops, w = TorchOps(), _make((13, 13), 10)
    packed = ops.prepare(w, _spec(w, "tf,fe->te"))
    with pytest.raises(ValueError, match="prepared for 'tf,fe->te'"):
        ops.einsum("re,ve->rv", _make((2, 13), 11), packed, ())


@pytest.mark.parametrize("spec", ["ab,cd->abcd", "ab,ac->bc", "ab,bc->ca", "abc,bdc->ad"])
def test_products_that_are_not_one_matrix_product_are_refused(spec):
    with pytest.raises(NotImplementedError, match="einsum"):
        products.contraction(spec)
