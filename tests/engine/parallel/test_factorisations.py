"""Every way to share a model out over 1 to 8 devices: the tokens and logits of one, whatever else goes on.

TP x PP x DP, and experts over TP x DP or not, of a dense and a MoE model: on 2, 4 and 8 devices (JAX), on 2 and 4
gloo processes (torch).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import torch  # noqa: F401
from planned import assert_planned
from tiny import EIGHT_HEADS
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.models import qwen3_moe
from octavo.models.interface import Mixture, ModelSpec, Routing

_rng = np.random.default_rng(11)
SHARED = _rng.integers(0, 97, 19).tolist()
PROMPTS = [[1, 5, 9, 2], SHARED + [3, 4], _rng.integers(0, 97, 37).tolist(), SHARED + [8]]
SAMPLED = SamplingParams(temperature=0.9, seed=11, n=2, max_tokens=6)
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=4)
EP, TURNS = {"enable_expert_parallel": True}, {"expert_placement_strategy": "round_robin"}
NAMES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SIZES = {"jax": (2, 4, 8), "torch": (2, 4)}


@functools.cache
def model(name: str, num_layers: int = 2) -> ModelSpec:
    """8 kv heads; dense, or with 8 experts in all layers, or with 6, which 4 devices share unevenly."""
    config = replace(EIGHT_HEADS, num_layers=num_layers, windows=(None, 8) * (num_layers // 2))
    if name == "dense":
        return tiny.spec_of(config)
    mixture = Mixture({"moe": 8, "six": 6}[name], 24, tuple(range(num_layers)), Routing(2, normalise=True))
    return qwen3_moe.spec(config, mixture)


@functools.cache
def arrays(name: str, num_layers: int = 2) -> Any:
    return tiny.weights_of(model(name, num_layers))


def make(name: str, backend: str, num_layers: int = 2, **more: Any) -> LLM:
    """Chunks of 16 tokens, and room for so little that somebody is preempted; steps overlap. Few sizes of programs."""
    threads = {"threads": 1} if backend == "torch" else {}
    return LLM(
        model(name, num_layers), weights=arrays(name, num_layers), backend=backend, block_size=8, max_num_seqs=2,
        max_num_batched_tokens=16, num_gpu_blocks_override=9, max_model_len=64, logprobs_mode="raw_logits",
        state_check_interval=8, **threads, **more,
    )  # fmt: skip


def run(llm: LLM) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Ids of all outputs, and the four largest logits behind each greedy token."""
    ids, logits = [], []
    # the second time over what is cached
    for prompts in (PROMPTS, PROMPTS[1:2]):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        ids += [list(o.outputs[0].token_ids) for o in outputs]
        logits += [{i: x.logprob for i, x in at.items()} for o in outputs for at in o.outputs[0].logprobs or ()]
    if len(llm.replicas) == 1:
        # with several there may be room for all, and nobody with the same prompt
        assert llm.scheduler.num_hit_tokens and llm.scheduler.num_preemptions
    for o in llm.generate(PROMPTS[1:2], SAMPLED, use_tqdm=False):
        ids += [list(sample.token_ids) for sample in o.outputs]
    return ids, logits


@functools.cache
def wanted(name: str, backend: str, num_layers: int) -> tuple[list[list[int]], list[dict[int, float]]]:
    return run(make(name, backend, num_layers))


def check(name: str, backend: str, more: dict[str, Any]) -> None:
    num_stages = more.get("pipeline_parallel_size", 1)
    # each of them needs a layer
    num_layers = max(2, num_stages)
    llm = make(name, backend, num_layers, **more)
    ids, logits = run(llm)
    want_ids, want_logits = wanted(name, backend, num_layers)
    assert ids == want_ids
    worst = max(abs(a[i] - b[i]) for a, b in zip(logits, want_logits, strict=True) for i in a.keys() & b.keys())
    print(f"{name} on {backend}, {more}: the largest difference of a logit is {worst:.1e}")
    assert worst < tolerance("float32", "logits")
    assert_planned(llm)
    llm.shutdown()


def factorisations(backend: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, engine arguments) of each, none left out."""
    for size in SIZES[backend]:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        for sizes in itertools.product(divisors, repeat=3):
            if math.prod(sizes) != size:
                continue
            more = {name: n for name, n in zip(NAMES, sizes, strict=True) if n > 1}
            yield "dense", more
            yield "moe", more
            if set(more) != {"pipeline_parallel_size"}:
                yield "moe", more | EP


TP2, DP2 = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
SP = {"enable_sp": True}
# and experts that do not divide, or are dealt in turn; rows by tokens; another routing
OTHERS = [
    ("six", {"tensor_parallel_size": 4} | EP | TURNS),
    ("six", TP2 | DP2 | EP),
    ("moe", TP2 | DP2 | EP | TURNS),
    ("dense", {"tensor_parallel_size": 4} | SP),
    ("moe", TP2 | DP2 | EP | SP),
]
TORCH = [("dense", TP2 | {"pipeline_parallel_size": 2} | SP), ("moe", DP2 | {"data_parallel_routing": "prefix"})]
# the others are slow
FAST = {"jax": [("moe", TP2 | EP), ("dense", {"pipeline_parallel_size": 2})], "torch": []}
SHORT = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}


def cases(backend: str) -> list[Any]:
    every = [*factorisations(backend), *OTHERS, *(TORCH if backend == "torch" else ())]
    return [
        pytest.param(name, more, id=id_of(name, more), marks=[pytest.mark.slow] * ((name, more) not in FAST[backend]))
        for name, more in every
    ]


def id_of(name: str, more: dict[str, Any]) -> str:
    parts = (f"{SHORT[n]}{x}" if n in SHORT else n if x is True else str(x) for n, x in more.items())
    return "-".join([name, *parts]).replace("enable_expert_parallel", "ep").replace("enable_", "")


@pytest.fixture
def hasty() -> Iterator[None]:
    """XLA compiles with little thought: most of these tests' time goes there."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("name", "more"), cases("jax"))
def test_virtual_devices_give_the_tokens_of_one(name: str, more: dict[str, Any]) -> None:
    check(name, "jax", more)


@pytest.mark.parametrize(("name", "more"), cases("torch"))
def test_gloo_processes_give_the_tokens_of_one(name: str, more: dict[str, Any]) -> None:
    check(name, "torch", more)


def test_the_list_holds_every_product() -> None:
    """Of n = 2^k there are (k + 1)(k + 2) / 2 ways to be a product of three, and one of them is stages alone."""
    each = {n: (k + 1) * (k + 2) // 2 for k, n in enumerate((1, 2, 4, 8))}
    for backend, sizes in SIZES.items():
        found = list(factorisations(backend))
        assert len(found) == sum(3 * each[n] - 1 for n in sizes)
        assert len({id_of(*case) for case in found}) == len(found)


def test_a_model_without_experts_has_none_to_share() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel: the model 'llama' has no experts"):
        make("dense", "jax", **EP)
