"""A model run stage after stage makes what the whole model makes, and a stage holds its part alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import tiny_moe
from backends import BACKENDS
from model_harness import cache_with, place, random_weights, step_input
from tolerances import tolerance

from octavo.engine.backend import get_backend
from octavo.models import step
from octavo.models.interface import Array, CacheState, ModelSpec, StepInput, leaves
from octavo.models.layouts.paged import TokenMajor
from octavo.models.prompt_embeds import with_prompt_embeds
from octavo.models.stage import stage_of, stage_tree, with_rows_from_before

IDS = np.random.default_rng(3).integers(0, tiny.VOCAB, 60).tolist()
TIED = replace(tiny.TINY, tied=True, windows=(None, None, 8, 8))
MODELS = {
    "untied": tiny.spec_of(tiny.TINY),
    # a stage of one layer then has no layer of one of the groups
    "tied": tiny.spec_of(TIED),
    "moe": tiny_moe.spec(),
    "embeds": with_prompt_embeds(tiny.spec_of(tiny.TINY)),
}
CUTS = {"untied": (0, 3, 4), "tied": (0, 1, 2, 4), "moe": (0, 2, 4), "embeds": (0, 2, 4)}
LAYOUT = TokenMajor()


def run(model: ModelSpec, weights: Any, backend: Any, inputs: StepInput) -> tuple[np.ndarray, dict[str, Any]]:
    """The rows of all tokens behind a stage, and what is tapped."""

    def program(w: dict, cache: CacheState, inputs: StepInput, *, ops: Any) -> tuple[dict[str, Array], CacheState]:
        return step.forward_stage(w, cache, inputs, ops=ops, model=model, layout=LAYOUT)

    cache, _ = cache_with(model, LAYOUT, backend, IDS)
    compiled = backend.compile(program, ("weights", "cache", "inputs"), ("rows", "cache"), consumes="cache")
    rows, cache = compiled(place(model, weights, backend), cache, inputs)
    assert backend.read(cache.rows["num_computed"])[0] == len(IDS)
    found = backend.read_tree(rows)
    return found.pop("last"), found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CUTS)
def test_stages_one_after_another_make_the_rows_of_the_whole_model(backend: str, name: str) -> None:
    model, library, cuts = MODELS[name], get_backend(backend), CUTS[name]
    weights = random_weights(model, scale=0.1)
    _, tables = cache_with(model, LAYOUT, library, IDS)
    inputs = replace(step_input(tables, len(IDS)), taps=("embed", "layer.?", "layer.*.experts"))
    want, want_tapped = run(model, weights, library, inputs)
    tapped: dict[str, Any] = {}
    rows: Any = None
    stages = [range(*pair) for pair in pairwise(cuts)]
    for layers in stages:
        stage = stage_of(model, layers)
        given = inputs if rows is None else with_rows_from_before(inputs, library.own(rows))
        rows, found = run(stage, stage_tree(model, layers, weights), library, given)
        assert not found.keys() & tapped.keys()
        tapped |= found
    np.testing.assert_allclose(rows, want, rtol=0, atol=tolerance("float32", "op"))
    assert list(tapped) == list(want_tapped) and "layer.3" in tapped
    for key, x in tapped.items():
        np.testing.assert_allclose(x, want_tapped[key], rtol=0, atol=tolerance("float32", "op"))
    last = stages[-1]
    logits = unembedded(stage_of(model, last), stage_tree(model, last, weights), library, rows)
    np.testing.assert_allclose(logits, oracle.logits(model, weights, IDS), rtol=0, atol=tolerance("float32", "logits"))


def unembedded(model: ModelSpec, weights: Any, backend: Any, rows: np.ndarray) -> np.ndarray:
    def program(w: dict, x: Array, *, ops: Any) -> tuple[Array, Array]:
        return model.unembed(w, x, ops), x

    compiled = backend.compile(program, ("weights", "hidden"), ("logits", "hidden"), consumes="hidden")
    return backend.read(compiled(place(model, weights, backend), backend.own(rows))[0])


@pytest.mark.parametrize("name", ["tied", "moe"])
def test_stages_share_the_weights_out(name: str) -> None:
    model = MODELS[name]
    stages = [stage_of(model, range(n, n + 1)) for n in range(4)]
    held = sum(len(leaves(stage.weights)) for stage in stages)
    # every stage has the frequencies, and a tied table is at both ends
    assert held == len(leaves(model.weights)) + 3 * len(leaves(model.weights["ropes"])) + (name == "tied")
    assert [s.weights["layers"] for s in stages] == [[layer] for layer in model.weights["layers"]]
    assert [set(s.weights) - {"layers", "ropes"} for s in stages[1:3]] == [set(), set()]
    assert "final_norm" in stages[3].weights and "embed" in stages[0].weights
    assert ("embed" in stages[3].weights) == (name == "tied")
    if model.mixture:
        assert [s.mixture.layers if s.mixture else () for s in stages] == [(0,), (), (2,), (3,)]


@pytest.mark.parametrize("layers", [range(0), range(2, 5), range(0, 4, 2)])
def test_layers_that_are_no_stage_are_refused(layers: range) -> None:
    with pytest.raises(ValueError, match="are no stage of a whole model of 4 layers"):
        stage_of(MODELS["tied"], layers)


def test_a_stage_has_no_stages() -> None:
    stage = stage_of(MODELS["tied"], range(1, 4))
    with pytest.raises(ValueError, match="are no stage of a whole model"):
        stage_of(stage, range(2))


def test_the_whole_is_the_model_itself() -> None:
    assert stage_of(MODELS["moe"], range(4)) is MODELS["moe"]
