"""What a running engine compiles, keeps where it is, and can do again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM
from octavo.engine.step_log import read_log


def random_trace(llm: LLM, steps: int, seed: int = 0) -> None:
    """Arrivals of all kinds, aborts and forks, for so many steps."""
    rng, count = random.Random(seed), 0
    for _ in range(steps):
        if rng.random() < 0.4:
            plain = replace(RANDOM, top_k=0, top_p=1.0, min_p=0.0)
            kind = rng.choice([GREEDY, RANDOM, replace(RANDOM, n=2), replace(GREEDY, logprobs=3), plain])
            kind = replace(kind, max_tokens=rng.randrange(1, 20), min_tokens=rng.choice([0, 1]))
            kind = replace(kind, stop_token_ids=(rng.randrange(VOCAB),))
            prompt = rng.choice(PROMPTS)[: rng.randrange(1, 60)] + [rng.randrange(VOCAB)]
            llm.add_request(f"r{count}", prompt, kind)
            count += 1
        if count and rng.random() < 0.05:
            llm.abort(f"r{rng.randrange(count)}")
        llm.step()
    assert count > steps // 4


@pytest.mark.skipif("jax" not in BACKENDS, reason="torch compiles nothing")
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "synchronous"])
def test_nothing_is_compiled_after_warm_up(overlap: bool) -> None:
    llm = engine(backend="jax", warmup="all", num_gpu_blocks_override=40, async_scheduling=overlap)
    tokens(llm, PROMPTS[:1])
    before = llm.backend.num_compiles()
    random_trace(llm, 300)
    assert llm.backend.num_compiles() == before


@pytest.mark.skipif("torch" not in BACKENDS, reason="addresses are torch's")
def test_inputs_and_cache_keep_their_addresses() -> None:
    """Of a hundred steps of one bucket on torch: what CUDA graphs will need."""
    llm = engine(backend="torch", block_size=16)  # one width of block tables: 8
    seen: list[list[int]] = []
    forward = llm.runner.forward

    import torch

    from octavo.engine import backend_torch
    from octavo.models import step

    run_layers = step.run_layers

    def spy(weights: Any, cache: Any, inputs: Any, **more: Any) -> Any:
        if inputs.decode:
            found: list[int] = []

            def note(x: Any) -> None:
                if isinstance(x, torch.Tensor):
                    found.append(x.data_ptr())

            backend_torch.map_arrays(note, (cache, inputs))
            seen.append(found)
        return run_layers(weights, cache, inputs, **more)

    step.run_layers = spy
    try:
        tokens(llm, [PROMPTS[0], PROMPTS[1]], replace(GREEDY, max_tokens=102))
    finally:
        step.run_layers = run_layers
    assert llm.runner.forward is forward
    assert len(seen) >= 100 and all(s == seen[0] for s in seen[:100])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_old_cache_raises_when_touched(backend: str) -> None:
    llm = engine(backend=backend)
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()
    old = llm.runner.cache
    llm.step()
    for x in (old.groups[0][0]["k"], old.groups[1][1]["v"], old.rows["tokens"], old.rows["num_computed"]):
        with pytest.raises(RuntimeError):
            np.asarray(x + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_log_replays_to_equal_tokens_and_logits(backend: str, tmp_path: Path) -> None:
    """With preemptions, hits and forks; the digests are of all fp32 logits of the sampled rows."""
    path = tmp_path / "steps.jsonl"
    options = {"backend": backend, "num_gpu_blocks_override": 14, "max_model_len": 104, "step_log": str(path)}
    llm = engine(**options)
    tokens(llm, PROMPTS[:7], RANDOM)
    tokens(llm, [PROMPTS[3]], replace(RANDOM, n=3))
    assert llm.scheduler.num_preemptions > 0
    header, entries = read_log(path)
    assert header["backend"] == backend and len(entries) > 40
    assert any(e.plan.transfers for e in entries)
    fresh = engine(**(options | {"step_log": str(tmp_path / "other.jsonl")}))
    for entry in entries:
        result = fresh.runner.launch(entry.plan).result()
        assert result.token_ids == entry.token_ids and (result.digests or []) == (entry.digests or [])
    assert sum(len(e.digests or []) for e in entries) > 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_log_tells_other_weights_apart(backend: str, tmp_path: Path) -> None:
    """By a hash in its header, equal for equal weights."""

    def header(seed: int) -> dict[str, Any]:
        path = str(tmp_path / "steps.jsonl")
        LLM(spec_of(TINY), weights=numpy_weights(TINY, seed), backend=backend, step_log=path)
        return read_log(path)[0]

    assert header(0) == header(0)
    assert header(0)["weights_crc32"] != header(1)["weights_crc32"]


@pytest.mark.skipif("jax" not in BACKENDS, reason="eager is all there is in torch")
def test_enforce_eager_gives_the_same_tokens() -> None:
    # each shape of an operation is compiled
    few = PROMPTS[:2], replace(GREEDY, max_tokens=3)
    want = tokens(engine(backend="jax"), *few)
    assert tokens(engine(backend="jax", enforce_eager=True, warmup="all"), *few) == want
