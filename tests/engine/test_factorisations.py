"""Tensor and expert parallelism over 1 to 8 devices: the tokens and logits of one, whatever else goes on."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax  # noqa: F401
import pytest
import tiny
import torch  # noqa: F401
from planned import assert_planned
from tiny import EIGHT_HEADS, PROMPTS
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.models import qwen3_moe
from octavo.models.interface import Mixture, ModelSpec, Routing

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=11, n=2, max_tokens=24)
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=4)
PP = {"pipeline_parallel_size": 2}
EP, TURNS = {"enable_expert_parallel": True}, {"expert_placement_strategy": "round_robin"}


@functools.cache
def model(name: str) -> ModelSpec:
    """8 kv heads; dense, or with 8 experts in both layers, or with 6, which 4 devices share unevenly."""
    if name == "dense":
        return tiny.spec_of(EIGHT_HEADS)
    return qwen3_moe.spec(EIGHT_HEADS, Mixture({"moe": 8, "six": 6}[name], 24, (0, 1), Routing(2, normalise=True)))


@functools.cache
def arrays(name: str) -> Any:
    return tiny.weights_of(model(name))


def make(name: str, backend: str, **more: Any) -> LLM:
    """Chunks of 16 tokens, and room for so little that somebody is preempted; steps overlap."""
    threads = {"threads": 1} if backend == "torch" else {}
    return LLM(
        model(name), weights=arrays(name), backend=backend, block_size=8, max_num_seqs=4, max_num_batched_tokens=16,
        num_gpu_blocks_override=14, max_model_len=104, logprobs_mode="raw_logits", state_check_interval=8,
        **threads, **more,
    )  # fmt: skip


def run(llm: LLM) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Ids of all outputs, and the four largest logits behind each greedy token."""
    ids, logits = [], []
    for _ in range(2):
        outputs = llm.generate(PROMPTS[:5], GREEDY, use_tqdm=False)
        ids += [list(o.outputs[0].token_ids) for o in outputs]
        logits += [{i: x.logprob for i, x in at.items()} for o in outputs for at in o.outputs[0].logprobs or ()]
    assert any(o.num_cached_tokens for o in outputs)
    # with four replicas there is room for all
    assert any(r.scheduler.num_preemptions for r in llm.replicas) or len(llm.replicas) > 2
    for o in llm.generate(PROMPTS[3:5], replace(SAMPLED), use_tqdm=False):
        ids += [list(sample.token_ids) for sample in o.outputs]
    return ids, logits


@functools.cache
def wanted(name: str, backend: str) -> tuple[list[list[int]], list[dict[int, float]]]:
    return run(make(name, backend))


def check(name: str, backend: str, size: int, more: dict[str, Any]) -> None:
    llm = make(name, backend, tensor_parallel_size=size, **more)
    ids, logits = run(llm)
    want_ids, want_logits = wanted(name, backend)
    assert ids == want_ids
    worst = max(abs(a[i] - b[i]) for a, b in zip(logits, want_logits, strict=True) for i in a.keys() & b.keys())
    print(f"{name} on {backend}, tp {size} {more}: the largest difference of a logit is {worst:.1e}")
    assert worst < tolerance("float32", "logits")
    assert_planned(llm)
    llm.shutdown()


def ids_of(case: Any) -> str:
    return str(case) if not isinstance(case, dict) else "+".join(map(str, case.values())) or "tp"


def test_experts_shared_out_over_two_devices() -> None:
    check("moe", "jax", 2, EP)


def test_two_stages() -> None:
    check("dense", "jax", 1, PP)


DP = {"data_parallel_size": 2}
# experts over tp x dp, on 2, 4 and 8 devices
JOINT = [
    ("moe", 1, EP | {"data_parallel_size": 2}),
    ("moe", 1, EP | {"data_parallel_size": 4}),
    ("six", 2, EP | TURNS | {"data_parallel_size": 2}),
]
LARGE_JOINT = [
    ("six", 4, EP | {"data_parallel_size": 2}),
    ("moe", 2, EP | TURNS | {"data_parallel_size": 4}),
]
CASES = [
    ("dense", 4, {}),
    ("dense", 4, PP | {"enable_sp": True}),
    ("dense", 2, PP | {"data_parallel_size": 2}),
    ("moe", 2, PP),
    ("moe", 4, PP | EP | TURNS),
    ("moe", 8, {}),
    ("moe", 4, EP),
    ("moe", 8, EP),
    ("moe", 4, EP | TURNS),
    ("six", 4, EP | TURNS),
    *JOINT,
    *LARGE_JOINT,
    ("dense", 2, DP),
    ("dense", 1, DP | {"data_parallel_size": 4}),
]
TORCH = [
    ("dense", 4, {}),
    ("dense", 2, PP | {"enable_sp": True}),
    ("moe", 1, PP),
    ("moe", 2, EP | PP),
    ("moe", 2, EP),
    ("moe", 4, EP | TURNS),
    ("six", 4, EP),
    *JOINT,
    ("dense", 2, DP),
    ("dense", 1, DP | {"data_parallel_size": 4}),
    ("moe", 1, DP | {"data_parallel_routing": "prefix"}),
    ("dense", 1, DP | PP),
    ("moe", 1, EP | DP | PP),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "more"), CASES, ids=ids_of)
def test_virtual_devices_give_the_tokens_of_one(name: str, size: int, more: dict[str, Any]) -> None:
    check(name, "jax", size, more)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "more"), TORCH, ids=ids_of)
def test_gloo_processes_give_the_tokens_of_one(name: str, size: int, more: dict[str, Any]) -> None:
    check(name, "torch", size, more)


def test_a_model_without_experts_has_none_to_share() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel: the model 'llama' has no experts"):
        make("dense", "jax", **EP)
