"""Every op of both tables against float64 numpy, from fresh random data."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from tolerances import tolerance

from octavo.engine.backend import Backend, get_backend
from octavo.engine.lab.numpy_ops import NumpyOps
from octavo.models.interface import ArraySpec, Rope

each_backend = pytest.mark.parametrize("name", BACKENDS)
AXES = {"tkxd": (None, "kv_heads", None, None), "te": (None, None), "txf": (None, None, "mlp"), "rv": (None, "vocab")}
PRODUCTS = {  # spec: shapes of x and w
    "te,ekxd->tkxd": ((5, 24), (24, 2, 5, 8)),
    "tkgd,kgde->te": ((5, 2, 3, 8), (2, 3, 8, 24)),
    "te,exf->txf": ((7, 24), (24, 2, 33)),
    "tf,fe->te": ((1, 33), (33, 24)),
    "re,ve->rv": ((3, 24), (51, 24)),
}


@cache
def backend_of(name: str) -> Backend:
    return get_backend(name)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def put(name: str, x: Any) -> Any:
    """x on the device, in its own dtype (float64 as float32)."""
    x = np.asarray(x)
    dtype = {"float64": "float32", "int64": "int32"}.get(x.dtype.name, x.dtype.name)
    return backend_of(name).place(x, ArraySpec(x.shape, (None,) * x.ndim, dtype))


def get(name: str, x: Any) -> np.ndarray:
    return backend_of(name).read(x)


def assert_near(actual: np.ndarray, wanted: np.ndarray, times: float = 1.0) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=times * tolerance("float32", "op"))


@each_backend
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "plain"])
@pytest.mark.parametrize("spec", PRODUCTS)
def test_einsum(name, spec, prepared):
    x, w = (rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(PRODUCTS[spec]))
    ops, weight = backend_of(name).ops, put(name, w)
    if prepared:
        weight = ops.prepare(weight, ArraySpec(w.shape, (None,) * w.ndim, product=spec))
    y = get(name, ops.einsum(spec, put(name, x), weight, out=AXES[spec.split("->")[1]]))
    assert y.dtype == np.float32
    assert_near(y, np.einsum(spec, x.astype(np.float64), w.astype(np.float64)), times=5)


@each_backend
@pytest.mark.parametrize("rows", [1, 6])
def test_a_product_takes_its_neighbours_along(name, rows):
    """Norm before it, gate and sum behind it, against the oracle's own ops one by one."""
    oracle, ops = NumpyOps(), backend_of(name).ops
    x, add = rng().standard_normal((2, rows, 24)).astype(np.float32)
    scale = rng(1).uniform(0.5, 1.5, 24).astype(np.float32)
    wide, back = (rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate([(24, 2, 33), (33, 24)], 2))
    x64, scale64, wide64, back64 = (a.astype(np.float64) for a in (x, scale, wide, back))
    gated = oracle.gated_mlp_act(np.einsum("te,exf->txf", oracle.rms_norm(x64, scale64, 1e-5), wide64))
    norm = (put(name, scale), 1e-5)
    y = ops.einsum("te,exf->txf", put(name, x), put(name, wide), out=AXES["txf"], norm=norm, gate=True)
    np.testing.assert_allclose(get(name, y), gated, rtol=1e-5, atol=1e-4)
    y = ops.einsum("tf,fe->te", put(name, gated), put(name, back), out=AXES["te"], reduce="mlp", add=put(name, add))
    np.testing.assert_allclose(get(name, y), add + gated @ back64, rtol=1e-5, atol=2e-3)
    y = oracle.einsum("te,exf->txf", x64, wide64, out=AXES["txf"], norm=(scale64, 1e-5), gate=True)
    np.testing.assert_allclose(y, gated, rtol=1e-12)
    np.testing.assert_allclose(oracle.einsum("tf,fe->te", y, back64, out=(), add=add), add + y @ back64, rtol=1e-12)


@each_backend
def test_a_tied_table_embeds_and_unembeds(name):
    table = rng().standard_normal((51, 24)).astype(np.float32)
    ops = backend_of(name).ops
    prepared = ops.prepare(put(name, table), ArraySpec(table.shape, ("vocab", None), product="re,ve->rv"))
    ids = np.array([0, 50, 7, 7], np.int32)
    assert (get(name, ops.embed(prepared, put(name, ids))) == table[ids]).all()
    y = get(name, ops.einsum("re,ve->rv", put(name, table[:3]), prepared, out=(None, "vocab")))
    assert_near(y, table[:3].astype(np.float64) @ table.T.astype(np.float64), times=5)


