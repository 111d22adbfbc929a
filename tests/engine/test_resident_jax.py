"""Inputs that stay on the device: right whatever changes, copied only when something does."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from octavo.engine.backend_jax import compile_counter
from octavo.engine.resident_jax import LARGEST, RENEWS, Resident, renewed
from octavo.engine.saved_jax import Held, Jitted


def add(a, inputs):
    return a + inputs["x"] * inputs["y"].sum()


def resident():
    program = Held(Jitted(jax.jit(add)), ())
    return Resident(program, (1,), Held(Jitted(jax.jit(renewed, **RENEWS)), ()))


def arrays(program):
    """What it keeps, in the order in which it came."""
    return [array for kept in program.kept.values() for _, array in filter(None, kept)]


def inputs(x, y=(1, 2)):
    return {"x": np.array(x, np.int32), "y": np.array(y, np.int32)}


def test_results_follow_the_numbers():
    program = resident()
    for x, y in (([1, 2], (1, 2)), ([1, 2], (1, 2)), ([5, 6], (1, 2)), ([5, 6], (0, 1)), ([1, 2], (1, 2)), ([7], (3,))):
        want = add(10, inputs(x, y))
        assert (np.asarray(program(np.int32(10), inputs(x, y))) == want).all()


def test_what_is_equal_is_not_copied_and_what_changes_stays_where_it_was():
    program = resident()
    program(np.int32(0), inputs([3, 4]))
    before = [(x, x.unsafe_buffer_pointer()) for x in arrays(program)]
    program(np.int32(0), inputs([3, 4]))
    assert all(x is kept for x, (kept, _) in zip(arrays(program), before, strict=True))
    program(np.int32(0), inputs([5, 6]))
    ((changed, (old, at)),) = (pair for pair in zip(arrays(program), before, strict=True) if pair[0] is not pair[1][0])
    assert old.is_deleted()
    assert changed.unsafe_buffer_pointer() == at


def test_the_very_same_argument_is_not_looked_at_until_another_was_given():
    program, given = resident(), inputs([1, 2])
    want = add(10, given)
    assert (np.asarray(program(np.int32(10), given)) == want).all()
    settle, program._settle = program._settle, None
    assert (np.asarray(program(np.int32(10), given)) == want).all()
    program._settle = settle
    assert (np.asarray(program(np.int32(10), inputs([7, 7]))) == add(10, inputs([7, 7]))).all()
    assert (np.asarray(program(np.int32(10), given)) == want).all()


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_nothing_compiles_after_the_programs_it_names(dtype):
    def call(value):
        return np.int32(1), {"x": np.full(3, value, dtype), "y": np.full(2, value, dtype)}

    program = resident()
    program.prepare(*call(0))()
    known: set = set()
    for compile in program.renewals(known, *call(0)):
        compile()
    assert program.renewals(known, *call(0)) == []
    before = compile_counter().compiles
    assert (np.asarray(program(*call(0))) == 1).all()
    assert (np.asarray(program(*call(1))) == add(*call(1))).all()
    assert compile_counter().compiles == before


def test_what_is_large_goes_through():
    program = resident()
    large = {"x": np.ones(LARGEST // 4 + 1, np.float32), "y": np.ones(2, np.float32)}
    assert (np.asarray(program(np.float32(1), large)) == 3).all()
    # nor is it held until the next call
    assert not program.last
    assert [kept.shape for kept in arrays(program)] == [(2,)]
