"""Attention over quantised caches: what lies there times its scale, or floats of 8 bits, against float64 numpy.

Slots that nobody wrote hold nan for a scale, and any number for a code.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_batches import ORDERS, Batch, backend_of, expected, make_batch, make_step
from backends import BACKENDS
from shapes import DECODE, MIXED, SHARED, Ragged
from tolerances import tolerance

from octavo.engine.backend import Backend, get_backend
from octavo.engine.lab.numpy_backend import NumpyBackend
from octavo.models.interface import ArraySpec, Step

ROOMS = {"jax": "octavo.kernels_pallas.attention", "torch": "octavo.kernels_triton.attention"}
SCALED = [
    (b, name) for b in BACKENDS for name, i in importlib.import_module(ROOMS[b]).IMPLEMENTATIONS.items() if i.scales
]
CPU = [(b, name) for b, name in SCALED if name in ("reference", "cpu")] + [("numpy", "oracle")]
CASES = (DECODE, replace(DECODE, name="one-row", computed=(100,), counts=(1,), padding=0), MIXED,
         replace(MIXED, name="mixed-everything", window=10, softcap=3.0, sinks=True), SHARED[-2])  # fmt: skip


def quantised(case: Ragged, dtype: str) -> tuple[Batch, dict[str, np.ndarray]]:
    """A batch whose keys and values are codes times scales, and the arrays [N, P, K, D] and [N, P, K] of them."""
    batch, arrays = make_batch(case), {}
    for name in "kv":
        x = getattr(batch, name)
        if dtype == "int8":
            scale = np.abs(x).max(-1) / 127
            written = np.isfinite(scale)[..., None]
            codes = np.where(written, np.round(x / scale[..., None]), 99).astype(np.int8)
            arrays |= {name: codes, f"{name}_scale": scale}
            x = np.where(written, codes * scale[..., None], np.nan)
        else:
            arrays[name] = x.astype(ml_dtypes.float8_e4m3fn)
            x = arrays[name].astype(np.float32)
        batch = replace(batch, **{name: x})
    return batch, arrays


def attend(backend: Backend, batch: Batch, arrays: dict[str, np.ndarray], order: str, dtype: str) -> np.ndarray:
    def program(groups: dict, q: Any, step: Step, sinks: Any, *, ops: Any) -> tuple[Any, dict]:
        scales = (groups["k_scale"], groups["v_scale"]) if "k_scale" in groups else None
        ops = ops.for_step([step])
        return ops.attention(q, groups["k"], groups["v"], order, step, batch.spec, sinks, scales), groups

    def place(x: np.ndarray, dtype: str = "float32") -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim, dtype))

    lie = {name: x if order == ORDERS[0] else x.swapaxes(1, 2).copy() for name, x in arrays.items()}
    groups = {
        name: place(x if x.dtype == np.int8 else x.astype(np.float32), dtype if name in "kv" else "float32")
        for name, x in lie.items()
    }
    run = backend.compile(program, ("groups", "q", "step", "sinks"), ("out", "groups"), consumes="groups")
    sinks = None if batch.sinks is None else place(batch.sinks)
    return backend.read(run(groups, place(batch.q), make_step(batch, backend), sinks)[0])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("order", ORDERS, ids=["token_major", "head_major"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(("backend", "name"), CPU)
def test_quantised_attention_equals_float64(backend, name, case, order, dtype):
    batch, arrays = quantised(case, dtype)
    subject = NumpyBackend() if backend == "numpy" else backend_of(backend, name)
    want = expected(batch)
    out = attend(subject, batch, arrays, order, dtype)[: len(want)]
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_finds_one_that_takes_scales(backend):
    batch, arrays = quantised(DECODE, "int8")
    out = attend(backend_of(backend, "auto"), batch, arrays, ORDERS[0], "int8")
    np.testing.assert_allclose(out, expected(batch), rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.skipif("jax" not in BACKENDS, reason="asks the JAX room")
def test_a_named_implementation_without_scales_says_so():
    batch, arrays = quantised(DECODE, "int8")
    with pytest.raises(NotImplementedError, match="attention 'cpu': it takes no scales of a quantised cache"):
        attend(backend_of("jax", "cpu"), batch, arrays, ORDERS[0], "int8")


def run_layer(backend: Backend, attends: bool) -> None:
    """A layer over an int8 cache as a step runs it, which asks for attention or gathers by itself."""
    batch, arrays = quantised(DECODE, "int8")
    step, layout = make_step(batch, backend), SimpleNamespace(block_size=batch.case.block_size)

    def layer(w: None, cache: dict, x: Any, step: Step, spec: Any, ops: Any, layout: Any) -> tuple[Any, dict]:
        scales = cache["k_scale"], cache["v_scale"]
        return ops.attention(x, cache["k"], cache["v"], ORDERS[0], step, spec, None, scales) if attends else x, cache

    def program(cache: dict, q: Any, step: Step, *, ops: Any) -> tuple[Any, dict]:
        ops = ops.for_step([step])
        return ops.layer(layer)(None, cache, q, step, batch.spec, ops, layout)

    def place(x: np.ndarray) -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim, x.dtype.name))

    run = backend.compile(program, ("cache", "q", "step"), ("out", "cache"), consumes="cache")
    run({name: place(x) for name, x in arrays.items()}, place(batch.q), step)


@pytest.mark.parametrize("attends", [True, False], ids=["attends", "gathers"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_says_once_what_serves_it_and_only_if_it_asks(backend, attends, caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        run_layer(get_backend(backend, {"attention": "auto"}), attends)
    assert len([r for r in caplog.records if "attention:" in r.getMessage()]) == attends


@pytest.mark.skipif("jax" not in BACKENDS, reason="asks the JAX room")
@pytest.mark.parametrize("name", ["cpu", "triton_lowered"])
def test_an_implementation_refuses_only_who_asks_for_attention(name):
    run_layer(get_backend("jax", {"attention": name}), attends=False)
    with pytest.raises(NotImplementedError, match=f"attention '{name}': it takes no scales of a quantised cache"):
        run_layer(get_backend("jax", {"attention": name}), attends=True)


@pytest.mark.skipif("torch" not in BACKENDS, reason="asks the torch room")
def test_a_kernel_is_told_the_dtype_of_the_cache():
    import torch

    from octavo.kernels_triton.attention import choose

    spec, gpu = make_batch(DECODE).spec, torch.device("cuda")
    with pytest.raises(NotImplementedError, match=r"wants a cache of the queries'|Triton is not installed"):
        choose("triton", spec, torch.float32, gpu, torch.float16)
