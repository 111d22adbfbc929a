"""What only the torch room promises: writes in place or into a copy, and bits that follow from their definition."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.kernels_triton import noise
from octavo.kernels_triton import ops as torch_ops
from octavo.kernels_triton.ops import BLOCK, TorchOps
from octavo.models.interface import Rope

ATS = {
    "rows": lambda i, j: (i,),
    "places": lambda i, j: (i, j),
    "grid": lambda i, j: (i[:, None], j[None, :2]),
    "behind a slice": lambda i, j: (i, slice(None), j),
}


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("at", ATS)
def test_scatter_writes_in_place_or_into_a_copy(at, dtype):
    i, j = np.array([6, 0, 3], np.int32), np.array([4, 1, 1], np.int32)
    before = _rng(0).integers(0, 100, (8, 5, 5, 3)).astype(np.int32)
    want = before.copy()
    values = _rng(1).integers(0, 100, want[ATS[at](i, j)].shape).astype(np.int32)
    want[ATS[at](i, j)] = values
    places = ATS[at](torch.from_numpy(i), torch.from_numpy(j))
    for pure in (False, True):
        dest = torch.from_numpy(before.copy()).to(dtype)
        got = TorchOps(pure=pure).scatter(dest, places, torch.from_numpy(values))
        assert np.array_equal(got.to(torch.int32).numpy(), want)
        assert (got.data_ptr() == dest.data_ptr()) != pure
        assert np.array_equal(dest.to(torch.int32).numpy(), before if pure else want)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("rows", [1, 9])
def test_argmax_is_the_first_of_equals(rows, size):
    x = _rng(size).integers(0, 4, (rows, size)).astype(np.float32)
    got = TorchOps().argmax(torch.from_numpy(x))
    assert got.dtype == torch.int32
    assert np.array_equal(got.numpy(), x.argmax(-1))


def test_argmax_of_minus_infinity_and_nan():
    x = np.full((3, 2 * BLOCK), -np.inf, np.float32)
    x[1, BLOCK + 5], x[2, 7], x[2, BLOCK] = -1e30, np.nan, 5
    assert TorchOps().argmax(torch.from_numpy(x)).tolist() == [0, BLOCK + 5, 7]


def test_bisect_finds_the_greatest_that_holds():
    limits = np.array([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 123456789, 2**31 - 1], np.int64)[:, None]
    tried = []

    def holds(t_R1: torch.Tensor) -> torch.Tensor:
        tried.append(t_R1)
        return t_R1.expand(len(limits), 1).long() <= torch.from_numpy(limits)

    got = TorchOps().bisect(holds)
    assert got.dtype == torch.int32
    assert np.array_equal(got.numpy(), limits)
    assert len(tried) <= 33


def test_ordered_bits_order_as_floats_do():
    x = np.sort(
        np.concatenate([_rng(0).standard_normal(200) * 10.0 ** _rng(1).integers(-30, 30, 200), [0, 1e38, -1e38]])
    )
    x = np.concatenate([[-np.inf], x, [np.inf]]).astype(np.float32)
    bits = TorchOps().ordered_bits(torch.from_numpy(x)).numpy().astype(np.int64)
    assert (np.diff(bits) >= 0).all()
    assert np.array_equal(np.diff(bits) == 0, np.diff(x) == 0)


def _murmur(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def test_murmur_is_that_of_unsigned_integers():
    h = _rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    assert np.array_equal(noise.murmur(torch.from_numpy(h.view(np.int32))).numpy().view(np.uint32), _murmur(h))


def test_gumbel_follows_its_definition_and_distribution():
    keys, index = _rng(0).integers(-(2**31), 2**31, (4, 2)).astype(np.int32), np.array([0, 1, 500, 0], np.int32)
    got = TorchOps().gumbel(torch.from_numpy(keys), torch.from_numpy(index), 20_000).numpy()
    k, golden = keys.view(np.uint32), np.uint32(0x9E3779B9)
    k0 = _murmur(k[:, 0] ^ (index.astype(np.uint32) * golden))
    k1 = _murmur(k[:, 1] ^ k0)
    h = _murmur(_murmur((np.arange(20_000, dtype=np.uint32) * golden)[None] ^ k0[:, None]) ^ k1[:, None])
    u = (h.astype(np.float32).astype(np.float64) + 0.5) * 2.0**-32
    np.testing.assert_allclose(got, -np.log(-np.log1p(-u)), rtol=2e-5, atol=2e-6)
    assert np.isfinite(got).all()
    assert np.abs(got.mean(1) - 0.5772).max() < 0.04
    assert np.abs(got.var(1) - np.pi**2 / 6).max() < 0.08
    assert np.abs(np.corrcoef(got) - np.eye(4)).max() < 0.04


def test_gumbel_of_a_row_does_not_depend_on_its_batch():
    keys, index = _rng(2).integers(-(2**31), 2**31, (5, 2)).astype(np.int32), np.arange(5, dtype=np.int32)
    ops = TorchOps()
    whole = ops.gumbel(torch.from_numpy(keys), torch.from_numpy(index), 300)
    one = ops.gumbel(torch.from_numpy(keys[3:4]), torch.from_numpy(index[3:4]), 300)
    assert torch.equal(whole[3:4], one)


def test_digest_is_the_sum_of_hashed_bits():
    x = _rng(0).standard_normal((3, 1000)).astype(np.float32)
    places = np.arange(1000, dtype=np.uint32) * np.uint32(0x9E3779B9)
    want = _murmur(x.view(np.uint32) ^ places).sum(1, dtype=np.uint32).view(np.int32)
    got = TorchOps().digest(torch.from_numpy(x))
    assert got.dtype == torch.int32
    assert np.array_equal(got.numpy(), want)
    x[1, 500] = np.nextafter(x[1, 500], np.float32(9))
    assert (TorchOps().digest(torch.from_numpy(x)) != got).tolist() == [False, True, False]


@pytest.mark.parametrize("stepwise", [True, False], ids=["in a step", "outside"])
def test_rope_equals_float64(stepwise):
    ops, rng = TorchOps(), _rng(0)
    inv_freq = (1000.0 ** -(np.arange(8) / 8)).astype(np.float32)
    positions = rng.integers(0, 3000, 7).astype(np.int32)
    tables = ops.rope_table(torch.from_numpy(positions), torch.from_numpy(inv_freq))
    rope = Rope(torch.from_numpy(inv_freq), *tables)
    ops = ops.for_step([SimpleNamespace(block_tables_SB=None)]) if stepwise else ops
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    for shape in ((7, 16), (7, 3, 16), (7, 3, 2, 16)):
        x = rng.standard_normal(shape).astype(np.float32)
        cos, sin = (f(angle).reshape(7, *(1,) * (len(shape) - 2), 8) for f in (np.cos, np.sin))
        a, b = x[..., :8].astype(np.float64), x[..., 8:].astype(np.float64)
        got = ops.rope(torch.from_numpy(x), rope)
        np.testing.assert_allclose(got.numpy(), np.concatenate([a * cos - b * sin, b * cos + a * sin], -1), atol=2e-6)
    other = Rope(rope.inv_freq_D, *ops.rope_table(torch.from_numpy(positions + 1), torch.from_numpy(inv_freq)))
    assert not torch.equal(ops.rope(torch.from_numpy(x), other), got)


def test_ops_do_not_change_what_they_are_given():
    ops, rng = TorchOps(), _rng(3)
    x, y = (torch.from_numpy(rng.standard_normal((4, 2, 6)).astype(np.float32)) for _ in range(2))
    scale, kept = torch.rand(6), (x.clone(), y.clone())
    ops.rms_norm(x, scale, 1e-5)
    ops.add_rms_norm(x, y, scale, 1e-5)
    ops.gated_mlp_act(x)
    ops.rope(x, Rope(scale[:3], torch.rand(4, 3), torch.rand(4, 3)))
    ops.argmax(x[:, 0])
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_dtypes_are_computed_in_float32(dtype):
    """What comes out is the float32 result of the rounded inputs, rounded once."""
    ops, rng = TorchOps(), _rng(4)
    x = torch.from_numpy(rng.standard_normal((4, 2, 64)).astype(np.float32)).to(dtype)
    scale = torch.from_numpy(rng.standard_normal(64).astype(np.float32)).to(dtype)
    for op in (lambda x, s: ops.rms_norm(x, s, 1e-5), lambda x, s: ops.gated_mlp_act(x)):
        assert op(x, scale).dtype == dtype
        assert torch.equal(op(x, scale), op(x.float(), scale.float()).to(dtype))


class Twice:
    """A mesh of two replicas that have the same tokens, as one of them sees it."""

    def size(self, names):
        return 2

    def index(self, names):
        return 1

    def all_gather(self, x, names, dim):
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x, names):
        return x[len(x) // 2 :]


def test_what_replicas_gather_lies_as_kernels_read_it(monkeypatch):
    """They count on the weights of one token lying behind those of another."""
    seen = []

    def experts(x, weights, ids, up, down, add, dtype):
        seen.append((weights.tolist(), ids.tolist(), weights.is_contiguous() and ids.is_contiguous()))
        return torch.zeros(x.shape)

    monkeypatch.setattr(torch_ops, "experts", experts)
    ops = torch_ops.TorchOps(rules={"experts": ("dp",), "replicas": "dp"}, mesh=Twice())
    weights, ids = torch.tensor([[0.25, 0.75], [1.5, 0.0]]), torch.tensor([[0, 5], [4, 6]], dtype=torch.int32)
    ops.moe(torch.zeros(2, 8), weights, ids, torch.zeros(3, 8, 2, 4), torch.zeros(3, 4, 8))
    assert seen == [(weights.tolist() * 2, [[3, 2], [1, 3]] * 2, True)]
