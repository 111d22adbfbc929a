"""The kernels compiled for this CPU: each equals float64 or torch's own ops, whatever the shapes and strides."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_batches import Batch, backend_of, expected, make_batch, make_step
from shapes import CASES, Ragged

from octavo.engine.loading.cache_dir import is_ours
from octavo.kernels_triton import cpu_attention, native
from octavo.kernels_triton.blocked import Blocked
from octavo.kernels_triton.native import MOST_QUERIES, Native
from octavo.kernels_triton.ops import TorchOps
from octavo.kernels_triton.products import plain_matrix
from octavo.models.interface import ArraySpec

DTYPES = [torch.float32, torch.bfloat16]
PRODUCTS = {
    "te,ekxd->tkxd": ((14,), (14, 3, 5, 4)),
    "tkgd,kgde->te": ((3, 2, 5), (3, 2, 5, 11)),
    "te,exf->txf": ((13,), (13, 2, 9)),
    "tf,fe->te": ((18,), (18, 70)),
    "re,ve->rv": ((14,), (101, 14)),
}
BLOCK = 8
LONG = Ragged("long", (0, 29, 3, 16, 7), (MOST_QUERIES + 1, MOST_QUERIES, 1, 5, 200))
SIZES = [
    (3, 64),
    (1, 64),
    (5, 64),
    (4, 64),
    (2, 64),
    (3, 128),
    (3, 48),
    (1, 256),
]  # queries of a kv head, and their dim
SERVED = [
    *(case for case in CASES if case.k_dim == case.v_dim and case.k_dim % 16 == 0 and not (case.softcap or case.sinks)),
    *(replace(LONG, name=f"long-{g}-{d}", group_size=g, k_dim=d, v_dim=d) for g, d in SIZES),
]


@dataclass(frozen=True)
class Turned:
    """What rope_write reads of a step and of its rope."""

    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    blocks_T: torch.Tensor
    offsets_T: torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest, folder: Path) -> Native:
    return Native(request.param, native.compiled(request.param, folder, is_ours))


@pytest.fixture
def products(kernels: Native) -> Native:
    if not kernels.has_products:
        pytest.skip("on this CPU products are oneDNN's")
    return kernels


def _limits(kernels: Native, float32: float) -> dict[str, float]:
    """float32's own roundings and, in bfloat16, one of what comes out."""
    return {"rtol": 0 if kernels.dtype == torch.float32 else 2**-8, "atol": float32}


