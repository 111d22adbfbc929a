"""AsyncLLM: the outputs of LLM for an event loop, and requests that come, go and are wrong."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_engines import Embed, arguments, freed, gone, outputs_of, run, start, words
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, RANDOM, TINY, spec_of

from octavo.engine import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    CompletionOutput,
    QueueFullError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from octavo.engine.inboxes import joined
from octavo.engine.logprobs import FlatLogprobs
from octavo.engine.outputs import Logprob

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LONG = replace(GREEDY, max_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, folder: str) -> Iterator[AsyncLLM]:
    """One a backend, for all tests and their event loops: whatever they do to it, it must serve on."""
    engine = start(request.param, tokenizer=folder)
    yield engine
    assert run(lambda: freed(engine))
    pid = engine.client.child.pid
    engine.shutdown()
    assert not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def one(folder: str) -> Iterator[AsyncLLM]:
    """Slow, with priorities and a short queue; one backend is enough for what is the host's alone."""
    engine = start(
        BACKENDS[0],
        model=replace(spec_of(TINY), embed=Embed(0.005)),
        enforce_eager=True,
        tokenizer=folder,
        scheduling_policy="priority",
        max_num_queued_reqs=3,
        tokenizer_pool_size=2,
    )
    yield engine
    pids = [engine.client.child.pid, *engine.tokenizer_pool.pids]
    engine.shutdown()
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids))


def assert_close(got: list[Any], want: list[Any]) -> None:
    """Logprobs are equal but for the last bits, which depend on a step's shape."""
    for a, b in zip(got, want, strict=True):
        assert [*a] == [*b] and all(abs(a[i].logprob - b[i].logprob) < 1e-5 for i in a)


MIXED = [
    RANDOM,
    replace(RANDOM, seed=4, n=3, output_kind=DELTA),
    replace(RANDOM, logprobs=2, output_kind=DELTA),
    replace(RANDOM, stop=("w3", "w8"), n=2, top_k=0),
    replace(RANDOM, seed=2, output_kind=FINAL_ONLY),
    replace(RANDOM, stop_token_ids=(5, 6, 7, 8), output_kind=DELTA, stream_interval=4),
    replace(RANDOM, seed=9, stream_interval=3),
]


def test_outputs_are_those_of_an_llm(engine: AsyncLLM, folder: str) -> None:
    llm = LLM(spec_of(TINY), **arguments(engine.config.backend, tokenizer=folder))
    prompts = [*PROMPTS[:5], "w1 w2 w3", {"prompt": "w5 w6", "cache_salt": "x"}]
    want = llm.generate(prompts, MIXED, use_tqdm=False)

    async def work() -> list[Any]:
        streams = [engine.generate(p, params) for p, params in zip(prompts, MIXED, strict=True)]
        return await asyncio.gather(*map(outputs_of, streams))

    for outputs, params, whole in zip(run(work), MIXED, want, strict=True):
        last = outputs[-1]
        assert last.finished and not any(o.finished for o in outputs[:-1])
        assert {(o.prompt, tuple(o.prompt_token_ids)) for o in outputs} == {
            (whole.prompt, tuple(whole.prompt_token_ids))
        }
        if params.output_kind is FINAL_ONLY:
            assert len(outputs) == 1
        if params.output_kind is not DELTA:
            assert last.outputs == whole.outputs
            continue
        for made in whole.outputs:
            parts = [c for o in outputs for c in o.outputs if c.index == made.index]
            assert "".join(c.text for c in parts) == made.text
            assert [t for c in parts for t in c.token_ids] == list(made.token_ids)
            assert parts[-1].finish_reason == made.finish_reason
            if made.logprobs:
                assert_close([x for c in parts for x in c.logprobs], made.logprobs)
    assert run(lambda: freed(engine))


def test_chat_renders_the_template(engine: AsyncLLM) -> None:
    chat = [{"role": "w4", "content": "w5"}]
    (*_, last) = run(lambda: outputs_of(engine.chat(chat, GREEDY, mood="w6")))
    (*_, same) = run(lambda: outputs_of(engine.generate([4, 5, 6], GREEDY)))
    assert last.prompt_token_ids == [4, 5, 6] and last.outputs == same.outputs
    assert engine.get_tokenizer().encode("w7") == [7]


