"""Replicas that share experts, below LLM: plans of several schedulers in one step, against one engine alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax  # noqa: F401
import pytest
import tiny_moe
import torch  # noqa: F401
from meshes import on_every_rank
from tiny import PROMPTS

from octavo.engine import SamplingParams
from octavo.engine.backend_torch import TorchBackend
from octavo.engine.build import _scheduler, build_device
from octavo.engine.config import engine_config
from octavo.engine.parallel.joint_batch import JointPlan
from octavo.engine.request import Request
from octavo.engine.runner import Pending
from octavo.engine.sampling_params import request_key
from octavo.sharding.mesh_torch import TorchMesh

# chunks of 16 tokens, and room for so little that somebody is preempted
SIZES: dict[str, Any] = {
    "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 14,
    "max_model_len": 104,
}  # fmt: skip


def device(backend: str, **more: Any) -> Any:
    config = engine_config(tiny_moe.spec(), backend=backend, enable_expert_parallel=True, **SIZES, **more)
    return build_device(config, tiny_moe.weights())


def rank_of(mesh: TorchMesh) -> Any:
    """A process's part of the same, here a thread's."""
    sizes = {"data_parallel_size": mesh.shape["dp"], "tensor_parallel_size": mesh.shape["tp"]}
    config = engine_config(tiny_moe.spec(), backend="torch", enable_expert_parallel=True, **SIZES, **sizes)
    backend = TorchBackend(threads=1, rules=config.rules, mesh=mesh)
    return build_device(config, tiny_moe.weights(), backend)


@functools.cache
def alone(backend: str, params: SamplingParams, names: tuple[int, ...]) -> list[list[int]]:
    llm = tiny_moe.engine(backend=backend, **SIZES)
    outputs = llm.generate([PROMPTS[i] for i in names], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def run(parts: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Tokens of prompts[i], each at the replica that is named."""
    given = parts.config, parts.memory_plan, parts.model, parts.own.shapes.full
    schedulers = [_scheduler(*given) for _ in range(parts.config.num_joint)]
    requests = [
        [
            Request(f"{n}-{i}", PROMPTS[i], params, request_key(params.seed or 0, 0), frozenset())
            for n, i in enumerate(own)
        ]
        for own in prompts
    ]
    for scheduler, own in zip(schedulers, requests, strict=True):
        for request in own:
            scheduler.add(request)
    unread: Sequence[Pending | None] = [None] * len(schedulers)
    while any(s.has_work for s in schedulers) or any(unread):
        plans = tuple(s.schedule() for s in schedulers)
        pending = parts.runners[0].launch(JointPlan(plans)) if any(plans) else [None] * len(plans)
        unread, pending = pending, unread
        for scheduler, p in zip(schedulers, pending, strict=True):
            if p:
                scheduler.update(p.plan, p.result().token_ids)
    return [r.output for own in requests for r in own]


def test_replicas_in_one_program_give_the_tokens_of_one() -> None:
    """Chunks and decode steps of several lengths at once; the last replica is idle for long, then for good."""
    params = SamplingParams(temperature=0, max_tokens=12)
    parts = device("jax", data_parallel_size=2, tensor_parallel_size=1)
    assert run(parts, [(0, 3, 2), (4,)], params) == alone("jax", params, (0, 3, 2, 4))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_each_run_a_replica_give_the_tokens_of_one(tp: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    want = alone("torch", params, (0, 3, 2, 4))
    found = on_every_rank(lambda mesh: run(rank_of(mesh), [(0, 3, 2), (4,)], params), {"dp": 2, "pp": 1, "tp": tp})
    assert found == [want] * 2 * tp


def planned(parts: Any, num_tokens: int, num_rows: int) -> Counter[tuple[str, tuple[str, ...], int]]:
    """(kind, mesh axes, bytes) of each collective of a greedy step."""
    found: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for c in parts.memory_plan.collectives:
        if not c.seldom:
            found[c.kind, c.mesh_axes, c.bytes_of(num_tokens, num_rows)] += c.count
    return found


def test_ranks_run_the_collectives_that_were_planned() -> None:
    def counted(mesh: TorchMesh) -> Any:
        parts, before = rank_of(mesh), Counter(mesh.counts)
        # three rows in one replica, one in the other: steps of three
        run(parts, [(1, 1, 1), (1,)], SamplingParams(temperature=0, max_tokens=2))
        return parts, mesh.counts - before

    for parts, counts in on_every_rank(counted, {"dp": 2, "pp": 1, "tp": 1}):
        want = planned(parts, 3, 3) + planned(parts, 3, 3)
        assert {kind for kind, _, _ in want} == {"all-gather", "reduce-scatter"}
        assert counts == want
