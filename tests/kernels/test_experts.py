"""ops.route and ops.moe of both tables against float64, over ragged counts."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from backends import BACKENDS
from tolerances import tolerance

from octavo.engine.backend import get_backend
from octavo.models import moe
from octavo.models.interface import ArraySpec, Routing

each_backend = pytest.mark.parametrize("name", BACKENDS)
# chosen experts of each token, of 5; 5 is none
CASES = {
    "one token": [[3, 1]],
    "one expert of one": [[2]],
    "all in one": [[4, 0]] * 9,
    "none at all": [[5, 5]] * 3,
    "some none": [[0, 5], [5, 5], [5, 3], [2, 1]],
    "uneven": np.random.default_rng(0).permuted(np.tile(np.arange(5), (77, 1)), axis=1)[:, :3].tolist(),
    "many in two": [[1, 3]] * 150 + [[3, 0]],
}


def put(backend, x):
    return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim, x.dtype.name))


def case_of(ids, embed_dim=24, size=17, num_experts=5, poisoned=False, dtype="float32"):
    """x, weights, gate_up, down, in float32, outputs of about unit variance; and the outputs in float64.

    All are numbers of `dtype`. Poisoned: the weights of experts that nobody chose are nan.
    """
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((len(ids), embed_dim)), rng.standard_normal((len(ids), len(ids[0])))
    up = rng.standard_normal((num_experts, embed_dim, 2, size)) * embed_dim**-0.5
    down = rng.standard_normal((num_experts, size, embed_dim)) * size**-0.5
    x, w, up, down = (a.astype(dtype).astype(np.float32) for a in (x, w, up, down))
    want = np.zeros(x.shape)
    for t, c in np.ndindex(w.shape):
        if (expert := ids[t][c]) < num_experts:
            one = {"gate_up": up[expert].astype(np.float64), "down": down[expert].astype(np.float64)}
            want[t] += w[t, c] * oracle.mlp(one, x[t : t + 1].astype(np.float64))[0]
    if poisoned:
        unchosen = [i for i in range(num_experts) if i not in np.array(ids)]
        up[unchosen], down[unchosen] = np.nan, np.nan
    return x, w, up, down, want


def run(name, x, w, ids, up, down):
    """ops.moe as a compiled program."""
    backend = get_backend(name)

    def program(x, rest, *, ops):
        return ops.moe(x, *rest)

    placed = tuple(put(backend, a) for a in (w, np.array(ids, np.int32), up, down))
    return backend.read(backend.compile(program, ("x", "rest"), ("y",), "x")(put(backend, x), placed))


@each_backend
@pytest.mark.parametrize("case", CASES)
def test_moe_equals_float64(name, case):
    x, w, up, down, want = case_of(CASES[case])
    got = run(name, x, w, CASES[case], up, down)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "op"))


@each_backend
def test_experts_that_nobody_chose_are_not_read(name):
    ids = [[0, 3], [3, 0]]
    x, w, up, down, want = case_of(ids, poisoned=True)
    np.testing.assert_allclose(run(name, x, w, ids, up, down), want, rtol=0, atol=tolerance("float32", "op"))


ROUTINGS = {
    "softmax": Routing(3),
    "normalised": Routing(3, normalise=True),
    "all": Routing(12, normalise=True),
    "sigmoid": Routing(2, scoring="sigmoid", normalise=True, scale=2.5),
    "groups of the best": Routing(3, num_groups=4, num_top_groups=2, scale=16.0),
    "groups of two": Routing(3, "sigmoid", True, 2.5, num_groups=3, num_top_groups=2, group_best=2),
}


@each_backend
@pytest.mark.parametrize("normed", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_router_equals_float64(name, routing, normed):
    rng, routing = np.random.default_rng(6), ROUTINGS[routing]
    x, router = (rng.standard_normal((n, 40)).astype(np.float32) for n in (9, 12))
    router, scale = router * np.float32(40**-0.5), rng.uniform(0.5, 1.5, 40).astype(np.float32)
    backend = get_backend(name)
    norm = (put(backend, scale), 1e-6) if normed else None
    rest = put(backend, router), put(backend, np.arange(9) < 8)

    def program(x, rest, *, ops):
        return *ops.router(moe.choose, x, norm, rest[0], routing, None, rest[1]), x

    run = backend.compile(program, ("x", "rest"), ("h", "weights", "ids", "x"), "x")
    h, weights, ids, _ = (backend.read(a) for a in run(put(backend, x), rest))
    rows = oracle.norm(x.astype(np.float64), scale.astype(np.float64), 1e-6) if normed else x.astype(np.float64)
    np.testing.assert_allclose(h, rows, rtol=0, atol=tolerance("float32", "op"))
    assert (ids[8] == 12).all()
    for t, row in enumerate(rows[:8] @ router.astype(np.float64).T):
        want = oracle.chosen(routing, row, 0)
        assert ids[t].tolist() == [expert for expert, _ in want]
        np.testing.assert_allclose(weights[t], [w for _, w in want], rtol=0, atol=tolerance("float32", "op"))


@each_backend
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_route_equals_float64(name, routing, biased):
    rng, routing = np.random.default_rng(2), ROUTINGS[routing]
    logits = rng.standard_normal((40, 12)).astype(np.float32)
    bias = rng.uniform(-0.2, 0.2, 12).astype(np.float32) if biased else None
    backend = get_backend(name)
    real = np.arange(40) < 37
    placed = None if bias is None else put(backend, bias), put(backend, real)

    def program(logits, rest, *, ops):
        return *ops.route(moe.route, logits, routing, *rest), logits

    run = backend.compile(program, ("logits", "rest"), ("weights", "ids", "logits"), "logits")
    weights, ids, _ = (backend.read(a) for a in run(put(backend, logits), placed))
    assert (ids[37:] == 12).all()
    for t, row in enumerate(logits[:37].astype(np.float64)):
        want = oracle.chosen(routing, row, 0 if bias is None else bias)
        assert ids[t].tolist() == [expert for expert, _ in want]
        np.testing.assert_allclose(weights[t], [w for _, w in want], rtol=0, atol=tolerance("float32", "op"))