def test_leaving_the_loop_frees_the_blocks(engine: AsyncLLM) -> None:
    async def work() -> None:
        # on a busy machine the first output may be the whole
        for _ in range(20):
            async for output in engine.generate(PROMPTS[3], LONG):
                ended = output.finished
                break
            assert await freed(engine)
            if not ended:
                break
        assert not ended
        stream = engine.generate(PROMPTS[3], replace(LONG, n=2, temperature=1.0))
        await anext(stream)
        await stream.aclose()
        assert await freed(engine) and await outputs_of(stream) == []

    run(work)


@pytest.mark.parametrize("where", ["before the first output", "while waiting", "in the loop"])
def test_cancelling_the_task_frees_the_blocks(engine: AsyncLLM, where: str) -> None:
    async def consume(got: asyncio.Event) -> None:
        async for _ in engine.generate(PROMPTS[3], LONG, "cancelled"):
            got.set()
            if where == "in the loop":
                await asyncio.sleep(60)

    async def cancelled() -> bool:
        got = asyncio.Event()
        task = asyncio.create_task(consume(got))
        await (asyncio.sleep(0) if where == "before the first output" else got.wait())
        task.cancel()
        return isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)

    async def work() -> None:
        # on a busy machine the whole output may be there before the task is cancelled
        tries = 20 if where == "while waiting" else 1
        while tries and not await cancelled():
            tries -= 1
        assert tries
        assert await freed(engine)
        # the name is free again, and no news of the old request passes for the new one's
        outputs = await outputs_of(engine.generate(PROMPTS[0], replace(GREEDY, max_tokens=2), "cancelled"))
        assert list(outputs[-1].prompt_token_ids) == PROMPTS[0] and outputs[-1].finished

    run(work)


def test_abort_gives_a_last_output(one: AsyncLLM) -> None:
    async def work() -> None:
        for kind in RequestOutputKind:
            stream = one.generate(PROMPTS[0], replace(LONG, output_kind=kind), "mine")
            task = asyncio.create_task(outputs_of(stream))
            while not (await one.get_stats()).num_running:
                await asyncio.sleep(0)
            await one.abort(["mine", "nobody's"])
            outputs = await task
            assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
            assert await freed(one)
        # before the engine knows of it
        task = asyncio.create_task(outputs_of(one.generate("w1 w2", LONG, "early")))
        await asyncio.sleep(0)
        await one.abort("early")
        assert (await task)[-1].outputs[0].finish_reason == "abort"

    run(work)


def test_an_abort_may_name_a_request_twice(one: AsyncLLM) -> None:
    async def work() -> None:
        for kind in RequestOutputKind:
            task = asyncio.create_task(outputs_of(one.generate(PROMPTS[0], replace(LONG, output_kind=kind), "twice")))
            while not (await one.get_stats()).num_running:
                await asyncio.sleep(0)
            await one.abort(["twice", "twice"])
            assert (await task)[-1].outputs[0].finish_reason == "abort"
            await one.check_health()
            assert await freed(one)

    run(work)


