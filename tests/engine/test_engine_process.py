"""The engine's process in trouble: killed, failing, orphaned. Nothing hangs, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from async_engines import Embed, freed, gone, outputs_of, run, start
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, TINY, spec_of
from tiny import engine as tiny_engine

from octavo.engine import AsyncLLM, EngineDeadError, RequestFailedError
from octavo.engine.child import Child
from octavo.engine.engine_process import Engine
from octavo.engine.messages import Abort, Add, Answer, Ask, Ended, News

LONG, SHORT = replace(GREEDY, max_tokens=100), replace(GREEDY, max_tokens=3)


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncLLM]:
    """Slow, and failing while the file `trouble` is there."""
    model = replace(spec_of(TINY), embed=Embed(0.002, str(tmp_path / "trouble")))
    engine = start(request.param, model=model, enforce_eager=True)
    yield engine
    engine.shutdown()
    assert not psutil.pid_exists(engine.client.child.pid)


def test_a_killed_engine_is_an_error_for_all_that_is_open_and_all_that_comes(engine: AsyncLLM) -> None:
    async def work() -> None:
        await engine.check_health()
        assert engine.is_running and not engine.errored
        streams = [engine.generate(p, LONG) for p in PROMPTS[:6]]
        await anext(streams[0])
        tasks = [asyncio.create_task(outputs_of(s)) for s in streams]
        await asyncio.sleep(0)
        # its threads may answer until they are gone, so the question comes when nobody can
        os.kill(engine.client.child.pid, signal.SIGSTOP)
        tasks.append(asyncio.create_task(engine.get_stats()))
        await asyncio.sleep(0.01)
        os.kill(engine.client.child.pid, signal.SIGKILL)
        begun = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - begun < 5
        assert [type(e) for e in errors] == [EngineDeadError] * 7
        assert "exit status -9" in str(errors[0])
        for call in (engine.check_health, engine.get_stats, lambda: outputs_of(engine.generate([1], GREEDY))):
            with pytest.raises(EngineDeadError, match="exit status -9"):
                await call()
        assert engine.errored and not engine.is_running

    run(work)


def test_a_step_that_fails_ends_what_was_running_and_the_engine_serves_on(engine: AsyncLLM, tmp_path: Path) -> None:
    async def work() -> None:
        want = (await outputs_of(engine.generate(PROMPTS[0], SHORT)))[-1].outputs
        trouble = tmp_path / "trouble"
        for _ in range(2):
            streams = [engine.generate(p, LONG) for p in PROMPTS[:6]]
            await anext(streams[0])
            trouble.touch()
            errors = await asyncio.gather(*map(outputs_of, streams), return_exceptions=True)
            trouble.unlink()
            assert [type(e) for e in errors] == [RequestFailedError] * 6
            assert "device lost" in str(errors[0])
            assert await freed(engine) and engine.is_running
            assert (await outputs_of(engine.generate(PROMPTS[0], SHORT)))[-1].outputs == want

    run(work)


@pytest.mark.parametrize("where", ["step", "sleep"])
def test_an_engine_whose_cache_cannot_be_made_anew_ends(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device fails each step from then on: whoever asks for the engine's health must hear of it."""
    llm, told = tiny_engine(backend=BACKENDS[0], enable_sleep_mode=True), []

    def lost(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.runner, "launch", lost)
    engine = Engine(llm, SimpleQueue(), SimpleNamespace(send=told.append))

    def asked() -> None:
        """A step, or one that a sleep waits for."""
        engine._step() if where == "step" else engine._do(Ask(0, "sleep", {"mode": "wait"}))

    for name in ("a", "b"):
        engine._add(Add(0, name, PROMPTS[0], GREEDY, 0, None))
        if name == "b":
            monkeypatch.setattr(llm.backend, "zeros", lost)
            with pytest.raises(RuntimeError, match="device lost"):
                asked()
        else:
            engine._step()
    assert [type(report.error) for report in told if isinstance(report, Ended)] == [RequestFailedError] * 2


