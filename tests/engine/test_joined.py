"""Decode steps that are one program with their head: the same tokens, and no forward of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from backends import BACKENDS
from oracle import greedy
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine.backend_jax import JaxBackend
from octavo.engine.saved_jax import Held

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="JAX joins them")


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for kernels that write in place, and up to 2 sequences."""
    made = JaxBackend.__init__

    def init(self: JaxBackend, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.lean, self.loads_late, self.joined_seqs = True, True, 2

    monkeypatch.setattr(JaxBackend, "__init__", init)


def counted(llm: Any, name: str) -> list[Any]:
    """The steps that the runner's program of that name is called with from now on."""
    steps, program = [], getattr(llm.runner, name)

    def call(*args: Any) -> Any:
        steps.append(args[2])
        return program(*args)

    setattr(llm.runner, name, call)
    return steps


def test_greedy_tokens_are_the_oracles(joining: None) -> None:
    llm = engine(backend="jax")
    assert llm.runner.shapes.joined == (1, 2)
    joined, alone = counted(llm, "forward_and_head"), counted(llm, "forward")
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:5]]
    assert tokens(llm, PROMPTS[:5], GREEDY) == want
    assert tokens(llm, PROMPTS[:2], GREEDY) == want[:2]
    assert {len(step.rows_S) for step in joined} == {1, 2}
    # four at a time are too many
    assert {len(step.rows_S) for step in alone} == {4}


def test_samples_are_those_of_two_programs(joining: None) -> None:
    plain = replace(RANDOM, top_k=0, top_p=1.0, min_p=0.0)
    joined = engine(backend="jax")
    steps = counted(joined, "forward_and_head")
    found = tokens(joined, PROMPTS[:2], plain)
    assert len(steps) > 20
    joined.runner.shapes = replace(joined.runner.shapes, joined=())
    assert tokens(joined, PROMPTS[:2], plain) == found


def test_what_the_joined_head_does_not_have_takes_the_other_way(joining: None) -> None:
    llm = engine(backend="jax")
    steps = counted(llm, "forward_and_head")
    for params in (replace(GREEDY, logprobs=1), replace(RANDOM), replace(GREEDY, allowed_token_ids=[3, 4, 5])):
        tokens(llm, PROMPTS[:2], params)
    assert not steps
    tokens(llm, PROMPTS[:1], GREEDY)
    assert steps


def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, Any]]:
    """How often each program runs from now on, of those that are compiled from now on."""
    found: Counter[tuple[int, Any]] = Counter()
    keep = Held._keep

    def kept(self: Held, kind: Any, compiled: Any, notes: Any) -> None:
        keep(self, kind, compiled, notes)
        run = self.ready[kind]

        def counted(args: tuple) -> Any:
            found[id(self), kind] += 1
            return run(args)

        self.ready[kind] = counted

    monkeypatch.setattr(Held, "_keep", kept)
    return found


def test_what_most_requests_want_has_run_before(joining: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled steps, alone and two at a time; and what was run on padding leaves no trace."""
    found = runs(monkeypatch)
    llm = engine(EIGHT_HEADS, backend="jax", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=40)
    llm.runner.first_runs()
    before = set(found)
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in PROMPTS[:2]]
    assert tokens(llm, PROMPTS[:2], GREEDY) == want
    assert tokens(llm, PROMPTS[:2], RANDOM) == tokens(llm, PROMPTS[:2], RANDOM)
    tokens(llm, PROMPTS[:1], replace(RANDOM, top_k=0, top_p=1.0, min_p=0.0))
    assert set(found) == before


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_whatever_the_numbers(joining: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences come and go, and block tables grow. Nor does it run anything for the first time."""
    found = runs(monkeypatch)
    llm = engine(backend="jax", warmup="all", max_num_seqs=4)
    compiles, before = llm.backend.num_compiles(), set(found)
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:5]]
    assert tokens(llm, PROMPTS[:5], GREEDY) == want
    assert tokens(llm, PROMPTS[1:2], GREEDY) == want[1:2]
    assert llm.backend.num_compiles() == compiles
    assert set(found) == before
