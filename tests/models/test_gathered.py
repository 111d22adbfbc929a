"""Attention of layouts that gather for themselves, against float64, on both backends and in the laboratory's numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_batches import Batch, backend_of, expected, make_batch, make_step
from backends import BACKENDS
from shapes import CASES, MIXED
from tolerances import tolerance

from octavo.engine.backend import Backend
from octavo.engine.lab.numpy_backend import NumpyBackend
from octavo.models.interface import ArraySpec, Step
from octavo.models.layouts import gathered

TRANSPOSED = {"n p k d": (0, 1, 2, 3), "n k p d": (0, 2, 1, 3), "n k d p": (0, 2, 3, 1)}
SOME = [c for c in CASES if c.name in ("decode-window", "prefill", "mixed-everything", "narrow-values")]
each = pytest.mark.parametrize("backend", [*BACKENDS, "numpy"])


def subject(name: str) -> Backend:
    return NumpyBackend() if name == "numpy" else backend_of(name, "auto")


def attend(
    backend: Backend, batch: Batch, order: str = "n p k d", counts: Any = None, hide: Any = None, lies: str = ""
) -> Any:
    """The batch through gathered.attend, and the weights of the slots if counts are given; `hide`: block ids.

    `lies` is the order in which the arrays lie, if it is not the one that they are gathered by.
    """
    size = batch.case.block_size

    def program(groups: dict, q: Any, step: Step, sinks: Any, counts: Any, hide: Any, *, ops: Any) -> Any:
        def read(table_WB: Any) -> tuple:
            shown = ops.xp.where(table_WB == hide, 0, table_WB)
            k, v = (gathered.gather(groups[name], table_WB, order) for name in "kv")
            return k, v, gathered.positions(ops, shown, size)

        out, mass = gathered.attend(
            ops, q, read, step, batch.spec, size, sinks_KG=sinks, count_T=None if counts is None else counts
        )
        return (out if mass is None else (out, mass)), groups

    def place(x: Any, dtype: str = "float32") -> Any:
        return backend.place(np.asarray(x), ArraySpec(np.shape(x), (None,) * np.ndim(x), dtype))

    groups = {name: place(getattr(batch, name).transpose(TRANSPOSED[lies or order])) for name in "kv"}
    run = backend.compile(program, ("groups", "q", "step", "sinks", "counts", "hide"), ("out", "groups"), "groups")
    sinks = None if batch.sinks is None else place(batch.sinks)
    args = (None if counts is None else place(counts)), place(-1 if hide is None else hide, "int32")
    return backend.read_tree(run(groups, place(batch.q), make_step(batch, backend), sinks, *args)[0])


@each
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_it_equals_float64(backend, case):
    batch = make_batch(case)
    want = expected(batch)
    out = attend(subject(backend), batch)[: len(want)]
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "attention"))


@each
@pytest.mark.parametrize("order", TRANSPOSED)
def test_any_order_is_gathered_a_few_tiles_at_a_time(backend, order, monkeypatch):
    monkeypatch.setattr(gathered, "MEMORY", 1 << 14)
    batch = make_batch(MIXED)
    want = expected(batch)
    out = attend(subject(backend), batch, order)[: len(want)]
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance("float32", "attention"))


@each
def test_arrays_gathered_by_a_wrong_order_are_refused_with_their_shapes(backend):
    with pytest.raises(ValueError, match=r"read returned \(\d+, \d+, \d+, \d+\), .*gather has an `order`"):
        attend(subject(backend), make_batch(MIXED), lies="n k p d")


@each
def test_weights_are_summed_over_the_queries_that_count(backend):
    """Of each sequence, only odd tokens counted; against the weights of one query at a time."""
    batch = make_batch(replace(MIXED, name="weights", window=40, sinks=True))
    counts = np.arange(len(batch.q)) % 2 * 1.5
    out, mass_SMK = attend(subject(backend), batch, counts=counts)
    np.testing.assert_allclose(out[: sum(batch.case.counts)], expected(batch), rtol=0, atol=1e-5)
    np.testing.assert_allclose(mass_SMK, weights_by_token(batch, counts), rtol=0, atol=1e-5)


def weights_by_token(batch: Batch, counts: np.ndarray) -> np.ndarray:
    case, token = batch.case, 0
    mass = np.zeros((len(case.counts), batch.tables.shape[1] * case.block_size, case.kv_heads))
    for s, (row, computed, count) in enumerate(zip(batch.tables, case.computed, case.counts, strict=True)):
        for position in range(computed, computed + count):
            seen = np.arange(max(0, position + 1 - case.window), position + 1)
            k = batch.k[row[seen // case.block_size], seen % case.block_size].astype(float)
            scores = np.exp(np.einsum("kgd,mkd->kgm", batch.q[token].astype(float), k) * batch.spec.scale)
            scores /= scores.sum(-1, keepdims=True) + np.exp(batch.sinks.astype(float))[..., None]
            mass[s, seen] += counts[token] * scores.sum(1).T
            token += 1
    return mass


@each
def test_what_has_no_position_takes_no_part(backend):
    """One block of a sequence hidden: as if its tokens had been masked, whatever they hold."""
    batch = make_batch(replace(MIXED, name="hidden"))
    hidden = batch.tables[0, 2]
    out = attend(subject(backend), batch, hide=hidden)[0]
    (length,), q = np.array(batch.case.lengths[:1]), batch.q[0].astype(float)
    seen = np.array([p for p in range(length) if p // 8 != 2])
    at = batch.tables[0][seen // 8], seen % 8
    scores = np.exp(np.einsum("kgd,mkd->kgm", q, batch.k[at].astype(float)) * batch.spec.scale)
    want = np.einsum("kgm,mkd->kgd", scores / scores.sum(-1, keepdims=True), batch.v[at].astype(float))
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
