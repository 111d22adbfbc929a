"""enable_return_routed_experts: the experts of each token of an output, whatever happened to the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_moe
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, RANDOM
from tiny_moe import LAYERS, experts_of

from octavo.engine import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.models import qwen3_moe
from octavo.models.interface import Mixture, Routing

MOST = 104


def engine(**more: Any) -> LLM:
    """Chunks of 16 tokens, and so few blocks that somebody is preempted."""
    arguments = {"max_num_batched_tokens": 16, "max_model_len": MOST, "num_gpu_blocks_override": 1 + MOST // 8}
    return tiny_moe.engine(enable_return_routed_experts=True, **(arguments | more))


def assert_oracles(outputs: list[RequestOutput]) -> None:
    """Each token's experts are those of the float64 oracle on the whole sequence."""
    for o in outputs:
        for sample in o.outputs:
            assert sample.routed_experts is not None and sample.routed_experts.dtype == np.int16
            want = experts_of([*o.prompt_token_ids, *sample.token_ids][:-1])
            assert sample.routed_experts.transpose(1, 0, 2).tolist() == [want[n] for n in LAYERS]


def check(llm: LLM) -> None:
    """With chunks, hits and preemptions; then with forks."""
    for _ in range(2):
        outputs = llm.generate(PROMPTS[:5], GREEDY, use_tqdm=False)
        assert_oracles(outputs)
    assert any(o.num_cached_tokens for o in outputs)
    # one small batch at a time leaves room for all
    assert any(r.scheduler.num_preemptions for r in llm.replicas) or not llm.config.async_scheduling
    outputs = llm.generate(PROMPTS[2:4], replace(RANDOM, n=2), use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in outputs[0].outputs}) == 2
    assert_oracles(outputs)
    llm.shutdown()


SLOW_ON_JAX = [pytest.param(b, marks=[pytest.mark.slow] * (b == "jax")) for b in BACKENDS]


@pytest.mark.parametrize("backend", SLOW_ON_JAX)
def test_experts_come_through_chunks_hits_preemptions_and_forks(backend: str) -> None:
    check(engine(backend=backend))


TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}
EP = {"enable_expert_parallel": True}


@pytest.mark.parametrize("backend", SLOW_ON_JAX)
def test_experts_of_all_stages_in_the_order_of_layers(backend: str) -> None:
    check(engine(backend=backend, **PP))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_parallel_size": 4},
        PP | {"async_scheduling": False},
        PP | TP,
        PP | TP | EP | {"enable_sp": True},
        PP | DP,
    ],
    ids=["pp4", "read-at-once", "tp", "tp-ep-sp", "dp"],
)
def test_experts_of_stages_with_shards_and_replicas(backend: str, more: dict[str, Any]) -> None:
    check(engine(backend=backend, **more))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_of_stages_of_replicas_that_share_them(backend: str) -> None:
    check(engine(backend=backend, **PP, **DP, **EP))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_sp": True},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["ep-sp", "tp", "ep-dp"],
)
def test_experts_of_devices_that_share_a_model(backend: str, more: dict[str, Any]) -> None:
    llm = engine(backend=backend, **more)
    assert_oracles(llm.generate(PROMPTS[2:5], GREEDY, use_tqdm=False))
    llm.shutdown()


def test_what_ends_early_has_what_was_computed() -> None:
    """At a stop token, and at the first token; before the end there are none."""
    llm = engine(backend=BACKENDS[0], num_gpu_blocks_override=60)
    first = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stops = [SamplingParams(temperature=0, stop_token_ids=[first[5]]), SamplingParams(temperature=0, max_tokens=1)]
    assert_oracles(llm.generate([PROMPTS[0], PROMPTS[2]], stops, use_tqdm=False))
    llm.add_request("a", PROMPTS[2], GREEDY)
    while not (told := llm.step()):
        pass
    assert told[0].outputs[0].routed_experts is None
    while not told[0].finished:
        told = llm.step() or told
    assert_oracles(told)


def test_nobody_is_told_unasked() -> None:
    llm = tiny_moe.engine(backend=BACKENDS[0])
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].routed_experts is None


WINDOWS = Mixture(8, 24, (0, 2, 3), Routing(2, normalise=True))
REFUSED = {
    "dense": ({"model": tiny.spec_of(tiny.TINY)}, ValueError, "the model 'llama' has no experts"),
    "streaming": ({"layout": "streaming_llm"}, NotImplementedError, "every layer forgets tokens"),
    "windows": (
        {"model": qwen3_moe.spec(replace(tiny_moe.CONFIG, windows=(8,) * 4), WINDOWS)},
        NotImplementedError,
        "every layer forgets tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_told_is_refused(case: str) -> None:
    more, error, words = REFUSED[case]
    arguments: dict[str, Any] = {"model": tiny_moe.spec(), "load_format": "dummy", "backend": BACKENDS[0]} | more
    with pytest.raises(error, match=f"enable_return_routed_experts=True.*{words}"):
        LLM(**arguments, enable_return_routed_experts=True)
