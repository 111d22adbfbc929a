"""Compiled programs called on flat lists: what JAX's own call gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BACKENDS

from octavo.engine.direct_jax import direct, lister

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="programs of JAX")


def args() -> tuple[Any, ...]:
    return [jnp.arange(3.0)], {"w": jnp.full(3, 2.0), "unread": jnp.zeros(5)}, jnp.int32(4)


def test_results_are_those_of_a_call_in_structure_and_kind() -> None:
    def fn(changing: Any, weights: Any, x: Any) -> Any:
        return {"y": weights["w"] * x, "z": (changing[0] + 1,)}, x * 2

    compiled = jax.jit(fn).lower(*args()).compile()
    want, found = compiled(*args()), direct(compiled)(jax.tree.leaves(args()))
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding) and not a.weak_type


def test_what_is_donated_is_gone() -> None:
    compiled = jax.jit(lambda c, w, x: [c[0] + w["w"] * x], donate_argnums=0).lower(*args()).compile()
    given = args()
    (out,) = direct(compiled)(jax.tree.leaves(given))
    assert given[0][0].is_deleted() and not given[1]["w"].is_deleted()
    np.testing.assert_array_equal(out, [8, 9, 10])
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        direct(compiled)(jax.tree.leaves(given))


def test_large_constants_come_along() -> None:
    table = np.arange(1000.0, dtype=np.float32)
    compiled = jax.jit(lambda c, w, x: jnp.asarray(table)[x] + c[0]).lower(*args()).compile()
    np.testing.assert_array_equal(direct(compiled)(jax.tree.leaves(args())), [4, 5, 6])


def test_a_program_that_prints_still_does(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(c: Any, w: Any, x: Any) -> Any:
        jax.debug.print("x is {x}", x=x)
        return c[0] + x

    compiled = jax.jit(fn).lower(*args()).compile()
    np.testing.assert_array_equal(direct(compiled)(jax.tree.leaves(args())), [4, 5, 6])
    jax.effects_barrier()
    assert "x is 4" in capfd.readouterr().out


def test_a_scalar_result_and_results_of_nothing() -> None:
    compiled = jax.jit(lambda c, w, x: (None, {}, x + 1)).lower(*args()).compile()
    found = direct(compiled)(jax.tree.leaves(args()))
    assert found[:2] == (None, {}) and int(found[2]) == 5


def test_leaves_are_listed_in_the_order_of_jax() -> None:
    tree = {"z": 1, "layers": [{"b": 2, "a": 3}, {"b": 4, "a": 5}], "one": {"rope": 6}, "none": None, "t": ({}, (7,))}
    assert list(lister(tree)(tree)) == jax.tree.leaves(tree) == [3, 2, 5, 4, 6, 7, 1]
    # what is put in another's place is seen
    tree["layers"][1]["a"] = 8
    assert list(lister(tree)(tree))[2] == 8
