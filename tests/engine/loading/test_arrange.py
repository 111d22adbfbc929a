"""Fusing and casting, against einops and numpy done the plain way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from einops import rearrange

from octavo.engine.loading.arrange import BLOCK, arrange, copy_into
from octavo.engine.loading.tree import Leaf
from octavo.models.interface import ArraySpec, Fuse, Part

SIZES = {"k": 3, "g": 2, "d": 4}
KV = "(k d) e -> e k 1 d"


class Tensors(dict):
    """A TensorSource of arrays."""

    identity = None

    def get(self, name: str) -> np.ndarray:
        return self[name]


def _leaf(shape: tuple[int, ...], axis: int, *parts: tuple[str, str], dtype: Any = np.float32) -> Leaf:
    fuse = Fuse(tuple(Part(*part) for part in parts), axis)
    return Leaf("layers.0.w", ArraySpec(shape, (None,) * len(shape)), fuse, np.dtype(dtype))


@pytest.fixture
def tensors() -> Tensors:
    rng = np.random.default_rng(0)
    return Tensors({name: rng.normal(size=(rows, 5)) for name, rows in (("q", 24), ("k", 12), ("v", 12))})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_parts_lie_side_by_side_in_the_leafs_dtype(tensors, dtype):
    leaf = _leaf((5, 3, 4, 4), 2, ("q", "(k g d) e -> e k g d"), ("k", KV), ("v", KV), dtype=dtype)
    q = rearrange(tensors["q"], "(k g d) e -> e k g d", **SIZES)
    k, v = (rearrange(tensors[n], KV, k=3, d=4) for n in "kv")
    found = arrange(leaf, tensors, SIZES)
    assert found.flags.c_contiguous
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.concatenate([q, k, v], 2).astype(dtype))


def test_an_array_of_the_right_form_is_copied(tensors):
    leaf = _leaf((24, 5), 0, ("q", "a b -> a b"), dtype=np.float64)
    found = arrange(leaf, tensors, SIZES)
    np.testing.assert_array_equal(found, tensors["q"])
    assert not np.shares_memory(found, tensors["q"])


@pytest.mark.parametrize(
    "shape, parts, message",
    [
        (
            (5, 3, 4),
            [("k", "(k g d) e -> e k g d")],
            r"k of shape \(12, 5\) does not fit '\(k g d\) e -> e k g d' with",
        ),
        ((5, 3, 2, 4), [("k", KV)], r"k fill 1 of axis 2: layers\.0\.w has shape \(5, 3, 2, 4\)"),
        ((5, 3, 1, 4), [("k", KV), ("v", KV)], r"v gives \(5, 3, 1, 4\) at 1 of axis 2: layers\.0\.w has shape"),
        ((6, 3, 1, 4), [("k", KV)], r"k gives \(5, 3, 1, 4\) at 0 of axis 2"),
    ],
    ids=["pattern", "too-little", "too-much", "other-axis"],
)
def test_what_does_not_fit_is_named(tensors, shape, parts, message):
    with pytest.raises(ValueError, match=message):
        arrange(_leaf(shape, 2, *parts), tensors, SIZES)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)], ids=str)
def test_arrays_of_many_blocks_are_copied_whole(axes, dtype):
    shape = (7, 211, 3 * BLOCK // 1000)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    place = np.full(np.array(shape)[list(axes)], np.nan, dtype)
    copy_into(place, x.transpose(axes))
    np.testing.assert_array_equal(place, x.transpose(axes).astype(dtype))
