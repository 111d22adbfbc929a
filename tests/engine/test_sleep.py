"""Sleep and wake_up: what is freed, who is refused, and that nothing else has changed afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_engines import outputs_of, run, start
from backends import BACKENDS
from oracle import greedy
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams
from octavo.engine.errors import AsleepError

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def sleeper(backend: str = BACKENDS[0], config: Any = TINY, **arguments: Any) -> LLM:
    return engine(config, backend=backend, enable_sleep_mode=True, **arguments)


def arrays(tree: Any) -> Iterator[Any]:
    """The leaves of what a runner holds, packed weights as what they are packed in."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for x in tree:
            yield from arrays(x)
    elif hasattr(tree, "groups"):
        yield from arrays((tree.groups, tree.rows))
    elif hasattr(tree, "shape"):
        yield tree
    else:
        yield from arrays(vars(tree))


def is_freed(x: Any) -> bool:
    if hasattr(x, "is_deleted"):
        return x.is_deleted()
    # a weight packed for its product
    return "matrix" not in vars(x) if hasattr(x, "depth") else x.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_freed_and_tokens_are_the_same_afterwards(backend: str, level: int) -> None:
    """Twice; nothing is compiled anew, and nothing is found in the prefix cache."""
    prompts = PROMPTS[:4]
    llm = sleeper(backend)
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in prompts]
    assert tokens(llm, [prompts[3]]) == [want[3]] and tokens(llm, prompts) == want
    before = llm.backend.num_compiles()
    for _ in range(2):
        weights, cache = list(arrays(llm.runner.weights)), list(arrays(llm.runner.cache))
        assert len(weights) > 20 and len(cache) > 8 and not any(map(is_freed, weights + cache))
        llm.sleep(level)
        assert llm.is_sleeping()
        assert all(map(is_freed, cache))
        # what torch packs for a CPU lies on the host already
        weights = [x for x in weights if level == 2 or not hasattr(x, "depth")]
        assert len(weights) >= 9 and all(map(is_freed, weights))
        held = [weakref.ref(x) for x in weights + cache]
        del weights, cache
        gc.collect()
        assert not any(ref() is not None for ref in held)
        llm.wake_up(weights=numpy_weights(TINY) if level == 2 else None)
        assert not llm.is_sleeping()
        hits = llm.scheduler.num_hit_tokens
        assert tokens(llm, [prompts[3]]) == [want[3]]
        assert llm.scheduler.num_hit_tokens == hits
        assert tokens(llm, prompts) == want
    assert llm.backend.num_compiles() == before


def test_who_is_asleep_refuses_requests_and_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """At the first level, whatever a second sleep says; until all is awake."""
    llm = sleeper()
    want = tokens(llm, PROMPTS[:1])
    llm.sleep()
    llm.sleep(level=2)
    assert "asleep already" in caplog.text
    for ask in (
        lambda: tokens(llm, PROMPTS[:1]),
        lambda: llm.add_request("a", PROMPTS[0], GREEDY),
        lambda: llm.embed(PROMPTS[:1], use_tqdm=False),
        lambda: llm.score(PROMPTS[:1], [[3]], use_tqdm=False),
    ):
        with pytest.raises(AsleepError, match=r"asleep \(weights, kv_cache\): wake_up\(\) first"):
            ask()
    assert not llm.has_unfinished_requests() and llm.step() == []
    llm.wake_up(["weights"])
    with pytest.raises(AsleepError, match=r"asleep \(kv_cache\)"):
        tokens(llm, PROMPTS[:1])
    caplog.clear()
    llm.wake_up(["weights"])
    assert "weights is awake" in caplog.text and llm.is_sleeping()
    llm.wake_up(["weights", "kv_cache"])
    assert llm.is_sleeping()
    llm.wake_up(["kv_cache"])
    assert tokens(llm, PROMPTS[:1]) == want
    caplog.clear()
    llm.wake_up()
    assert "the engine is awake" in caplog.text and tokens(llm, PROMPTS[:1]) == want


