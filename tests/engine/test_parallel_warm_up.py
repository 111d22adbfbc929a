"""Several devices: nothing is compiled once the warm-up is over, whatever requests ask for."""

from __future__ import annotations

from typing import Any

import jax  # noqa: F401
import pytest
import tiny
import tiny_moe
from tiny import EIGHT_HEADS, PROMPTS

from octavo.engine import LLM, SamplingParams

EP, SP = {"enable_expert_parallel": True}, {"enable_sp": True}
CASES: dict[str, dict[str, Any]] = {
    "tp": {},
    "ep": {"experts": True} | EP,
    "ep-sp-counted": {"experts": True, "expert_load_metrics": True, "disable_log_stats": False} | EP | SP,
    "tp-returned": {"experts": True, "enable_return_routed_experts": True},
    "stages-counted-returned": {
        "experts": True,
        "expert_load_metrics": True,
        "disable_log_stats": False,
        "enable_return_routed_experts": True,
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 1,
    },
    "replicas": EP
    | {"experts": True, "data_parallel_size": 2, "tensor_parallel_size": 1, "num_gpu_blocks_override": 9},
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0, max_tokens=9, presence_penalty=0.5, prompt_logprobs=1),
]


def engine(experts: bool = False, **more: Any) -> LLM:
    """Few programs: steps of 2 or 32 tokens, one width of block tables."""
    make = tiny_moe.engine if experts else lambda **a: tiny.engine(EIGHT_HEADS, **a)
    arguments = {
        "tensor_parallel_size": 2,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_gpu_blocks_override": 13,
    }
    return make(backend="jax", warmup="all", **(arguments | more))


def num_compiles(llm: LLM) -> int:
    return sum(stage.backend.num_compiles() for stage in llm.runner.stages)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_warm_engine_compiles_nothing(case: str) -> None:
    """With chunks, hits, forks and preemptions."""
    llm = engine(**CASES[case])
    before, num_cached = num_compiles(llm), 0
    prompts = [p for p in PROMPTS if len(p) < 50][:6]
    for params in PARAMS:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_cached += sum(o.num_cached_tokens or 0 for o in outputs)
    assert num_compiles(llm) == before
    assert num_cached > 0 and sum(r.scheduler.num_preemptions for r in llm.replicas) > 0
    llm.shutdown()
