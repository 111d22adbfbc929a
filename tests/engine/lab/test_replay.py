"""A logged run comes out the same in every bit, and what was altered in the log is found at its step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backends import BACKENDS
from embedded import embedded_model
from tiny import PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams
from octavo.engine.lab.replaying import replay

OF_TINY: dict[str, Any] = {"model": spec_of(TINY), "weights": numpy_weights(TINY)}


@pytest.fixture(scope="module", params=BACKENDS)
def log_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions, prefix hits and forks."""
    path = tmp_path_factory.mktemp("log") / "steps.jsonl"
    llm = engine(backend=request.param, num_gpu_blocks_override=15, max_model_len=104, step_log=str(path))
    tokens(llm, PROMPTS[:7], RANDOM)
    tokens(llm, [PROMPTS[3]], replace(RANDOM, n=3))
    assert llm.scheduler.num_preemptions and llm.scheduler.num_hit_tokens
    return path


def test_a_run_replays_bit_for_bit(log_path):
    found = replay(log_path, **OF_TINY)
    assert found.ok and found.difference is None and found.changes == []
    assert found.num_steps > 100 and found.num_tokens == 240


def test_other_weights_are_named_and_seen(log_path):
    found = replay(log_path, model=spec_of(TINY), weights=numpy_weights(TINY, 1), to=3)
    assert not found.ok and found.difference is not None and found.difference.step == 0
    assert any(change.startswith("weights_crc32") for change in found.changes)


def _altered(path: Path, target: Path, step: int, kind: str) -> None:
    """A copy in which the first token (or digest) that was read of a step is another."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in lines if line.get("read") == step)
    line[kind][0] ^= 1
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("kind", "what"), [("tokens", "tokens"), ("digests", "logits")])
def test_an_altered_entry_is_found_at_its_step(log_path, tmp_path, kind, what):
    _altered(log_path, tmp_path / "altered", 21, kind)
    found = replay(tmp_path / "altered", to=21, **OF_TINY)
    assert not found.ok and found.difference is not None
    assert (found.difference.step, found.difference.what) == (21, what)


@pytest.mark.skipif(len(BACKENDS) < 2, reason="there is no other backend")
def test_the_other_backend_stays_within_tolerance(log_path):
    header = json.loads(log_path.read_text().splitlines()[0])["header"]
    (other,) = {"jax", "torch"} - {header["backend"]}
    found = replay(log_path, on=other, to=24, **OF_TINY)
    assert found.ok and found.max_error is not None and 0 < found.max_error < 1e-4
    assert found.num_tokens > 50


@pytest.mark.skipif(len(BACKENDS) < 2, reason="there is no other backend")
@pytest.mark.parametrize("factor", [1.01, -1.0])
def test_the_other_backend_with_other_weights_does_not(log_path, monkeypatch, factor):
    """The logged backend gets the logged weights, the other one some that are off; it says where."""
    from octavo.engine.lab import replaying as module

    header = json.loads(log_path.read_text().splitlines()[0])["header"]
    (other,) = {"jax", "torch"} - {header["backend"]}
    built = module.build

    def build(config: Any, weights: Any) -> Any:
        if config.backend == other:
            weights = weights | {"final_norm": weights["final_norm"] * factor}
        return built(config, weights)

    monkeypatch.setattr(module, "build", build)
    found = replay(log_path, on=other, to=2, **OF_TINY)
    assert not found.ok
    if factor < 0:
        assert (found.difference.step, found.difference.what) == (0, "tokens"), found


def test_a_spec_must_be_given(log_path):
    with pytest.raises(ValueError, match="made from a ModelSpec"):
        replay(log_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_replays_in_a_new_process(backend, tmp_path):
    """With preemption, prefix hits and n = 3, through the command line."""
    path = tmp_path / "steps.jsonl"
    limits = {"max_num_seqs": 4, "max_model_len": 128, "num_gpu_blocks_override": 11}
    llm = LLM(embedded_model(), backend=backend, step_log=str(path), **limits)
    story = "Once upon a time there was a small printer who folded a sheet of paper into pages. " * 3
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    prompts = [story + word for word in ("He", "She", "It", "They", "We")]
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(story, params.clone(n=3), use_tqdm=False)
    assert llm.scheduler.num_preemptions and llm.scheduler.num_hit_tokens
    command = [sys.executable, "-m", "octavo.engine.cli", "replay", str(path), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["ok"] and found["changes"] == [] and found["num_tokens"] > 100
    _altered(path, tmp_path / "altered", 30, "tokens")
    run = subprocess.run([*command[:-2], str(tmp_path / "altered")], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and run.stdout.startswith("first difference: step 30 ")
