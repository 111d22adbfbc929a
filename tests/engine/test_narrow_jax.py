"""Programs through which only what changes goes: the same numbers, and what stays is not touched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BACKENDS

from octavo.engine.backend_jax import compile_counter
from octavo.engine.narrow_jax import Narrow, copied
from octavo.engine.saved_jax import Held, Jitted

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="programs of JAX")


def step(w: Any, state: dict[str, Any], inputs: dict[str, Any]) -> tuple:
    """One leaf of the state changes, and with "more" in the inputs another."""
    out = {"kept": state["kept"], "sum": state["sum"] + w * inputs["x"], "late": state["late"]}
    if "more" in inputs:
        out["late"] = state["late"] + inputs["more"]
    return out["sum"] * 2, out


def made(at: int = 1, back: int | None = 1, fn: Any = step) -> Held:
    return Held(Narrow(fn, at, back, (2,), lambda args: {}), ())


def state_of(*values: float) -> dict[str, Any]:
    return {name: jnp.full(3, x) for name, x in zip(("kept", "sum", "late"), values, strict=True)}


def test_results_are_right_and_what_stays_is_the_same_array():
    program, state = made(), state_of(1, 2, 3)
    old = dict(state)
    for i, more in enumerate((False, False, True, False)):
        inputs = {"x": jnp.float32(i)} | ({"more": jnp.float32(10)} if more else {})
        doubled, state = program(jnp.float32(5), state, inputs)
        assert (np.asarray(doubled) == 2 * np.asarray(state["sum"])).all()
    assert np.asarray(state["sum"]).tolist() == [2 + 5 * (0 + 1 + 2 + 3)] * 3
    assert np.asarray(state["late"]).tolist() == [13] * 3
    assert state["kept"] is old["kept"]
    # taken for good
    assert old["sum"].is_deleted()
    assert old["late"].is_deleted()


def test_what_is_alone_comes_back_alone():
    def alone(w: Any, state: dict[str, Any], inputs: Any) -> Any:
        return step(w, state, inputs)[1]

    out = made(back=None, fn=alone)(jnp.float32(1), state_of(1, 2, 3), {"x": jnp.float32(4)})
    assert {name: float(x[0]) for name, x in out.items()} == {"kept": 1, "sum": 6, "late": 3}


def test_a_lowered_program_is_the_one_that_runs():
    program, inputs = made(), {"x": jnp.float32(1)}
    compiled = program.lower(jnp.float32(5), state_of(1, 2, 3), inputs).compile()
    # only the sum goes through
    assert compiled.memory_analysis().alias_size_in_bytes == 12
    before = compile_counter().compiles
    program(jnp.float32(5), state_of(1, 2, 3), inputs)
    assert compile_counter().compiles == before


def test_results_stay_at_their_place_and_copies_are_returned():
    copy = Held(Jitted(jax.jit(copied)), ())
    program, state = Held(Narrow(step, 1, 1, (2,), lambda args: {}, copy), ()), state_of(1, 2, 3)
    inputs, found = {"x": jnp.float32(1)}, []
    for _ in range(3):
        doubled, state = program(jnp.float32(5), state, inputs)
        found.append(doubled)
    # what was returned before is there, and what it should be
    assert [float(x[0]) for x in found] == [14, 24, 34]
    assert float(state["sum"][0]) == 17
    # the sum and its double lie where they lay
    compiled = program.lower(jnp.float32(5), state, inputs).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 24


def test_a_call_that_failed_leaves_a_program_that_runs():
    copy = Held(Jitted(jax.jit(copied)), ())
    program, inputs = Held(Narrow(step, 1, 1, (2,), lambda args: {}, copy), ()), {"x": jnp.float32(1)}
    gone = state_of(1, 2, 3)
    program(jnp.float32(5), gone, inputs)
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        program(jnp.float32(5), gone, inputs)
    doubled, _ = program(jnp.float32(5), state_of(1, 2, 3), inputs)
    assert float(doubled[0]) == 14


def test_places_are_those_of_a_programs_own_kind():
    def named(w: Any, state: dict[str, Any], inputs: dict[str, Any]) -> tuple:
        doubled, out = step(w, state, {"x": next(iter(inputs.values()))})
        return (doubled if "few" in inputs else jnp.tile(doubled, 2)), out

    narrow = Narrow(named, 1, 1, (2,), lambda args: {}, Held(Jitted(jax.jit(copied)), ()))
    few, many = ((jnp.float32(5), state_of(1, 2, 3), {name: jnp.float32(1)}) for name in ("few", "many"))
    for args in (few, many):
        narrow.lower(*args)
    assert [narrow.notes(*args)[1] for args in (few, many)] == [(((n,), "float32"),) for n in (3, 6)]