def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    llm = engine(backend=BACKENDS[0])
    with pytest.raises(ValueError, match="without enable_sleep_mode=True"):
        llm.sleep()
    llm = sleeper()
    want = tokens(llm, PROMPTS[:1])
    for wrong, words in (({"level": 3}, "level 3 is not 1"), ({"mode": "keep"}, "mode 'keep' is none of abort, wait")):
        with pytest.raises(ValueError, match=words):
            llm.sleep(**wrong)
    assert not llm.is_sleeping()
    llm.sleep(level=2)
    with pytest.raises(ValueError, match=r"tags \['cache'\]: there are weights, kv_cache"):
        llm.wake_up(["cache"])
    with pytest.raises(ValueError, match="given as arrays and are gone"):
        llm.wake_up()
    weights = numpy_weights(TINY)
    with pytest.raises(ValueError, match="do not name 'weights'"):
        llm.wake_up(["kv_cache"], weights=weights)
    with pytest.raises(ValueError, match=r"weights\['final_norm'\] has shape \(3,\), and the model wants \(32,\)"):
        llm.wake_up(weights=weights | {"final_norm": np.ones(3)})
    llm.wake_up(weights=weights)
    # nothing would take them
    with pytest.raises(ValueError, match=r"weights= is given, and the engine is awake: sleep\(\) first"):
        llm.wake_up(weights=weights)
    assert tokens(llm, PROMPTS[:1]) == want


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_step_in_flight_that_fails_is_of_those_who_are_waited_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = sleeper()
    want = tokens(llm, PROMPTS[:1])
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()

    def fails(*args: Any) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "update", fails)
        with contextlib.nullcontext() if mode == "abort" else pytest.raises(RuntimeError, match="planted"):
            llm.sleep(mode=mode)
    assert llm.is_sleeping() == (mode == "abort")
    llm.wake_up()
    assert tokens(llm, PROMPTS[:1]) == want


def test_an_interrupt_is_nobodys_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = sleeper()
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()

    def interrupts(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "update", interrupts)
        with pytest.raises(KeyboardInterrupt):
            llm.sleep()
    assert not llm.is_sleeping()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_waking_up_goes_on_where_it_failed(backend: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no room for the cache; the weights are back, and asked of nobody again."""
    llm, weights = sleeper(backend), numpy_weights(TINY)
    want = tokens(llm, PROMPTS[:1])

    def no_room(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    for again in (None, weights):
        llm.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr(llm.backend, "zeros", no_room)
            with pytest.raises(RuntimeError, match="out of memory"):
                llm.wake_up(weights=weights if level == 2 else None)
        assert llm.is_sleeping()
        before = list(arrays(llm.runner.weights))
        llm.wake_up(weights=again)
        assert again is None or level == 1 or not set(map(id, before)) & set(map(id, arrays(llm.runner.weights)))
        assert tokens(llm, PROMPTS[:1]) == want


def test_it_wakes_with_other_weights() -> None:
    llm, other = sleeper(), numpy_weights(TINY, seed=1)
    want = [greedy(spec_of(TINY), other, PROMPTS[0], GREEDY.max_tokens)]
    assert tokens(llm, PROMPTS[:1]) != want
    llm.sleep(level=1)
    llm.wake_up(weights=other)
    assert tokens(llm, PROMPTS[:1]) == want


def test_requests_that_run_are_aborted_or_waited_for() -> None:
    llm = sleeper(disable_log_stats=False)
    want = greedy(spec_of(TINY), numpy_weights(TINY), PROMPTS[0], LONG.max_tokens)

    def begin() -> None:
        llm.add_request("a", PROMPTS[0], LONG)
        for _ in range(5):
            llm.step()

    begin()
    llm.sleep()
    assert not llm.has_unfinished_requests() and states(llm) == (0, 1, 0)
    llm.wake_up()
    assert states(llm) == (1, 0, 0)
    begin()
    llm.sleep(mode="wait")
    (output,) = llm.step()
    assert output.finished and list(output.outputs[0].token_ids) == want
    llm.wake_up()
    assert tokens(llm, PROMPTS[:1], LONG) == [want]


def test_who_is_waited_for_can_be_aborted_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever comes meanwhile is refused at once."""
    llm, waits, steps = sleeper(), threading.Event(), iter(range(500))
    want = tokens(llm, PROMPTS[:1])
    llm.add_request("a", PROMPTS[0], LONG)

    def never_ends() -> None:
        next(steps)
        waits.set()
        time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_advance", never_ends)
        threads = [threading.Thread(target=llm.sleep, kwargs={"mode": "wait"}, daemon=True) for _ in range(2)]
        threads.append(threading.Thread(target=lambda: waits.wait() and llm.abort("a"), daemon=True))
        threads[0].start()
        assert waits.wait(10)
        with pytest.raises(AsleepError, match="about to sleep"):
            llm.add_request("b", PROMPTS[1], GREEDY)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert llm.is_sleeping() and not llm.has_unfinished_requests()
    llm.wake_up()
    assert tokens(llm, PROMPTS[:1]) == want


def states(llm: LLM) -> tuple[int, ...]:
    found = {m.labels["sleep_state"]: m.value for m in llm.get_metrics() if m.name == "vllm:engine_sleep_state"}  # pyright: ignore
    return found["awake"], found["weights_offloaded"], found["discard_all"]


def test_weights_of_a_checkpoint_are_read_again(tmp_path: Path) -> None:
    tiny_hf = pytest.importorskip("tiny_hf")
    tiny_hf.save(tiny_hf.make("Llama", seed=3), tmp_path)
    llm = LLM(tmp_path, backend=BACKENDS[0], skip_tokenizer_init=True, enable_sleep_mode=True, max_model_len=64,
              num_gpu_blocks_override=20, max_num_seqs=2)  # fmt: skip
    params = replace(GREEDY, ignore_eos=True, detokenize=False)
    want = tokens(llm, PROMPTS[:2], params)
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.wake_up()
    assert tokens(llm, PROMPTS[:2], params) == want


def test_dummy_weights_are_made_again() -> None:
    llm = LLM(spec_of(TINY), load_format="dummy", backend=BACKENDS[0], enable_sleep_mode=True, block_size=8,
              num_gpu_blocks_override=40, max_num_seqs=2)  # fmt: skip
    want = tokens(llm, PROMPTS[:2])
    # no views, which would keep memory that they give back themselves
    assert all(getattr(x, "_base", None) is None for x in arrays(llm.runner.weights))
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, PROMPTS[:2]) == want


