"""Processes that make a start's programs: the same as are made here, and what they do not make is made here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import pytest
from oracle import greedy
from tiny import GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import build
from octavo.engine.backend_jax import JaxBackend
from octavo.engine.compilers_jax import EACH, LEAST, Compilers, missing
from octavo.engine.saved_jax import LOADED

SMALL = {"backend": "jax", "warmup": "all", "max_model_len": 48, "max_num_seqs": 1, "max_num_batched_tokens": 32}


class Heard:
    """What JAX did in this process."""

    def __init__(self) -> None:
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, _, **kwargs: self.events.append(event))

    def since(self, at: int) -> tuple[int, int]:
        """How many programs were traced, and loaded."""
        new = self.events[at:]
        return new.count("/jax/core/compile/jaxpr_trace_duration"), new.count(LOADED)


HEARD = Heard()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with few cores. Code of the backend stays as it is: keys hold it."""
    backends_of = build.backends_of

    def backends(*args: Any) -> list[Any]:
        found = backends_of(*args)
        for backend in found:
            backend.processes = 2
        return found

    monkeypatch.setattr(build, "backends_of", backends)


@pytest.mark.slow
def test_what_they_make_is_found_and_runs(processes: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at = len(HEARD.events)
    with caplog.at_level(logging.WARNING, "octavo"):
        llm = engine(**SMALL, compile_cache_dir=str(tmp_path))
    assert not caplog.records
    # what is traced makes arrays
    traced, loaded = HEARD.since(at)
    assert loaded == len(list(llm.runner.every_call())) > LEAST and traced == len(llm.backend.made)
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:2]]
    assert tokens(llm, PROMPTS[:2], GREEDY) == want


@pytest.mark.slow
def test_one_whose_programs_would_be_others_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = engine(**SMALL | {"warmup": "lazy"}, compile_cache_dir=str(tmp_path))
    keys = missing(list(llm.runner.every_call()))
    assert llm.runner.recipe
    wrong = Compilers(llm.runner.recipe, llm.backend.options, dict.fromkeys(keys, "another"), 1)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert list(wrong.made()) == []
    assert f"{len(keys)} of {len(keys)} programs are others here" in caplog.text
    assert wrong.children[0].process.poll() is not None


def test_there_are_as_many_as_the_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = JaxBackend()
    assert backend.processes == backend._num_compilers() == 0
    backend.processes = 8
    monkeypatch.setattr(backend, "free_memory", lambda: 5 * EACH + 1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert backend._num_compilers() == 5
    # each would take three quarters
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert backend._num_compilers() == 0
