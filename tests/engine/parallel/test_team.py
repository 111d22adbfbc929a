"""Several processes run one model: the tokens of one, and an error instead of a hang when one is lost or differs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch  # noqa: F401
from oracle import greedy
from ranks import ASTRAY, FALLING, STUMBLING
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, RANDOM, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams
from octavo.engine.errors import DivergenceError, RankLostError


def _team(size: int = 2, **arguments: object) -> LLM:
    return engine(EIGHT_HEADS, backend="torch", tensor_parallel_size=size, **arguments)


def _want(prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in prompts]


def test_two_processes_give_the_tokens_of_one_and_a_killed_one_ends_the_other() -> None:
    llm = _team(num_gpu_blocks_override=16, max_model_len=120, state_check_interval=4)
    assert tokens(llm, PROMPTS[:5]) == _want(PROMPTS[:5])
    assert tokens(llm, PROMPTS[:5]) == _want(PROMPTS[:5])
    assert llm.scheduler.num_preemptions > 0
    assert llm.team is not None and not llm.team.own
    one = engine(EIGHT_HEADS, backend="torch", max_num_seqs=2)
    samples = [x.generate(PROMPTS[3], replace(RANDOM, n=2), use_tqdm=False)[0] for x in (one, llm)]
    assert [o.token_ids for o in samples[0].outputs] == [o.token_ids for o in samples[1].outputs]
    (peer,) = llm.team.peers
    assert peer.child is not None
    llm.add_request("a", PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    llm.step()
    os.kill(peer.child.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises((RankLostError, RuntimeError)):
        for _ in range(90):
            llm.step()
    with pytest.raises(
        RankLostError, match=r"rank 1 \(process \d+\) ended with status -9; the model needs all of its 2"
    ):
        tokens(llm, PROMPTS[:1])
    assert time.monotonic() - began < 5
    assert not llm.runner.has_cache


@pytest.mark.slow
def test_ranks_that_differ_are_stopped_with_the_number_of_the_step() -> None:
    llm = _team(logits_processors=[ASTRAY], state_check_interval=8)
    params = replace(GREEDY, extra_args={"astray": {}}, max_tokens=80)
    assert len(llm.generate([PROMPTS[0]], replace(params, max_tokens=24), use_tqdm=False)) == 1
    with pytest.raises(DivergenceError, match="the rows of rank 1 differ from those of rank 0 behind step") as caught:
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
    step = int(str(caught.value).split("behind step ")[1].split(";")[0])
    # 24 steps before; with 40 ids the 32nd of this request begins, and a check follows within 8
    assert 24 + 31 <= step < 24 + 31 + 8
    with pytest.raises(DivergenceError):
        tokens(llm, PROMPTS[:1])


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_engine_with_its_error() -> None:
    llm = _team(logits_processors=[STUMBLING])
    with pytest.raises((RankLostError, RuntimeError)):
        llm.generate([PROMPTS[0]], replace(GREEDY, extra_args={"stumbling": {}}), use_tqdm=False)
    time.sleep(3.5)
    with pytest.raises(RankLostError, match="rank 1 failed: ValueError: logits processor 'stumbling' returned"):
        tokens(llm, PROMPTS[:1])


@pytest.mark.slow
def test_a_step_that_fails_everywhere_ends_its_requests_alone() -> None:
    llm = _team(logits_processors=[FALLING])
    for _ in range(2):
        with pytest.raises(ValueError, match="logits processor 'falling' returned"):
            llm.generate([PROMPTS[0]], replace(GREEDY, extra_args={"falling": {}}), use_tqdm=False)
        assert tokens(llm, PROMPTS[:2]) == _want(PROMPTS[:2])


@pytest.mark.slow
def test_what_a_rank_cannot_build_is_an_error_of_rank_0() -> None:
    with pytest.raises(ValueError, match=r"the cache is too small"):
        _team(num_gpu_blocks_override=2)
    llm = _team(4, num_gpu_blocks_override=40)
    pids = [peer.child.pid for peer in llm.team.peers if peer.child] if llm.team else []
    llm.shutdown()
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RankLostError, match="shut down"):
        tokens(llm, PROMPTS[:1])