def _make(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


def _spec(w: torch.Tensor, product: str) -> ArraySpec:
    return ArraySpec(tuple(w.shape), (None,) * w.ndim, product=product)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_equal_float64(products: Native, product: str, rows: int) -> None:
    """Alone, and with something added: rounded once. An odd depth in bfloat16 is left to oneDNN."""
    ops, (x_shape, w_shape) = TorchOps(native=products), PRODUCTS[product]
    x, w = _make((rows, *x_shape), 1, products.dtype), _make(w_shape, 2, products.dtype)
    packed = ops.prepare(w, _spec(w, product))
    whole = products.dtype == torch.float32 or len(plain_matrix(w, product)[0]) % 2 == 0
    assert isinstance(packed, Blocked) == whole
    assert torch.equal(packed.dense(), w)
    want = torch.from_numpy(np.einsum(product, x.double().numpy(), w.double().numpy()))
    torch.testing.assert_close(ops.einsum(product, x, packed, ()).double(), want, **_limits(products, 2e-5))
    more = _make(tuple(want.shape), 3, products.dtype)
    if whole:
        got = ops.einsum(product, x, packed, (), add=more)
        torch.testing.assert_close(got.double(), want + more.double(), **_limits(products, 2e-5))


def test_a_tied_table_is_looked_up_in_where_it_lies(products: Native) -> None:
    ops, table = TorchOps(native=products), _make((101, 14), 6, products.dtype)
    packed = ops.prepare(table, _spec(table, "re,ve->rv"))
    assert isinstance(packed, Blocked)
    for ids in (torch.tensor([0, 100, 3, 3, 31, 32], dtype=torch.int32), torch.arange(101).repeat(20)):
        assert torch.equal(ops.embed(packed, ids), table[ids])
    for wrong in (-1, 101):
        with pytest.raises(IndexError, match="of a table of 101 rows"):
            ops.embed(packed, torch.tensor([0, wrong], dtype=torch.int32))
    assert "rows" not in vars(packed)


@pytest.mark.parametrize("size", [32, 96, 40], ids=["one tile", "three tiles", "no whole tiles"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_with_norm_and_gate_equals_float64(products: Native, rows: int, size: int) -> None:
    ops, dtype = TorchOps(native=products), products.dtype
    x, w, scale = (_make(shape, n, dtype) for n, shape in enumerate([(rows, 24), (24, 2, size), (24,)]))
    packed = ops.prepare(w / 8, _spec(w, "te,exf->txf"))
    assert packed.gates == (size % 32 == 0)
    got = ops.einsum("te,exf->txf", x, packed, (), norm=(scale, 1e-5), gate=True)
    normed = TorchOps().rms_norm(x, scale, 1e-5)
    gate, up = torch.einsum("te,exf->txf", normed.double(), (w / 8).double()).unbind(1)
    # a norm between two numbers of bfloat16 may be rounded to either; without whole tiles gates are rounded too
    limits = {"rtol": 0, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, **limits)


def test_a_row_has_the_same_bits_among_any_others(products: Native) -> None:
    ops, w, x = TorchOps(native=products), _make((64, 80), 1, products.dtype), _make((130, 64), 2, products.dtype)
    packed, scale = ops.prepare(w, _spec(w, "tf,fe->te")), _make((64,), 3, products.dtype)
    whole = ops.einsum("tf,fe->te", x, packed, (), norm=(scale, 1e-5))
    for n in (1, 2, 5, 12, 13, 31, 64):
        assert torch.equal(ops.einsum("tf,fe->te", x[:n], packed, (), norm=(scale, 1e-5)), whole[:n])


def test_a_product_with_another_dtype_or_weight_is_refused(products: Native) -> None:
    ops, w = TorchOps(native=products), _make((6, 6), 1, products.dtype)
    packed = ops.prepare(w, _spec(w, "tf,fe->te"))
    with pytest.raises(ValueError, match="float16"):
        ops.einsum("tf,fe->te", _make((2, 6), 2, torch.float16), packed, ())
    with pytest.raises(ValueError, match="prepared for 'tf,fe->te'"):
        ops.einsum("re,ve->rv", _make((2, 6), 2, products.dtype), packed, ())


@pytest.mark.parametrize("shape", [(1, 16), (3, 40), (130, 200), (5, 2, 3, 16)], ids=str)
def test_norms_and_gates_are_those_of_torch(kernels: Native, shape: tuple[int, ...]) -> None:
    ops, plain, x = TorchOps(native=kernels), TorchOps(), _make(shape, 1, kernels.dtype)
    wide, scale = _make((*shape[:-1], 2 * shape[-1]), 2, kernels.dtype), _make(shape[-1:], 3, kernels.dtype)
    for given in (x, wide[..., : shape[-1]]):
        want = plain.rms_norm(given, scale, 1e-5)
        torch.testing.assert_close(ops.rms_norm(given, scale, 1e-5), want, **_limits(kernels, 2e-6))
    if x.ndim == 2:
        both = 8 * _make((len(x), 2, shape[-1]), 4, kernels.dtype)
        torch.testing.assert_close(ops.gated_mlp_act(both), plain.gated_mlp_act(both), **_limits(kernels, 2e-5))


def test_a_gate_of_extreme_values(kernels: Native) -> None:
    extreme = [-3e38, -100, -88, -87, 0, 87, 88, 100, 3e38, float("inf"), float("nan")]
    gate = torch.tensor(extreme * 2).to(kernels.dtype)
    both = torch.stack([gate, torch.ones_like(gate)])[None]
    want = TorchOps().gated_mlp_act(both)
    got = TorchOps(native=kernels).gated_mlp_act(both)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("order", ["n p k d", "n k p d"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_rope_and_write_are_those_of_torch(kernels: Native, tokens: int, order: str, pure: bool) -> None:
    heads, group, dim = 3, 2, 32
    qkv, angle = _make((tokens, heads, group + 2, dim), 1, kernels.dtype), _make((tokens, dim // 2), 2)
    at = torch.from_numpy(np.random.default_rng(3).permutation(tokens * BLOCK)[:tokens].astype(np.int32))
    step = rope = Turned(angle.cos(), angle.sin(), at // BLOCK, at % BLOCK)
    shape = {"n": tokens, "p": BLOCK, "k": heads, "d": dim}
    pools = {name: _make(tuple(shape[a] for a in order.split()), 4, kernels.dtype) for name in "kv"}
    kept, found = {name: x.clone() for name, x in pools.items()}, []
    for ops in (TorchOps(pure=True), TorchOps(pure=pure, native=kernels)):
        new = {"k": qkv[:, :, -2], "v": qkv[:, :, -1]}
        q, written = ops.rope_write(qkv[:, :, :-2], new, rope, dict(pools), order, step)
        found.append((q, written["k"], written["v"]))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, **_limits(kernels, 1e-6))
    assert torch.equal(pools["k"], kept["k"]) == pure


def _rounded(case: Ragged, dtype: torch.dtype) -> Batch:
    batch = make_batch(case)
    return replace(batch, **{x: torch.from_numpy(vars(batch)[x]).to(dtype).float().numpy() for x in "qkv"})


@pytest.mark.parametrize("order", ["n p k d", "n k p d"])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_attention_equals_float64(kernels: Native, case: Ragged, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that nobody sees are NaN. Chunks that are too long for it are flash attention's."""
    batch, step = _rounded(case, kernels.dtype), make_step(make_batch(case), backend_of("torch", "auto"))
    q, k, v = (torch.from_numpy(x).to(kernels.dtype) for x in (batch.q, batch.k, batch.v))
    if order == "n k p d":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    long = max(case.counts) > MOST_QUERIES
    if not long:
        monkeypatch.setattr(cpu_attention, "dense", lambda *args: pytest.fail("torch's own attention"))
    got = TorchOps(attention="cpu", native=kernels).for_step([step]).attention(q, k, v, order, step, batch.spec)
    want = torch.from_numpy(expected(batch))
    # flash attention rounds weights of keys too
    limits = {"rtol": 2**-6, "atol": 2**-6} if long and kernels.dtype == torch.bfloat16 else _limits(kernels, 3e-6)
    torch.testing.assert_close(got[: len(want)].double(), want, **limits)
    assert not got[len(want) :].any()


@pytest.mark.parametrize("fault", ["a cap", "a cache of another dtype", "heads of no whole lanes"])
def test_what_they_do_not_serve_is_left_to_torch(kernels: Native, fault: str) -> None:
    dim = 24 if "lanes" in fault else 16
    batch = make_batch(Ragged(fault, (29, 3), (1, 1), k_dim=dim, v_dim=dim, softcap=5.0 if fault == "a cap" else None))
    step, cache = make_step(batch, backend_of("torch", "auto")), torch.float16 if "dtype" in fault else kernels.dtype
    q = torch.from_numpy(batch.q).to(kernels.dtype)
    k, v = (torch.from_numpy(x).to(cache) for x in (batch.k, batch.v))
    both = (TorchOps(attention="cpu", native=own) for own in (None, kernels))
    assert torch.equal(*(ops.attention(q, k, v, "n p k d", step, batch.spec) for ops in both))


def test_a_library_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.compiled(torch.float32, folder, is_ours)
    monkeypatch.setattr(native, "build", lambda *args: pytest.fail("compiled again"))
    assert native.compiled(torch.float32, folder, is_ours) == library
    assert all(path.suffix == ".so" for path in folder.iterdir())


def test_a_library_that_others_may_have_written_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled anew, in its place."""
    monkeypatch.setattr(native, "build", lambda command, library: library.write_bytes(b"ours"))
    library = native.compiled(torch.float32, tmp_path, is_ours)
    library.write_bytes(b"theirs")
    library.chmod(0o777)
    native.compiled(torch.float32, tmp_path, is_ours)
    assert library.read_bytes() == b"ours"
    library.chmod(0o755)
    library.write_bytes(b"kept")
    native.compiled(torch.float32, tmp_path, is_ours)
    assert library.read_bytes() == b"kept"


def test_a_library_is_compiled_anew_for_another_source_or_other_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = str(Path(__file__))  # any file: it is not run
    before = native.key([compiler])
    assert native.key([compiler]) == before != native.key([compiler, "-O1"])
    changed = tmp_path / "changed.c"
    changed.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert native.key([compiler]) != before


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no compiler", "no C compiler (no-such-cc) on the PATH"),
        ("int f( {", "error:"),
        ("another dtype", "not for torch.float16"),
        ("extern int lost(void); int has_products(void) { return lost(); }", "undefined symbol: lost"),
    ],
    ids=["no compiler", "broken source", "another dtype", "lost symbol"],
)
def test_without_them_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, why: str
) -> None:
    dtype = torch.float16 if fault == "another dtype" else torch.float32
    if fault == "no compiler":
        monkeypatch.setattr(native, "COMPILERS", ("no-such-cc",))
    elif "(" in fault:
        source = tmp_path / "source.c"
        source.write_text(fault)
        monkeypatch.setattr(native, "SOURCE", source)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert native.load(dtype, tmp_path / "compiled", is_ours) is None
    assert why in caplog.text
