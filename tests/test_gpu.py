"""The engine on a CUDA device, where there is one: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from backends import BACKENDS
from oracle import greedy
from tiny import GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_the_oracles(backend: str, layout: str) -> None:
    """In fp32, with preemptions and hits."""
    arguments: dict[str, Any] = {"num_gpu_blocks_override": 15, "max_model_len": 104, "layout": layout}
    llm = engine(backend=backend, device="cuda", dtype="float32", **arguments)
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:6]]
    assert tokens(llm, PROMPTS[:6], GREEDY) == want
    assert tokens(llm, PROMPTS[:6], GREEDY) == want
    assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_are_those_of_a_cpu(backend: str) -> None:
    """The noise is a hash, so a seed means the same everywhere."""
    params = replace(RANDOM, n=2, max_tokens=8)
    on_gpu = engine(backend=backend, device="cuda", dtype="float32").generate(PROMPTS[:3], params, use_tqdm=False)
    want = [engine(backend="torch", device="cpu").generate(p, params, use_tqdm=False)[0] for p in PROMPTS[:3]]
    for a, b in zip(on_gpu, want, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_runs(backend: str, dtype: str) -> None:
    llm = engine(backend=backend, device="cuda", dtype=dtype)
    assert [len(t) for t in tokens(llm, PROMPTS[:4], GREEDY)] == [GREEDY.max_tokens] * 4
