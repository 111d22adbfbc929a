"""Replicas in processes of their own: their tokens, their failures, and the lines on which rank 0 hears of them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grammar_world
import numpy as np
import pytest
import torch  # noqa: F401
from oracle import greedy
from ranks import FALLING, STUMBLING
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, AsyncLLM, RequestOutputKind
from octavo.engine.errors import DivergenceError, RankLostError
from octavo.engine.parallel import team as team_module
from octavo.engine.parallel.team import Digest, Done, Failed, Peer, Reset, Result, Team
from octavo.engine.runner import StepResult
from octavo.models.logit_edits import LogitsProcessor

PATIENCE = 20.0  # seconds
LAST = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
FALLS = replace(GREEDY, extra_args={"falling": {}})


def pair(**more: Any) -> LLM:
    return engine(EIGHT_HEADS, backend="torch", data_parallel_size=2, **more)


def want(prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in prompts]


def test_a_replica_elsewhere_fails_alone_and_lost_it_ends_the_engine() -> None:
    llm, expected = pair(logits_processors=[FALLING], disable_log_stats=False), want(PROMPTS[:4])
    assert tokens(llm, PROMPTS[:4]) == expected
    # by the first alive: the second, elsewhere, has b and d
    for name, prompt, params in zip("abcd", PROMPTS, (GREEDY, FALLS, GREEDY, GREEDY), strict=False):
        llm.add_request(name, prompt, params)
    outputs: dict[str, Any] = {}
    raised = Counter[str]()
    while llm.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output.outputs[0] for output in llm.step()}
        except ValueError as error:
            raised[str(error).split(" returned")[0]] += 1
    assert raised == {"logits processor 'falling'": 1}
    assert [outputs[name].finish_reason for name in "abcd"] == ["length", "error", "length", "error"]
    assert [list(outputs[name].token_ids) for name in "ac"] == [expected[0], expected[2]]
    assert tokens(llm, PROMPTS[:4]) == expected
    by_replica = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens"}
    assert by_replica["0"] >= by_replica["1"] > 4 * GREEDY.max_tokens - 1
    assert llm.team and llm.team.peers[0].child
    os.kill(llm.team.peers[0].child.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 1 .*ended with status -9; the model needs all of its 2 ranks"):
        tokens(llm, PROMPTS[:2])
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_everything_else_that_is_read_comes_from_there_too(tmp_path: Path) -> None:
    one, two = engine(EIGHT_HEADS, backend="torch"), pair()
    read = replace(GREEDY, logprobs=3, prompt_logprobs=2, max_tokens=6)
    outputs = [llm.generate(PROMPTS[:4], read, use_tqdm=False) for llm in (one, two)]
    for a, b in zip(*outputs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True):
            assert (x and x.keys()) == (y and y.keys())
    vectors = [[o.outputs.embedding for o in llm.embed(PROMPTS[:4], use_tqdm=False)] for llm in (one, two)]
    np.testing.assert_allclose(*vectors, atol=1e-5)
    scores = [[s.logprob for each in llm.score(PROMPTS[:3], [[5, 6]] * 3) for s in each] for llm in (one, two)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    two.shutdown()
    rng = np.random.default_rng(0)
    prompts = [{"prompt_embeds": rng.standard_normal((9, EIGHT_HEADS.embed_dim), np.float32)} for _ in range(4)]
    made = []
    for llm in (engine(EIGHT_HEADS, backend="torch", enable_prompt_embeds=True), pair(enable_prompt_embeds=True)):
        made.append(tokens(llm, prompts))
        llm.shutdown()
    assert made[0] == made[1]
    pytest.importorskip("llguidance")
    folder = grammar_world.save_tokenizer(tmp_path)
    formed = grammar_world.formed({"regex": "(yes|no|maybe)+"}, logprobs=None)
    texts = []
    for more in ({}, {"data_parallel_size": 2}):
        llm = grammar_world.engine(folder, "torch", **more)
        params = [replace(formed, seed=i) for i in range(4)]
        texts.append([o.outputs[0].text for o in llm.generate([grammar_world.PROMPT] * 4, params, use_tqdm=False)])
        llm.shutdown()
    assert texts[0] == texts[1] and all(texts[0])


@pytest.mark.slow
def test_a_rank_elsewhere_that_fails_alone_ends_the_engine() -> None:
    llm = pair(logits_processors=[STUMBLING])
    with pytest.raises(ValueError, match="cannot be sent"):
        llm.register_logits_processor(LogitsProcessor("local", lambda logits, history, params, ops: logits))
    with pytest.raises(ValueError, match="stumbling"):
        llm.register_logits_processor(STUMBLING)
    assert [p.name for p in llm.runner.processors] == ["stumbling"]
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.add_request("b", PROMPTS[1], replace(GREEDY, extra_args={"stumbling": {}}))
    # it is the first of its replica, so its error is that replica's
    with pytest.raises(ValueError, match="logits processor 'stumbling' returned"):
        while llm.has_unfinished_requests():
            llm.step()
    assert tokens(llm, PROMPTS[:4]) == want(PROMPTS[:4])
    llm.shutdown()


@pytest.mark.slow
def test_an_async_engine_has_replicas_too() -> None:
    async def made() -> tuple[list[list[int]], dict[str, float]]:
        given = {"weights": numpy_weights(EIGHT_HEADS), "backend": "torch", "threads": 1, "disable_log_stats": False}
        sizes = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 120}
        async with AsyncLLM(spec_of(EIGHT_HEADS), data_parallel_size=2, **given, **sizes) as llm:

            async def tokens_of(prompt: list[int]) -> list[int]:
                (last,) = [o async for o in llm.generate({"prompt_token_ids": prompt}, LAST) if o.finished]
                return list(last.outputs[0].token_ids)

            found = await asyncio.gather(*map(tokens_of, PROMPTS[:4]))
            counts = {
                m.labels["engine"]: m.value for m in await llm.get_metrics() if m.name == "vllm:generation_tokens"
            }
            return found, counts

    found, counts = asyncio.run(made())
    assert found == want(PROMPTS[:4])
    assert counts == {"0": 2 * GREEDY.max_tokens, "1": 2 * GREEDY.max_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_replicas_sleep_and_wake(level: int, tmp_path: Path) -> None:
    """Of a checkpoint, which rank 0 tells all others when they may load."""
    tiny_hf = pytest.importorskip("tiny_hf")
    tiny_hf.save(tiny_hf.make("Llama", seed=3), tmp_path)
    llm = LLM(str(tmp_path), backend="torch", data_parallel_size=2, skip_tokenizer_init=True, enable_sleep_mode=True,
              max_model_len=128, num_gpu_blocks_override=64, threads=1)  # fmt: skip
    expected = tokens(llm, PROMPTS[:4])
    for tags in (None, ["weights"]):
        llm.sleep(level)
        llm.wake_up(tags)
        llm.wake_up()
        assert tokens(llm, PROMPTS[:4]) == expected
    llm.shutdown()


# lines without processes: four ranks, two a replica


@pytest.fixture
def lines() -> Iterator[tuple[Team, list[Connection]]]:
    here, there = zip(*(Pipe() for _ in range(3)), strict=True)
    team = Team([Peer(i + 1, line, line) for i, line in enumerate(here)], None, 2)
    yield team, list(there)
    team.close()


def say(line: Connection, *reports: Any) -> None:
    for report in reports:
        line.send_bytes(pickle.dumps(report))


def result(*ids: int) -> Result:
    return Result(StepResult(list(ids)))


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_part_tells_its_own_ranks_and_hears_its_first(lines: tuple[Team, list[Connection]]) -> None:
    team, (one, two, three) = lines
    first, second = team.part(0), team.part(1)
    assert (first.ranks, second.ranks) == ({1}, {2, 3})
    second.tell(Reset(7))
    assert [line.poll(0.05) for line in (one, two, three)] == [False, True, True]
    say(two, result(4), result(5), Failed(ValueError("planted")), result(6))
    assert second.result().token_ids == [4]
    assert second.result().token_ids == [5]
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"):
            second.result()


def test_a_part_that_starts_anew_forgets_what_its_ranks_said(lines: tuple[Team, list[Connection]]) -> None:
    team, (one, two, three) = lines
    second = team.part(1)
    say(one, Failed(KeyError("of another replica")))
    say(three, Failed(ValueError("alike")))
    say(two, result(4), Failed(ValueError("alike")))
    until(lambda: team.mail.failed.keys() == {1, 2, 3})

    def answer() -> None:
        for line in (two, three):
            number = pickle.loads(line.recv_bytes()).number
            say(line, Done(number))

    thread = threading.Thread(target=answer)
    thread.start()
    second.reset()
    thread.join()
    assert team.mail.failed.keys() == {1} and not team.mail.results
    say(two, result(9))
    assert second.result().token_ids == [9]


@pytest.mark.parametrize(("failed", "is_lost"), [((3,), True), ((2,), False), ((2, 3), False)])
def test_a_rank_elsewhere_is_alone_with_its_error_if_its_first_has_none(
    failed: tuple[int, ...], is_lost: bool, lines: tuple[Team, list[Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_module, "GRACE", 0.05)
    team, there = lines
    for rank in failed:
        say(there[rank - 1], Failed(ValueError("planted")))
    until(lambda: len(team.mail.failed) == len(failed))
    time.sleep(0.2)
    assert (team.mail.lost is not None) == is_lost
    if is_lost:
        with pytest.raises(RankLostError, match="rank 3 failed: ValueError: planted"):
            team.part(1).result()


def test_ranks_of_one_replica_are_compared_with_its_first(lines: tuple[Team, list[Connection]]) -> None:
    team, (one, two, three) = lines
    first, second = team.part(0), team.part(1)
    # replicas differ, of course
    say(one, Digest(8, 1, 1, 1))
    say(two, Digest(8, 2, 2, 2), Digest(16, 5, 5, 5))
    say(three, Digest(8, 2, 2, 2))
    until(lambda: team.mail.digests.keys() == {1, 2, 3} and len(team.mail.digests[2]) == 2)
    first.compare(Digest(8, 1, 1, 1))
    second.check()
    say(three, Digest(16, 5, 5, 6))
    until(lambda: team.mail.digests[3])
    with pytest.raises(DivergenceError, match="the rows of rank 3 differ from those of rank 2 behind step 16"):
        second.check()