@each_backend
@pytest.mark.parametrize("shape", [(1, 32), (7, 33), (3, 2, 5, 8)], ids=str)
def test_norms(name, shape):
    x, y = rng().standard_normal((2, *shape)).astype(np.float32)
    scale, ops = rng(1).uniform(0.5, 1.5, shape[-1]).astype(np.float32), backend_of(name).ops

    def norm(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    assert_near(get(name, ops.rms_norm(put(name, x), put(name, scale), 1e-5)), norm(x))
    total, normed = ops.add_rms_norm(put(name, x), put(name, y), put(name, scale), 1e-5)
    assert_near(get(name, total), x + y)
    assert_near(get(name, normed), norm(x + y))


@each_backend
def test_rms_norm_of_tiny_values_keeps_its_epsilon(name):
    x, scale = np.full((1, 16), 1e-4, np.float32), np.ones(16, np.float32)
    wanted = x / np.sqrt(1e-8 + 1e-5)
    assert_near(get(name, backend_of(name).ops.rms_norm(put(name, x), put(name, scale), 1e-5)), wanted)


@each_backend
def test_gated_mlp_act(name):
    x = (rng().standard_normal((5, 2, 33)) * 4).astype(np.float32)
    gate, up = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    assert_near(get(name, backend_of(name).ops.gated_mlp_act(put(name, x))), gate / (1 + np.exp(-gate)) * up, times=5)


@each_backend
@pytest.mark.parametrize("shape", [(6, 3, 8), (6, 2, 3, 16)], ids=str)
def test_rope_turns_first_half_against_second(name, shape):
    x, ops = rng().standard_normal(shape).astype(np.float32), backend_of(name).ops
    positions, frequencies = np.array([0, 1, 2, 100, 1000, 1500], np.int32), np.geomspace(1, 1e-4, shape[-1] // 2)
    frequencies = frequencies.astype(np.float32)
    table = ops.rope_table(put(name, positions), put(name, frequencies))
    # angles are float32 by definition, as models are trained
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    assert_near(get(name, table[0]), np.cos(angle))
    assert_near(get(name, table[1]), np.sin(angle))
    angle = angle.reshape(6, *(1,) * (len(shape) - 2), -1)
    a, b = np.split(x.astype(np.float64), 2, -1)
    wanted = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
    assert_near(get(name, ops.rope(put(name, x), Rope(put(name, frequencies), *table))), wanted)


@each_backend
def test_scatter_with_indices_and_slices(name):
    ops, x = backend_of(name).ops, rng().standard_normal((4, 3, 5)).astype(np.float32)
    rows, columns = np.array([2, 0], np.int32), np.array([1, 1], np.int32)
    new = rng(1).standard_normal((2, 5)).astype(np.float32)
    wanted = x.copy()
    wanted[rows, columns] = new
    out = ops.scatter(put(name, x), (put(name, rows), put(name, columns)), put(name, new))
    assert (get(name, out) == wanted).all()
    new = rng(2).standard_normal((2, 4, 5)).astype(np.float32)
    wanted = x.copy()
    wanted[:, columns + [0, 1]] = new.swapaxes(0, 1)
    out = ops.scatter(put(name, x), (slice(None), put(name, columns + [0, 1])), put(name, new.swapaxes(0, 1).copy()))
    assert (get(name, out) == wanted).all()


@each_backend
@pytest.mark.parametrize("kind", [np.int32, np.float32])
@pytest.mark.parametrize("width, used", [(7, None), (300, 150), (2500, None), (2500, 0), (2500, 1025), (2500, 2500)])
def test_tally_sums_values_by_id(name, kind, width, used):
    ids = rng(width).integers(-3, 60, (5, width)).astype(np.int32)
    values = rng(1).integers(-9, 9, (5, width)).astype(kind)
    ids[:, 4:6] = -(2**31), 2**31 - 1
    if used is not None:
        ids[:, used:] = -1
    want = np.zeros((5, 55))
    for r, m in np.ndindex(ids.shape):
        if 0 <= ids[r, m] < 55:
            want[r, ids[r, m]] += values[r, m]
    # what counts nowhere may be anything
    if kind is np.float32:
        values[(ids < 0) | (ids >= 55)] = np.nan
    bound = None if used is None else put(name, np.array(used, np.int32))
    got = get(name, backend_of(name).ops.tally(put(name, ids), put(name, values), 55, bound))
    assert got.dtype == kind and (got == want).all()


@each_backend
def test_arange_takes_dtype_from_like(name):
    out = get(name, backend_of(name).ops.arange(5, like=put(name, np.zeros(2, np.int32))))
    assert out.dtype == np.int32
    assert out.tolist() == [0, 1, 2, 3, 4]


@each_backend
def test_argmax_takes_the_first_of_equals(name):
    x = np.array([[1, 3, 3, 2], [-np.inf, -np.inf, -5, -5], [7, 7, 7, 7]], np.float32)
    out = get(name, backend_of(name).ops.argmax(put(name, x)))
    assert out.dtype == np.int32
    assert out.tolist() == [1, 2, 0]


@each_backend
def test_argmax_of_a_vocabulary(name):
    x = rng().standard_normal((9, 49153)).astype(np.float32)
    assert (get(name, backend_of(name).ops.argmax(put(name, x))) == x.argmax(-1)).all()


@each_backend
def test_logsumexp_of_large_values(name):
    x = (rng().standard_normal((3, 1000)) * 30 + 200).astype(np.float32)
    top = x.max(-1, keepdims=True).astype(np.float64)
    wanted = (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[:, 0]
    np.testing.assert_allclose(get(name, backend_of(name).ops.logsumexp(put(name, x))), wanted, rtol=1e-6)


@each_backend
@pytest.mark.parametrize("k", [1, 7, 50])
def test_top_k(name, k):
    x = rng().permutation(150).reshape(3, 50).astype(np.float32)
    values, ids = (get(name, y) for y in backend_of(name).ops.top_k(put(name, x), k))
    wanted = np.argsort(-x, -1)[:, :k]
    assert ids.dtype == np.int32
    assert (ids == wanted).all()
    assert (values == np.take_along_axis(x, wanted, -1)).all()


@each_backend
def test_ordered_bits_keep_the_order(name):
    x = np.array([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 1.0, 1.0000001, 3e38, np.inf], np.float32)
    bits = get(name, backend_of(name).ops.ordered_bits(put(name, x)))
    assert bits.dtype == np.int32
    assert (np.diff(bits.astype(np.int64)) > 0).all()


@each_backend
def test_bisect_finds_the_last_that_holds(name):
    limits = np.array([[-(2**31)], [-1], [0], [12345], [2**31 - 1]], np.int32)
    limit_R1 = put(name, limits)
    assert (get(name, backend_of(name).ops.bisect(lambda tried: limit_R1 >= tried)) == limits).all()


def _murmur(h: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


@each_backend
def test_gumbel_noise_is_a_hash_of_key_index_and_token(name):
    keys, index = rng().integers(-(2**31), 2**31, (4, 2)).astype(np.int32), np.array([0, 1, 2, 1000], np.int32)
    k0 = _murmur(keys.view(np.uint32)[:, 0] ^ index.astype(np.uint32) * np.uint32(0x9E3779B9))
    k1 = _murmur(keys.view(np.uint32)[:, 1] ^ k0)
    token = np.arange(1000, dtype=np.uint32) * np.uint32(0x9E3779B9)
    u = (_murmur(_murmur(token[None] ^ k0[:, None]) ^ k1[:, None]).astype(np.float64) + 0.5) / 2**32
    noise = get(name, backend_of(name).ops.gumbel(put(name, keys), put(name, index), 1000))
    # where u is near 1 the noise is near its least, and float32 cannot tell such u apart
    usual = u < 0.99
    np.testing.assert_allclose(noise[usual], -np.log(-np.log1p(-u[usual])), rtol=2e-5, atol=2e-5)
    assert np.isfinite(noise).all()


@each_backend
def test_digest_hashes_the_bits_of_each_row(name):
    x = rng().standard_normal((3, 1001)).astype(np.float32)
    place = np.arange(1001, dtype=np.uint32) * np.uint32(0x9E3779B9)
    wanted = _murmur(x.view(np.uint32) ^ place).sum(-1, dtype=np.uint32).view(np.int32)
    out = get(name, backend_of(name).ops.digest(put(name, x)))
    assert out.dtype == np.int32
    assert (out == wanted).all()


@each_backend
def test_loop_runs_while_the_condition_holds(name):
    start = (put(name, np.array(0, np.int32)), put(name, np.array([1.0], np.float32)))
    count, value = backend_of(name).ops.loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 2), start)
    assert int(get(name, count)) == 5
    assert get(name, value).tolist() == [32.0]


@each_backend
def test_dot_multiplies_in_float32(name):
    a, b = (rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(((4, 2, 3, 8), (4, 5, 2, 8))))
    ops, spec = backend_of(name).ops, "wkgd,wmkd->wkgm"
    assert_near(get(name, ops.dot(spec, put(name, a), put(name, b))), np.einsum(spec, *map(np.float64, (a, b))), 2)
    narrow = ops.dot("rd,rd->r", put(name, np.ones((1, 3), np.int8)), put(name, np.full((1, 3), 100, np.int8)))
    assert get(name, narrow).tolist() == [300.0]


@each_backend
@pytest.mark.parametrize("at_once", [1, 3, 7, 20])
def test_map_tiles_gives_what_the_function_gives(name, at_once):
    x, y = rng(0).standard_normal((7, 2)).astype(np.float32), np.arange(7, dtype=np.int32)
    seen = []

    def double(x: Any, y: Any) -> tuple:
        seen.append(x.shape[0])
        return x * 2, (x[:, 0] + y)[:, None, None]

    found = backend_of(name).ops.map_tiles(double, (put(name, x), put(name, y)), at_once)
    assert (get(name, found[0]) == x * 2).all()
    assert_near(get(name, found[1]), (x[:, 0] + y)[:, None, None])
    assert max(seen) == min(at_once, 7)


@each_backend
def test_constrain_leaves_values_alone(name):
    x = rng().standard_normal((3, 8)).astype(np.float32)
    assert (get(name, backend_of(name).ops.constrain(put(name, x), (None, "vocab"), (None, None))) == x).all()
