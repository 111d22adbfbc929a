"""A cost model measured on a real engine: what a step takes, as a function of what is in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..llm import LLM
from ..plan import Plan
from ..replica import check_alone
from ..sampling_params import SamplingParams
from .simulate import Cost


def measure(model: Any = "smollm2", *, num_steps: int = 12, **arguments: Any) -> Cost:
    """The Cost that fits steps of this engine best, none of its parts negative.

    Steps are run one at a time (async_scheduling is off): prompts of several lengths, then decoding of several batches.
    """
    arguments = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048} | arguments
    llm = LLM(model, **arguments | {"async_scheduling": False, "enable_prefix_caching": False})
    check_alone(llm)
    samples: list[tuple[Plan, float]] = []
    for turn in range(2):
        # the first time compiles, or warms caches
        samples = []
        for batch in (1, 4, 16, 32):
            for length in (16, 200):
                samples += _run(llm, min(batch, llm.config.max_num_seqs), length, num_steps, turn)
    return fit(samples)


def _run(llm: LLM, batch: int, length: int, num_steps: int, turn: int) -> list[tuple[Plan, float]]:
    """Plans and seconds of all steps of so many prompts of one length."""
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=0, detokenize=False)
    plans: list[Plan] = []
    schedule = llm.scheduler.schedule

    def recorded() -> Plan | None:
        plan = schedule()
        if plan is not None:
            plans.append(plan)
        return plan

    llm.scheduler.schedule = recorded
    seconds = []
    try:
        for i in range(batch):
            ids = [(turn + i + j) % llm.model.vocab_size for j in range(length)]
            llm.add_request(f"measure-{i}", {"prompt_token_ids": ids}, params)
        while llm.has_unfinished_requests():
            start = time.perf_counter()
            llm.step()
            seconds.append(time.perf_counter() - start)
    finally:
        llm.scheduler.schedule = schedule
    return list(zip(plans, seconds, strict=True))


def fit(samples: Sequence[tuple[Plan, float]]) -> Cost:
    """Least squares of relative errors; a part that would be negative is 0."""
    rows = [[1.0, _tokens(p), len(p.chunks), _context(p)] for p, _ in samples]
    seconds = np.array([s for _, s in samples])
    # relative: short steps count as much as long ones
    features = np.array(rows) / seconds[:, None]
    left = list(range(4))
    while True:
        found, *_ = np.linalg.lstsq(features[:, left], np.ones(len(seconds)), rcond=None)
        if (found >= 0).all():
            break
        left.pop(int(found.argmin()))
    parts = np.zeros(4)
    parts[left] = found
    return Cost(*parts.tolist())


def _tokens(plan: Plan) -> int:
    return sum(c.num_tokens for c in plan.chunks)


def _context(plan: Plan) -> int:
    return sum(c.start + c.num_tokens for c in plan.chunks)