def test_the_engine_of_an_event_loop() -> None:
    async def work() -> None:
        async with start(BACKENDS[0], enable_sleep_mode=True) as llm:
            want = (await outputs_of(llm.generate({"prompt_token_ids": PROMPTS[0]}, LONG)))[-1].outputs[0].token_ids
            with pytest.raises(ValueError, match="level 0"):
                await llm.sleep(level=0)
            # on a busy machine the engine may be done with a request before it hears that it should sleep
            reasons = []
            while "abort" not in reasons:
                assert len(reasons) < 20
                await llm.wake_up()
                stream = llm.generate({"prompt_token_ids": PROMPTS[0]}, LONG)
                first = await anext(stream)
                await llm.sleep()
                last = [first, *await outputs_of(stream)][-1]
                assert last.finished and await llm.is_sleeping()
                reasons.append(last.outputs[0].finish_reason)
            with pytest.raises(AsleepError, match="wake_up"):
                await outputs_of(llm.generate({"prompt_token_ids": PROMPTS[0]}, LONG))
            await llm.wake_up(tags=["weights"])
            await llm.wake_up()
            assert not await llm.is_sleeping()
            stream = llm.generate({"prompt_token_ids": PROMPTS[0]}, LONG)
            first = await anext(stream)
            _, others = await asyncio.gather(llm.sleep(level=1, mode="wait"), outputs_of(stream))
            assert [first, *others][-1].outputs[0].token_ids == want
            await llm.wake_up()

    run(work)


TEAM = """
import sys; sys.path.insert(0, {tests!r})
import weakref
from tiny import EIGHT_HEADS, PROMPTS, engine, numpy_weights, tokens
llm = engine(EIGHT_HEADS, enable_sleep_mode=True, device="cpu", state_check_interval=4, **{arguments!r})
want = tokens(llm, PROMPTS[:2])
compiled = llm.backend.num_compiles()
llm.sleep(level=1)
llm.wake_up(["weights"])
llm.wake_up()
assert tokens(llm, PROMPTS[:2]) == want
llm.sleep(level=2)
try:
    llm.wake_up(weights={{}})
except ValueError as error:
    print(error)
llm.wake_up(weights=numpy_weights(EIGHT_HEADS, seed=1))
assert tokens(llm, PROMPTS[:2]) != want
llm.sleep(level=2)
llm.wake_up(weights=numpy_weights(EIGHT_HEADS))
assert tokens(llm, PROMPTS[:2]) == want
assert llm.backend.num_compiles() == compiled
print("TOKENS", want)
llm.shutdown()
"""


@pytest.mark.skipif("jax" not in BACKENDS, reason="shards of one process are JAX's")
@pytest.mark.parametrize("axis", ["tensor", *(pytest.param(x, marks=pytest.mark.slow) for x in ("data", "pipeline"))])
def test_shards_on_several_devices(axis: str) -> None:
    llm = sleeper("jax", config=EIGHT_HEADS, **{f"{axis}_parallel_size": 2})
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in PROMPTS[:2]]
    assert tokens(llm, PROMPTS[:2]) == want
    before, weights = llm.backend.num_compiles(), list(arrays(llm.runner.weights))
    for level, others in ((1, None), (2, numpy_weights(EIGHT_HEADS))):
        llm.sleep(level)
        assert all(map(is_freed, weights))
        llm.wake_up(weights=others)
        assert tokens(llm, PROMPTS[:2]) == want
    assert llm.backend.num_compiles() == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_processes(backend: str) -> None:
    """At both levels, with other weights; what rank 0 refuses the others never hear of."""
    arguments = {"backend": backend, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    script = TEAM.format(tests=str(Path(__file__).parents[1]), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in PROMPTS[:2]]
    assert f"TOKENS {want}" in done.stdout and "weights is not a dict of" in done.stdout
