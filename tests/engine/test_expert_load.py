"""Which experts tokens go through: on request, and as metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_moe
from backends import BACKENDS
from tiny import GREEDY, PROMPTS
from tiny_moe import LAYERS, experts_of

PP, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
EP = {"enable_expert_parallel": True}
STAGES = {
    "stages": PP,
    "four": {"pipeline_parallel_size": 4},
    "shards": PP | TP | EP | {"enable_sp": True},
}


def cases(fast: str) -> list[Any]:
    """(backend, arguments): of one device, and of stages. Fast ones are those of the backends named, and two stages."""
    one = [pytest.param(b, {}, id=b, marks=[pytest.mark.slow] * (b not in fast)) for b in BACKENDS]
    return one + [
        pytest.param(b, more, id=f"{b}-{name}", marks=[pytest.mark.slow] * ((b, name) != ("torch", "stages")))
        for b in BACKENDS
        for name, more in STAGES.items()
    ]


@pytest.mark.parametrize(("backend", "more"), cases("torch jax"))
def test_routed_experts_are_those_of_the_oracle(backend: str, more: dict[str, Any]) -> None:
    llm = tiny_moe.engine(backend=backend, max_num_batched_tokens=16, **more)
    prompts = PROMPTS[:3]
    for out, prompt in zip(llm.routed_experts(prompts, use_tqdm=False), prompts, strict=True):
        assert out.prompt_token_ids == prompt
        assert {n: ids.tolist() for n, ids in out.routed_experts.items()} == experts_of(prompt)
    llm.shutdown()


def test_a_model_without_experts_has_none_to_show() -> None:
    with pytest.raises(ValueError, match="the model 'llama' has no experts"):
        tiny.engine(backend=BACKENDS[0]).routed_experts(PROMPTS[:1])


@pytest.mark.parametrize(("backend", "more"), cases("torch"))
def test_metrics_count_every_token_of_every_expert_once(backend: str, more: dict[str, Any]) -> None:
    """Prompts and outputs alike; padding counts nowhere. The last token of an output goes through no layer."""
    # overlapped, one device runs a step too many behind an end
    several = "pipeline_parallel_size" in more
    llm = tiny_moe.engine(
        backend=backend, expert_load_metrics=True, disable_log_stats=False, async_scheduling=several, **more
    )
    assert [m.value for m in llm.get_metrics() if "expert" in m.name] == [0.0] * 8 + [1.0] * len(LAYERS)
    prompts = PROMPTS[:2]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    want: dict[int, Counter[int]] = {n: Counter() for n in LAYERS}
    for out, prompt in zip(outputs, prompts, strict=True):
        for n, rows in experts_of([*prompt, *out.outputs[0].token_ids][:-1]).items():
            want[n].update(expert for row in rows for expert in row)
    values = {(m.name, *m.labels.values()): m.value for m in llm.get_metrics() if "expert" in m.name}
    values = {(name, label[-1]): value for (name, *label), value in values.items()}
    for i in range(8):
        assert values["octavo:expert_tokens", str(i)] == sum(want[n][i] for n in LAYERS)
    for n in LAYERS:
        loads = [want[n][i] for i in range(8)]
        assert values["octavo:expert_balancedness", str(n)] == pytest.approx(np.mean(loads) / max(loads))
    llm.shutdown()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tiny.engine(expert_load_metrics=True, disable_log_stats=False), "the model has no experts"),
        (lambda: tiny_moe.engine(expert_load_metrics=True), "disable_log_stats=True keeps no metrics"),
    ],
)
def test_metrics_that_nobody_could_read_are_refused(make, why) -> None:
    with pytest.raises(ValueError, match=f"expert_load_metrics=True: {why}"):
        make()