def test_what_ended_well_in_a_step_that_fails_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of a step is read, and ends; then the step fails, which is the fate of the other one alone."""
    llm, told = tiny_engine(backend=BACKENDS[0]), []
    engine = Engine(llm, SimpleQueue(), SimpleNamespace(send=told.append))
    engine._add(Add(0, "short", PROMPTS[0], replace(GREEDY, max_tokens=1), 0, None))
    engine._add(Add(1, "long", PROMPTS[0], LONG, 0, None))
    push = llm.processor.push

    def fails(request: Any, *args: Any) -> Any:
        if request.id == "long":
            raise RuntimeError("planted")
        return push(request, *args)

    monkeypatch.setattr(llm.processor, "push", fails)
    while llm.has_unfinished_requests():
        engine._step()
    reports = {r.number: r.error for r in told if isinstance(r, Ended)}
    ((number, output),) = next(r.outputs for r in told if isinstance(r, News))
    assert list(reports) == [1] and isinstance(reports[1], RequestFailedError)
    assert number == 0 and output.finished and output.outputs[0].finish_reason == "length"
    assert not engine.numbers and not llm.processor.families


def test_who_leaves_while_a_sleep_waits_is_not_waited_for() -> None:
    llm, told = tiny_engine(backend=BACKENDS[0], enable_sleep_mode=True), []
    engine = Engine(llm, SimpleQueue(), SimpleNamespace(send=told.append))
    engine._add(Add(0, "leaves", PROMPTS[0], LONG, 0, None))
    engine._add(Add(1, "stays", PROMPTS[0], SHORT, 0, None))
    for command in (Add(2, "late", PROMPTS[0], SHORT, 0, None), Abort((0, 2)), Ask(9, "is_sleeping", {})):
        engine.inbox.put(command)
    engine._do(Ask(8, "sleep", {"mode": "wait"}))
    assert llm.is_sleeping() and llm.scheduler.step < 9
    engine._take_commands(wait=False)
    last = {n: o.outputs[0].finish_reason for r in told if isinstance(r, News) for n, o in r.outputs if o.finished}
    assert last == {0: "abort", 1: "length"}
    # what else was asked meanwhile comes behind the sleep, in its order
    others = [(type(r), r.number) for r in told if not isinstance(r, News)]
    assert others == [(Answer, 8), (Ended, 2), (Answer, 9)]
    assert not engine.numbers


def test_shutting_down_ends_what_is_open() -> None:
    async def work() -> None:
        model = replace(spec_of(TINY), embed=Embed(0.005))
        async with start(BACKENDS[0], model=model, enforce_eager=True) as engine:
            stream = engine.generate(PROMPTS[0], LONG)
            output = await anext(stream)
            assert not output.finished
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await outputs_of(stream)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await engine.get_stats()

    run(work)


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    """Even if that is killed, and in the middle of a step."""
    child = Child(__name__, "hold_an_engine")
    child.commands.send(BACKENDS[0])
    (pid,) = child.results.recv()
    assert psutil.pid_exists(pid)
    child.close()
    assert gone([pid])


def hold_an_engine(commands: Any, results: Any) -> None:
    model = replace(spec_of(TINY), embed=Embed(0.002))
    engine = start(commands.recv(), model=model, enforce_eager=True)

    async def work() -> None:
        async for _ in engine.generate(PROMPTS[0], LONG):
            results.send([engine.client.child.pid])
            await asyncio.sleep(60)

    run(work)


def test_a_process_that_dies_while_it_starts_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match="exit status 1"):
        start(BACKENDS[0])


def script(text: str, folder: Path) -> str:
    """What a script prints. It has no `if __name__ == "__main__"`, and its engine is left to the end of the process."""
    path = folder / "script.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_needs_no_guard_and_leaves_no_process(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    out = script(
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        "from async_engines import outputs_of, run, start\n"
        "from octavo.engine import SamplingParams\n"
        "class Mine(SamplingParams): pass\n"
        # what only the script knows is an error that says so, of that request or of the start
        "try:\n"
        f"    start({BACKENDS[0]!r}, weights=Mine())\n"
        "except ValueError as error:\n"
        "    print('start', 'belong in a module' in str(error))\n"
        f"engine = start({BACKENDS[0]!r})\n"
        "try:\n"
        "    run(lambda: outputs_of(engine.generate([1, 2, 3], Mine())))\n"
        "except ValueError as error:\n"
        "    print('request', 'belong in a module' in str(error))\n"
        "outputs = run(lambda: outputs_of(engine.generate([1, 2, 3])))\n"
        "print(engine.client.child.pid, len(outputs[-1].outputs[0].token_ids))\n",
        tmp_path,
    )
    *refused, last = out.splitlines()
    assert refused == ["start True", "request True"]
    pid, count = map(int, last.split())
    assert count == 16 and gone([pid])
