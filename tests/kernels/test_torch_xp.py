"""The array namespace of the torch room: what models/ may use of it, and that it means what jnp means."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels_triton import xp

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "models").rglob("*.py")), ROOT / "engine" / "functional.py"]

rng = np.random.default_rng(0)
FLOATS = rng.standard_normal((3, 5)).astype(np.float32)
INTS = rng.integers(-5, 6, (3, 5)).astype(np.int32)
SORTED = np.array([0, 2, 2, 7], np.int32)
CALLS = {
    "abs": lambda xp, f, i, s: xp.abs(i),
    "all": lambda xp, f, i, s: xp.all(i > -5, axis=1),
    "all over everything": lambda xp, f, i, s: xp.all(i > -6),
    "any": lambda xp, f, i, s: xp.any(i > 4, axis=-1, keepdims=True),
    "any over everything": lambda xp, f, i, s: xp.any(i > 5),
    "astype": lambda xp, f, i, s: xp.astype(f * 3, xp.int32),
    "bool": lambda xp, f, i, s: xp.astype(i, xp.bool),
    "bfloat16": lambda xp, f, i, s: xp.astype(xp.astype(f, xp.bfloat16), xp.float32),
    "clip": lambda xp, f, i, s: xp.clip(i, -2, 3),
    "clip above": lambda xp, f, i, s: xp.clip(i, max=s.shape[0]),
    "concat": lambda xp, f, i, s: xp.concat([i, i[:1]], axis=0),
    "cumulative_sum": lambda xp, f, i, s: xp.cumulative_sum(i, axis=1),
    "exp": lambda xp, f, i, s: xp.exp(f),
    "float32": lambda xp, f, i, s: xp.astype(i, xp.float32) / 3,
    "int32": lambda xp, f, i, s: xp.astype(i > 0, xp.int32),
    "isfinite": lambda xp, f, i, s: xp.isfinite(f / (i * 1.0)),
    "log": lambda xp, f, i, s: xp.log(xp.abs(f)),
    "max": lambda xp, f, i, s: xp.max(f, axis=-1, keepdims=True),
    "max over everything": lambda xp, f, i, s: xp.max(i),
    "maximum": lambda xp, f, i, s: xp.maximum(i, -i),
    "maximum with a number": lambda xp, f, i, s: xp.maximum(f, 0.5),
    "min": lambda xp, f, i, s: xp.min(i, axis=0),
    "minimum": lambda xp, f, i, s: xp.minimum(f, f * 0),
    "minimum with a number": lambda xp, f, i, s: xp.minimum(i, 2),
    "ones_like": lambda xp, f, i, s: xp.ones_like(i),
    "round": lambda xp, f, i, s: xp.round(f * 2),
    "searchsorted": lambda xp, f, i, s: xp.searchsorted(s, i, side="right"),
    "searchsorted left": lambda xp, f, i, s: xp.searchsorted(s, i),
    "stack": lambda xp, f, i, s: xp.stack([f, f], axis=1),
    "sum": lambda xp, f, i, s: xp.sum(f, axis=-1),
    "sum of ints": lambda xp, f, i, s: xp.sum(i, axis=0, keepdims=True),
    "sum of bools": lambda xp, f, i, s: xp.sum(i > 0),
    "tanh": lambda xp, f, i, s: xp.tanh(f),
    "where": lambda xp, f, i, s: xp.where(i > 0, i, 0),
    "where of numbers": lambda xp, f, i, s: xp.where(i > 0, 1.0, 0.0),
    "where with minus infinity": lambda xp, f, i, s: xp.where(f > 0, f, float("-inf")),
    "zeros_like": lambda xp, f, i, s: xp.zeros_like(f),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_models_use_only_what_is_listed(path):
    used = set(re.findall(r"\bxp\.(\w+)", path.read_text()))
    assert used <= set(xp.__all__), f"add to kernels_triton/xp.py, with a call here: {sorted(used - set(xp.__all__))}"


def test_every_listed_name_is_called_here():
    assert {name.split()[0] for name in CALLS} == set(xp.__all__)
    assert all(hasattr(xp, name) for name in xp.__all__)
    assert {name for name in xp.__all__ if not re.search(rf"\b{name}\b", str(xp.__doc__))} == set()


@pytest.mark.skipif(find_spec("jax") is None, reason="compares with jnp")
@pytest.mark.parametrize("name", CALLS)
def test_it_means_what_jnp_means(name):
    import jax.numpy as jnp

    got = CALLS[name](xp, *map(torch.from_numpy, (FLOATS, INTS, SORTED))).numpy()
    want = np.asarray(CALLS[name](jnp, *map(jnp.asarray, (FLOATS, INTS, SORTED))))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