WRONG = {
    "params": (([1], {"n": 1}), {}, "is not a SamplingParams"),
    "id": (([1], GREEDY, 5), {}, "request id 5 is not a string"),
    "empty": (([], GREEDY), {}, "the prompt is empty"),
    "token": (([1, 200], GREEDY), {}, "200 is outside the vocabulary"),
    "text": (("w97", GREEDY), {}, "97"),
    "surrogate": (("\ud800", GREEDY), {}, "lone surrogate"),
    "unknown key": (({"prompt_ids": [1]}, GREEDY), {}, "prompt_ids"),
    "no prompt": ((3, GREEDY), {}, "3"),
    "unsendable": (((i for i in [1]), GREEDY), {}, "cannot be sent"),
    "too long": (([1] * 128, GREEDY), {}, "128"),
    "stop id": (([1], SamplingParams(stop_token_ids=[97])), {}, "97"),
    "logprobs": (([1], SamplingParams(logprobs=50)), {}, "more than 20"),
    "priority": (([1], GREEDY), {"priority": 1}, "needs scheduling_policy='priority'"),
    "salt": (([1], GREEDY), {"cache_salt": 5}, "cache_salt 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_its_own_error(engine: AsyncLLM, name: str) -> None:
    given, more, words = WRONG[name]

    async def work() -> None:
        beside = asyncio.create_task(outputs_of(engine.generate(PROMPTS[0], replace(GREEDY, max_tokens=6))))
        with pytest.raises(ValueError, match=words):
            await outputs_of(engine.generate(*given, **more))
        assert len((await beside)[-1].outputs[0].token_ids) == 6

    run(work)


def test_a_name_is_used_once_at_a_time(engine: AsyncLLM) -> None:
    async def work() -> None:
        stream = engine.generate(PROMPTS[0], LONG, "7")
        await anext(stream)
        with pytest.raises(ValueError, match="'7' is in use"):
            await anext(engine.generate(PROMPTS[0], LONG, "7"))
        ids = {(await anext(engine.generate(PROMPTS[0], GREEDY))).request_id for _ in range(12)}
        assert len(ids) == 12 and "7" not in ids
        await stream.aclose()

    run(work)


def test_event_loops_share_an_engine(engine: AsyncLLM) -> None:
    want = run(lambda: outputs_of(engine.generate(PROMPTS[2], RANDOM)))[-1].outputs
    got: list[Any] = []

    def work() -> None:
        got.append(run(lambda: outputs_of(engine.generate(PROMPTS[2], RANDOM)))[-1].outputs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 4

    async def left_open() -> None:
        await anext(streams[0])

    # a loop that ends before its request does
    streams = [engine.generate(PROMPTS[3], LONG)]
    run(left_open)
    time.sleep(0.05)
    streams.clear()
    gc.collect()
    assert run(lambda: freed(engine))


def test_joined_deltas_keep_what_only_the_first_has() -> None:
    first = RequestOutput("x", None, [1], [CompletionOutput(1, "a", [1])], False, prompt_logprobs=[None])
    second = RequestOutput("x", None, [], [CompletionOutput(i, "b", [2], finish_reason="stop") for i in (0, 1)], True)
    both = joined(first, second)
    assert both.finished and both.prompt_logprobs == [None]
    assert [(c.index, c.text, list(c.token_ids), c.finish_reason) for c in both.outputs] == [
        (0, "b", [2], "stop"),
        (1, "ab", [1, 2], "stop"),
    ]


def test_joined_flat_logprobs_stay_flat() -> None:
    each = [FlatLogprobs([{i: Logprob(-0.5 * i, 1, None)}]) for i in (1, 2)]
    first, second = (RequestOutput("x", None, [1], [CompletionOutput(0, "", [1], logprobs=x)], False) for x in each)
    both = joined(first, second).outputs[0].logprobs
    assert type(both) is FlatLogprobs and [*both] == [*each[0], *each[1]]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=lambda k: k.name)
def test_a_slow_reader_finds_all_in_one_output(one: AsyncLLM, kind: RequestOutputKind) -> None:
    async def work() -> None:
        params = replace(RANDOM, n=2, logprobs=1, output_kind=kind)
        want = (await outputs_of(one.generate(PROMPTS[0], replace(params, output_kind=FINAL_ONLY))))[-1]
        stream = one.generate(PROMPTS[0], params)
        first = await anext(stream)
        while not await freed(one):
            await asyncio.sleep(0.001)
        rest = await outputs_of(stream)
        assert len(rest) == 1
        for i, whole in enumerate(want.outputs):
            parts = [c for o in (first, *rest) for c in o.outputs if c.index == i]
            if kind is CUMULATIVE:
                parts = parts[-1:]
            assert [t for c in parts for t in c.token_ids] == list(whole.token_ids)
            assert "".join(c.text for c in parts) == whole.text
            assert_close([x for c in parts for x in c.logprobs], whole.logprobs)

    run(work)


def test_priorities_and_limits_hold_while_running(one: AsyncLLM) -> None:
    async def work() -> None:
        ended = []

        async def finish(name: str, priority: int) -> None:
            await outputs_of(one.generate(PROMPTS[0], replace(GREEDY, max_tokens=8), name, priority=priority))
            ended.append(name)

        await one.set_limits(max_num_seqs=1, max_num_batched_tokens=8)
        first = one.generate(PROMPTS[0], LONG, priority=-1)
        await anext(first)
        tasks = [asyncio.create_task(finish(*each)) for each in (("low", 9), ("mid", 5), ("high", 1))]
        while (await one.get_stats()).num_waiting < 3:
            await asyncio.sleep(0)
        stats = await one.get_stats()
        assert (stats.num_running, stats.max_num_seqs, stats.max_num_batched_tokens) == (1, 1, 8)
        with pytest.raises(QueueFullError, match="max_num_queued_reqs is 3"):
            await anext(one.generate(PROMPTS[1], GREEDY))
        await first.aclose()
        await asyncio.gather(*tasks)
        assert ended == ["high", "mid", "low"]
        with pytest.raises(ValueError, match="max_num_seqs 5 is more than the 4 that the engine was made for"):
            await one.set_limits(max_num_seqs=5)
        await one.set_limits(max_num_seqs=4, max_num_batched_tokens=64)

    run(work)


def test_an_idle_engine_sleeps_and_wakes_at_once(one: AsyncLLM) -> None:
    process = psutil.Process(one.client.child.pid)

    async def work() -> float:
        await outputs_of(one.generate(PROMPTS[0], GREEDY))
        before = process.cpu_times()
        await asyncio.sleep(0.5)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.02
        waits = []
        for _ in range(100):
            start = time.perf_counter()
            await one.get_stats()
            waits.append(time.perf_counter() - start)
        return min(waits)

    assert run(work) < 0.001


def test_the_cache_is_reset_only_when_nobody_runs(one: AsyncLLM) -> None:
    async def work() -> None:
        stream = one.generate(PROMPTS[3], LONG)
        await anext(stream)
        assert not await one.reset_prefix_cache()
        await stream.aclose()
        assert (await anext(one.generate(PROMPTS[3], GREEDY))).num_cached_tokens
        assert await one.reset_prefix_cache()
        assert not (await anext(one.generate(PROMPTS[3], GREEDY))).num_cached_tokens

    run(work)


def test_arguments_are_checked_before_any_process_starts() -> None:
    args = AsyncEngineArgs(model="m", max_num_seqs=200, max_num_batched_tokens=4096, enforce_eager=False)
    assert (args.config.max_num_seqs, args.config.max_num_batched_tokens) == (200, 4096)
    for wrong, match in (({"max_num_seq": 3}, "max_num_seqs"), ({"block_size": 12}, "8, 16, 32")):
        with pytest.raises(ValueError, match=match):
            AsyncEngineArgs(model="m", **wrong)
        with pytest.raises(ValueError, match=match):
            AsyncLLM("m", **wrong)


def test_what_keeps_an_engine_from_starting_is_its_own_error(tmp_path: Path) -> None:
    children = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        AsyncLLM(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the largest max_model_len that fits is 16"):
        start(BACKENDS[0], num_gpu_blocks_override=3)
    assert psutil.Process().children(recursive=True) == children


def test_an_engine_from_arguments_that_nobody_holds_leaves_no_process() -> None:
    def pid_of_one() -> int:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(spec_of(TINY), **arguments(BACKENDS[0])))
        (*_, last) = run(lambda: outputs_of(engine.generate(PROMPTS[0])))
        assert last.outputs[0].token_ids and engine.get_default_sampling_params() == SamplingParams()
        assert engine.is_running and psutil.pid_exists(engine.client.child.pid)
        return engine.client.child.pid

    pid = pid_of_one()
    gc.collect()
    assert gone([pid])


def test_an_iterator_has_one_reader(engine: AsyncLLM) -> None:
    async def work() -> None:
        outputs = engine.generate(PROMPTS[0], LONG)
        reader = asyncio.create_task(outputs_of(outputs))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(outputs)
        assert (await reader)[-1].outputs[0].finish_reason == "length"

    run(work)


@pytest.mark.parametrize("moment", ["begins", "waits"])
def test_closing_ends_it_for_the_task_that_waits(one: AsyncLLM, moment: str) -> None:
    async def work() -> None:
        outputs = one.generate(PROMPTS[0], replace(LONG, output_kind=FINAL_ONLY))
        reader = asyncio.create_task(outputs_of(outputs))
        while (outputs.inbox is None) == (moment == "waits"):
            await asyncio.sleep(0)
            if moment == "begins":
                break
        await outputs.aclose()
        assert await asyncio.wait_for(reader, 10) == []
        assert await freed(one)

    run(work)
