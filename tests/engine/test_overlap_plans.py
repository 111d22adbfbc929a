"""Overlapped and synchronous runs plan the very same steps where nothing ends by its text."""

from __future__ import annotations

import logging
import random
from collections import deque
from typing import Any

import pytest
from backends import BACKENDS
from scheduler_world import make_request, make_scheduler
from tiny import PROMPTS, engine

from octavo.engine import SamplingParams
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler

Steps = list[Any]  # of each plan, chunks and admissions, table writes and transfers


def _scheduler(rng: random.Random) -> Scheduler:
    budget = rng.choice([8, 16, 50])
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more["long_prefill_token_threshold"] = rng.choice([1, 3, 6])
    elif budget == 50 and rng.random() < 0.3:
        more["enable_chunked_prefill"] = False
    return make_scheduler(
        num_blocks=rng.choice([14, 20, 60]),
        windows=rng.choice([(None,), (None,), (None, 8), (5,)]),
        caching=rng.random() < 0.7,
        budget=budget,
        max_num_seqs=rng.choice([1, 3, 5, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        order=rng.choice(["decode_first", "prefill_first"]),
        watermark=rng.choice([0.0, 0.1]),
        full=rng.choice([(), (4, 8, 12, 24)]),
        **more,
    )


def _family(rng: random.Random, name: int) -> list[Request]:
    """Siblings of a prompt that shares its beginning with others, and nothing with what is generated."""
    prompt = [1] * rng.choice([0, 4, 9]) + [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
    count, priority, family = rng.choice([1, None, *range(1, 20)]), rng.randrange(3), []
    for i in range(rng.choice([1, 1, 2, 3])):
        first = family[0] if family else None
        family.append(make_request(f"{i}_{name}", prompt, count, priority=priority, arrival=name, first=first, index=i))
    return family


def _steps(seed: int, overlap: bool) -> Steps:
    """What is planned for random requests that come at once or one by one, and are aborted now and then."""
    rng = random.Random(seed)
    s, made, unread, late = _scheduler(rng), [], deque(), rng.random() < 0.5
    families, num_aborts = [_family(rng, n) for n in range(rng.randrange(1, 25))], rng.choice([0, 0, 2])
    families = [family for family in families if _fits(s, family[0])]
    arrivals = [(rng.randrange(60) if late else 0, family) for family in families]
    aborts = [(rng.randrange(1, 60), rng.choice(families)[-1]) for _ in range(num_aborts if families else 0)]
    arrivals.sort(key=lambda a: a[0])
    while arrivals or s.has_work or unread:
        while arrivals and (arrivals[0][0] <= len(made) or not (s.has_work or unread)):
            for r in arrivals.pop(0)[1]:
                s.add(r)
        for at, r in aborts:
            if at == len(made) and s.alive.get(r.id) is r and r.row is not None and r not in s.ending:
                s.finish(r, "abort")
        if plan := s.schedule():
            made.append((plan.chunks, plan.admitted, plan.table_writes, plan.transfers))
            unread.append(plan)
        if unread and (plan is None or len(unread) > overlap):
            read = unread.popleft()
            s.update(read, [_token(c.request_id, c.start) for c in read.sampled])
    return made


def _token(name: str, start: int) -> int:
    """One that no other request makes: overlapped, what another has made is found in the cache a step later."""
    index, family = map(int, name.split("_"))
    return 10 + (3 * family + index) * 1000 + start


def _fits(s: Scheduler, r: Request) -> bool:
    try:
        s.check(r)
    except ValueError:
        return False
    return True


def _check(seed: int) -> None:
    logging.disable(logging.WARNING)
    try:
        one, other = _steps(seed, overlap=True), _steps(seed, overlap=False)
    finally:
        logging.disable(logging.NOTSET)
    for n, (a, b) in enumerate(zip(one, other)):
        assert a == b, f"seed {seed}, step {n}"
    assert len(one) == len(other)


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_both_kinds_of_run_plan_the_same(start: int) -> None:
    for seed in range(start, start + 50):
        _check(seed)


@pytest.mark.slow
def test_both_kinds_of_run_plan_the_same_in_many_worlds() -> None:
    for seed in range(1000, 6000):
        _check(seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_kinds_of_run_give_the_same_tokens_and_logprobs(backend: str) -> None:
    """Rounding follows the batch, so equal steps are equal numbers, whatever room there is."""
    kinds = ({"temperature": 0}, {"seed": 3, "top_k": 9, "logprobs": 2}, {"n": 2, "seed": 5}, {"prompt_logprobs": 1})
    prompts = [*PROMPTS, *PROMPTS]
    params = [
        SamplingParams(**kinds[i % len(kinds)], max_tokens=1 + i * 5 % 23, ignore_eos=True) for i in range(len(prompts))
    ]
    # in half precision, where it works on a CPU
    dtype, found = "bfloat16" if backend == "torch" else "float32", []
    for overlap in (True, False):
        llm = engine(backend=backend, dtype=dtype, async_scheduling=overlap, num_gpu_blocks_override=18)
        plans, launch = [], llm.runner.launch

        def noted(plan: Any, mask: Any = None, plans: Steps = plans, launch: Any = launch) -> Any:
            plans.append((plan.chunks, plan.admitted, plan.table_writes, plan.transfers, plan.reads))
            return launch(plan, mask)

        llm.runner.launch = noted
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0 and not llm.scheduler.left
        made = [[(c.token_ids, c.logprobs, c.finish_reason) for c in o.outputs] for o in outputs]
        found.append((plans, made, [o.prompt_logprobs for o in outputs]))
    assert found[0] == found[1]
