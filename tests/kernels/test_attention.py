"""Every attention implementation of both rooms, over one table of ragged batches, against float64 numpy.

Slots that no token of a sequence wrote hold nan: whoever reads one, weights it with zero or not, shows.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_batches import ORDERS, Batch, backend_of, expected, make_batch, make_step
from backends import BACKENDS
from shapes import CASES, DECODE, MIXED, SHARED
from tolerances import tolerance

from octavo.engine.backend import Backend, get_backend
from octavo.models.interface import ArraySpec, Step

ROOMS = {"jax": "octavo.kernels_pallas.attention", "torch": "octavo.kernels_triton.attention"}
# do not serve every case of the table, nor a cache of 32 bits on a CPU: test_pallas_kernels.py
ELSEWHERE = {"mosaic_gpu", "mosaic_tpu"}
NAMES = [(b, name) for b in BACKENDS for name in importlib.import_module(ROOMS[b]).IMPLEMENTATIONS]
# XLA takes seconds to compile what Pallas' interpreter makes of a kernel
SLOW = pytest.mark.slow
SUBJECTS = [
    pytest.param(b, name, marks=[SLOW] * (name == "triton_lowered"), id=f"{b}-{name}")
    for b, name in NAMES
    if name not in ELSEWHERE
]


def attend(backend: Backend, batch: Batch, order: str) -> np.ndarray:
    """The batch through ops.attention, in a program as a forward would be one."""

    def program(groups: dict, q: Any, step: Step, sinks: Any, *, ops: Any) -> tuple[Any, dict]:
        out = ops.for_step([step]).attention(q, groups["k"], groups["v"], order, step, batch.spec, sinks)
        return out, groups

    def place(x: np.ndarray) -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim))

    kv = {
        name: place(x if order == ORDERS[0] else x.swapaxes(1, 2).copy())
        for name, x in (("k", batch.k), ("v", batch.v))
    }
    run = backend.compile(program, ("groups", "q", "step", "sinks"), ("out", "groups"), consumes="groups")
    sinks = None if batch.sinks is None else place(batch.sinks)
    return backend.read(run(kv, place(batch.q), make_step(batch, backend), sinks)[0])


@pytest.mark.parametrize(
    ("case", "order"),
    [(c, ORDERS[0]) for c in CASES] + [(c, ORDERS[1]) for c in CASES[::4]],
    ids=lambda x: x.replace(" ", "") if isinstance(x, str) else x.name,
)
@pytest.mark.parametrize(("backend", "name"), SUBJECTS)
def test_attention_equals_float64(backend, name, case, order):
    batch = make_batch(case)
    out = attend(backend_of(backend, name), batch, order)
    assert out.shape == (len(batch.q), case.kv_heads, case.group_size, case.v_dim)
    want = expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))


def shared_subjects() -> list[Any]:
    """Every case where prefixes are read once; where nobody heeds them, one step of each kind."""
    found = []
    for b, name in NAMES:
        shares = importlib.import_module(ROOMS[b]).IMPLEMENTATIONS[name].shares
        for i, case in enumerate(SHARED):
            if name not in ELSEWHERE and (shares or case.name in ("shared", "shared-mixed")):
                slow = name == "triton_lowered" or (b == "jax" and i % 4)
                found.append(pytest.param(b, name, case, marks=[SLOW] * bool(slow), id=f"{b}-{name}-{case.name}"))
    return found


@pytest.mark.parametrize(("backend", "name", "case"), shared_subjects())
def test_shared_prefixes_change_nothing(backend, name, case):
    test_attention_equals_float64(backend, name, case, ORDERS[SHARED.index(case) % 2])


@pytest.mark.parametrize(("backend", "name"), SUBJECTS)
def test_a_row_does_not_depend_on_its_neighbours(backend, name):
    """Tokens of one sequence, alone and beside others: within rounding, whatever the tiles are."""
    batch = make_batch(MIXED)
    start = MIXED.counts[0]
    alone = replace(
        batch,
        case=replace(MIXED, computed=MIXED.computed[1:2], counts=MIXED.counts[1:2]),
        q=batch.q[start : start + MIXED.counts[1]],
        tables=batch.tables[1:2],
    )
    together = attend(backend_of(backend, name), batch, ORDERS[0])[start : start + MIXED.counts[1]]
    apart = attend(backend_of(backend, name), alone, ORDERS[0])
    np.testing.assert_allclose(together, apart, rtol=0, atol=tolerance("float32", "attention"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_says_its_choice_once(backend, caplog):
    subject = get_backend(backend, {"attention": "auto"})
    with caplog.at_level(logging.INFO, logger="octavo"):
        attend(subject, make_batch(DECODE), ORDERS[0])
        attend(subject, make_batch(replace(DECODE, computed=(5,), counts=(1,))), ORDERS[0])
    said = [r.getMessage() for r in caplog.records if "attention" in r.getMessage()]
    assert len(said) == 1
    assert any(name in said[0] for b, name in NAMES if b == backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_implementation_is_refused(backend):
    with pytest.raises(ValueError, match="'fast' is n"):
        attend(get_backend(backend, {"attention": "fast"}), make_batch(DECODE), ORDERS[0])


def test_cases_are_what_their_names_say():
    assert len({c.name for c in (*CASES, *SHARED)}) == len(CASES) + len(SHARED)
    assert any(c.decode for c in CASES)
    assert any(not c.decode and 1 in c.counts and max(c.counts) > 1 for c in CASES)
    assert all(math.isclose(c.scale or c.k_dim**-0.5, make_batch(c).spec.scale) for c in CASES)
