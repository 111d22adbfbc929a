"""Many requests at once, of all kinds, some of them left early: none stalls, each is right, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grammar_world as world
import psutil
import pytest
from async_engines import freed, quiet, run
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, numpy_weights, spec_of

from octavo.engine import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams

KINDS = list(RequestOutputKind)
MINUTES = 2  # that the long storm lasts at least, however fast the machine
# grammars, where there is a library for them
FORMS: list[dict[str, Any]] = [
    {"regex": r"[0-9]{3}-[a-z]{2,5}"},
    {"choice": ["yes", "no", "nobody"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
] * (importlib.util.find_spec("llguidance") is not None)
CHOICES = ("leave", "cancel", "abort", "slow", *["finish"] * 8)
# few blocks, so that requests are preempted; on JAX few seats, so that it compiles less
SIZES = {
    "torch": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 70, "max_model_len": 104},
    "jax": {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24, "max_model_len": 104},
}


def built(backend: str, folder: Path) -> dict[str, Any]:
    """Arguments of an engine on a tiny model that can write JSON."""
    config = replace(TINY, vocab_size=world.vocab_size(folder))
    parts = {"model": spec_of(config), "weights": numpy_weights(config), "tokenizer": str(folder)}
    return parts | {"block_size": 8, **SIZES[backend], **quiet(backend)}


@contextlib.contextmanager
def serving(backend: str, folder: Path) -> Iterator[AsyncLLM]:
    more = {"scheduling_policy": "priority", "tokenizer_pool_size": 2}
    engine = AsyncLLM(**built(backend, world.save_tokenizer(folder)), **more)
    yield engine
    pids = [engine.client.child.pid, *engine.tokenizer_pool.pids]
    engine.shutdown()
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids))


def any_params(rng: random.Random, backend: str) -> SamplingParams:
    # each kind of head is a chain of programs, which take JAX longer to compile than all the rest of this test
    heads = backend == "torch"
    n = rng.choice([1, 1, 1, 2, 3])
    params = GREEDY if heads and n == 1 and rng.random() < 0.3 else replace(RANDOM, n=n, seed=rng.randrange(10**6))
    stops = {
        "stop": tuple(rng.choice("abcdefgh,:{}[]01") for _ in range(2)) if rng.random() < 0.3 else (),
        "stop_token_ids": (rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        "structured_outputs": rng.choice(FORMS) if heads and FORMS and rng.random() < 0.2 else None,
    }
    many = rng.randrange(1, 25)
    heads = heads and stops["structured_outputs"] is None
    return replace(
        params,
        **stops,
        max_tokens=many,
        min_tokens=rng.choice([0, 0, many // 2]) if heads else 0,
        logprobs=rng.choice([None, None, 2]) if heads else None,
        output_kind=rng.choice(KINDS),
        stream_interval=rng.choice([None, 2, 5]),
    )


def any_prompt(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return "".join(rng.choice("abc é日") for _ in range(rng.randrange(1, 30)))
    return rng.choice(PROMPTS)


def whole(outputs: list[RequestOutput], params: SamplingParams) -> list[tuple[Any, ...]]:
    """The completions, as one output would have them."""
    if params.output_kind is not KINDS[1]:
        parts_of = {c.index: [c] for c in outputs[-1].outputs}
    else:
        parts_of = {i: [c for o in outputs for c in o.outputs if c.index == i] for i in range(params.n)}
    return [
        (
            "".join(c.text for c in parts),
            [t for c in parts for t in c.token_ids],
            parts[-1].finish_reason,
            parts[-1].stop_reason,
            [[*x] for c in parts for x in c.logprobs or ()],
        )
        for parts in parts_of.values()
    ]


async def one(engine: AsyncLLM, name: str, prompt: Any, params: SamplingParams, fate: str, rng: random.Random) -> Any:
    """The completions of one request, None of one that does not end by itself."""
    outputs, patience = [], rng.randrange(1, 12)
    async for output in engine.generate(prompt, params, name, priority=rng.randrange(3)):
        outputs.append(output)
        if fate == "leave" and len(outputs) >= patience:
            return None
        if fate == "slow":
            await asyncio.sleep(0.02 * rng.random())
    aborted = any(c.finish_reason == "abort" for c in outputs[-1].outputs)
    return None if aborted else whole(outputs, params)


async def watchdog(engine: AsyncLLM, work: asyncio.Future[Any], seconds: float = 60) -> None:
    """Cancels the work if the engine makes no step for so long. If one request starves, the storm never ends."""
    num_steps, since = -1, time.monotonic()
    while True:
        await asyncio.sleep(1)
        stats = await engine.get_stats()
        if stats.num_steps != num_steps:
            num_steps, since = stats.num_steps, time.monotonic()
        elif time.monotonic() - since > seconds:
            print("stalls:", stats, sorted(engine.inboxes.by_id))
            work.cancel()


async def storm(engine: AsyncLLM, cases: list[Any], width: int, rng: random.Random) -> list[Any]:
    """Runs all cases, `width` at a time."""
    gate = asyncio.Semaphore(width)

    async def guarded(i: int, prompt: Any, params: SamplingParams, fate: str) -> Any:
        async with gate:
            task = asyncio.create_task(one(engine, str(i), prompt, params, fate, random.Random(i)))
            if fate in ("cancel", "abort"):
                await asyncio.sleep(0.2 * rng.random())
            if fate == "cancel":
                task.cancel()
            elif fate == "abort":
                await engine.abort(str(i))
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()

    async def limits() -> None:
        due = 0
        while True:
            await asyncio.sleep(0.1)
            # by steps, not by time: where they are slow, requests would be preempted before they get on
            if (await engine.get_stats()).num_steps < due:
                continue
            due = (await engine.get_stats()).num_steps + 20
            await engine.set_limits(max_num_seqs=rng.randint(2, engine.config.max_num_seqs))

    all_of_them = asyncio.gather(*(guarded(i, *case) for i, case in enumerate(cases)))
    beside = [asyncio.create_task(limits()), asyncio.create_task(watchdog(engine, all_of_them))]
    try:
        return await all_of_them
    finally:
        for task in beside:
            task.cancel()


def weather(engine: AsyncLLM, num_requests: int, width: int, seed: int) -> None:
    """A storm, and a look at what it has left."""
    rng = random.Random(seed)
    backend = engine.config.backend
    cases = [(any_prompt(rng), any_params(rng, backend), rng.choice(CHOICES)) for _ in range(num_requests)]
    got = run(lambda: storm(engine, cases, width, rng), 400)
    assert run(lambda: freed(engine)) and not engine.inboxes.open and not engine.inboxes.by_id
    llm = LLM(**built(backend, Path(str(engine.config.tokenizer))))
    ended = [i for i, made in enumerate(got) if made is not None]
    prompts, params = [cases[i][0] for i in ended], [replace(cases[i][1], output_kind=KINDS[0]) for i in ended]
    alone = llm.generate(prompts, params, use_tqdm=False)
    for i, output in zip(ended, alone, strict=True):
        assert got[i] == whole([output], replace(cases[i][1], output_kind=KINDS[0])), f"request {i}: {cases[i]}"
    assert len(ended) >= num_requests // 2


def test_thirty_two_requests_at_once(tmp_path: Path) -> None:
    # what JAX compiles would take most of the time; the long one has both
    with serving(BACKENDS[0], tmp_path) as engine:
        weather(engine, 32, 32, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_256_requests_at_once_for_minutes(backend: str, tmp_path: Path) -> None:
    with serving(backend, tmp_path) as engine:
        weather(engine, 500, 256, seed=2)
        process = psutil.Process(engine.client.child.pid)
        before = process.memory_info().rss
        start, seed = time.monotonic(), 3
        while time.monotonic() - start < MINUTES * 60:
            weather(engine, 1000, 256, seed=seed)
            seed += 1
        assert process.memory_info().rss - before < 40 * 2**20
        assert run(engine.get_stats).num_preemptions > 20
