"""The Python API on a tiny model: what comes out, in what order, and that wrong input harms nobody."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from backends import BACKENDS
from oracle import greedy, logits
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, engine, numpy_weights, spec_of, tokens

from octavo.engine import LLM, SamplingParams
from octavo.engine.plan import Plan
from octavo.engine.runner import Pending, StepResult


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def alone(backend: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """What a request gets without any company."""
    return tokens(engine(backend=backend, max_num_seqs=1, async_scheduling=False), [prompt], params)[0]


def test_outputs_come_in_the_order_of_the_prompts(backend: str) -> None:
    outputs = engine(backend=backend).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(o.prompt_token_ids) for o in outputs] == PROMPTS
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_one_set_of_params_a_prompt(backend: str) -> None:
    llm = engine(backend=backend)
    params = [replace(GREEDY, max_tokens=i + 1) for i in range(len(PROMPTS))]
    assert [len(t) for t in tokens(llm, PROMPTS, params)] == [i + 1 for i in range(len(PROMPTS))]


def test_the_last_of_more_prompts_than_seats_start_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are seats; outputs come in the order of the prompts, each with its own tokens."""
    llm, most, queued = engine(max_num_seqs=3), [2, 1, 3, 2, 5], []
    add = llm.scheduler.add
    monkeypatch.setattr(llm.scheduler, "add", lambda r: (queued.append(r.max_tokens), add(r)))
    params = [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in most]
    outputs = llm.generate(PROMPTS[:5], params, use_tqdm=False)
    assert queued == [2, 1, 5, 3, 2]
    alone = [llm.generate(p, n, use_tqdm=False)[0] for p, n in zip(PROMPTS, params)]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert [len(o.outputs[0].token_ids) for o in outputs] == most


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "synchronous"])
@pytest.mark.parametrize("blocks", [120, 14], ids=["roomy", "tight"])
def test_n_samples_are_those_of_n_requests(backend: str, overlap: bool, blocks: int) -> None:
    pool = {"num_gpu_blocks_override": blocks, "max_model_len": 104} if blocks == 14 else {}
    llm = engine(backend=backend, async_scheduling=overlap, enable_prefix_caching=False, **pool)
    output = llm.generate([PROMPTS[3]], replace(RANDOM, n=3), use_tqdm=False)[0]
    got = [list(o.token_ids) for o in output.outputs]
    want = [alone(backend, PROMPTS[3], replace(RANDOM, seed=RANDOM.seed + i)) for i in range(3)]
    assert got == want and len({tuple(t) for t in got}) == 3
    if blocks == 120:
        # the prompt once, and its last token again for each of two siblings
        assert llm.scheduler.num_prompt_tokens == len(PROMPTS[3]) + 2


def test_seeds_do_not_depend_on_the_batch_and_none_is_drawn(backend: str) -> None:
    llm = engine(backend=backend)
    first, second = (tokens(llm, [PROMPTS[0]] * 4, replace(RANDOM, seed=None)) for _ in range(2))
    assert len({tuple(t) for t in first + second}) == 8
    assert tokens(engine(backend=backend), [PROMPTS[0]] * 4, replace(RANDOM, seed=None)) == first


def test_stop_ids_end_a_request_while_the_next_step_is_in_flight(backend: str) -> None:
    want = alone(backend, PROMPTS[0], GREEDY)
    stop = want[4]
    llm = engine(backend=backend)
    output = llm.generate([PROMPTS[0]], replace(GREEDY, stop_token_ids=(stop,)), use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == want[: want.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_holds_stop_ids_back(backend: str) -> None:
    want = alone(backend, PROMPTS[0], GREEDY)
    params = replace(GREEDY, stop_token_ids=(want[0],), min_tokens=6)
    output = engine(backend=backend).generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
    assert want[0] not in output.token_ids[:6] and len(output.token_ids) > 6


def test_logprobs_are_those_of_the_dense_oracle(backend: str) -> None:
    llm = engine(backend=backend)
    outputs = llm.generate(PROMPTS[:4], replace(RANDOM, logprobs=5, max_tokens=6), use_tqdm=False)
    for output in outputs:
        made = output.outputs[0]
        ids = list(output.prompt_token_ids) + list(made.token_ids)
        x_TV = logits(spec_of(TINY), numpy_weights(TINY), ids)
        log_TV = x_TV - np.log(np.exp(x_TV).sum(-1, keepdims=True))
        total = 0.0
        for i, (token, entry) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
            row = log_TV[len(output.prompt_token_ids) - 1 + i]
            assert next(iter(entry)) == token and len(entry) in (5, 6)
            assert {*np.argsort(-row)[:5].tolist()} <= {*entry}
            for other, logprob in entry.items():
                assert abs(logprob.logprob - row[other]) < 2e-5
                assert logprob.rank == (row >= row[other]).sum()
            total += entry[token].logprob
        assert abs(total - made.cumulative_logprob) < 1e-4


def test_a_whole_vocabulary_of_logprobs_sums_to_one(backend: str) -> None:
    llm = engine(backend=backend, max_logprobs=-1)
    made = llm.generate([PROMPTS[0]], replace(GREEDY, logprobs=-1, max_tokens=3), use_tqdm=False)[0].outputs[0]
    for entry in made.logprobs:
        assert len(entry) == VOCAB and abs(sum(np.exp(x.logprob) for x in entry.values()) - 1) < 1e-5


def test_abort_frees_blocks_at_once_and_others_go_on(backend: str) -> None:
    llm = engine(backend=backend, async_scheduling=True)
    llm.add_request("a", PROMPTS[3], GREEDY)
    llm.add_request("b", PROMPTS[0], GREEDY)
    for _ in range(4):
        llm.step()
    held = llm.scheduler.blocks.usage()
    llm.abort("a")
    assert llm.scheduler.blocks.usage() < held
    seen: list[Any] = []
    while llm.has_unfinished_requests():
        seen += llm.step()
    assert {o.request_id for o in seen} == {"b"}
    assert list(seen[-1].outputs[0].token_ids) == alone(backend, PROMPTS[0], GREEDY)


def test_step_by_step_outputs_grow(backend: str) -> None:
    llm = engine(backend=backend)
    llm.add_request("x", PROMPTS[0], GREEDY)
    lengths = []
    while llm.has_unfinished_requests():
        lengths += [len(o.outputs[0].token_ids) for o in llm.step()]
    assert lengths == list(range(1, GREEDY.max_tokens + 1))


def test_what_ends_during_another_call_is_returned_by_the_next_step() -> None:
    llm = engine()
    llm.add_request("short", PROMPTS[0], replace(GREEDY, max_tokens=3))
    llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    assert llm.has_unfinished_requests()
    (output,) = llm.step()
    assert (output.request_id, output.finished, len(output.outputs[0].token_ids)) == ("short", True, 3)
    assert not llm.has_unfinished_requests() and not llm.processor.families


def test_streams_may_be_read_in_turns(tmp_path: Path) -> None:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    llm = engine(tokenizer=str(tmp_path))
    want = ["".join(llm.stream(p, GREEDY)) for p in PROMPTS[:2]]
    assert [text.count("w") for text in want] == [GREEDY.max_tokens] * 2
    streams, got = [llm.stream(p, GREEDY) for p in PROMPTS[:2]], ["", ""]
    for first, second in itertools.zip_longest(*streams, fillvalue=""):
        got = [got[0] + first, got[1] + second]
    assert got == want and not llm.has_unfinished_requests() and not llm.processor.families


def test_no_sibling_takes_an_id_that_is_in_use() -> None:
    llm = engine()
    llm.add_request("1_x", PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="'1_x' is in use"):
        llm.add_request("x", PROMPTS[0], replace(RANDOM, n=2))
    assert list(llm.scheduler.alive) == ["1_x"]


def test_priority_goes_first() -> None:
    llm = engine(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=64)
    for name, priority in (("low", 5), ("mid", 1), ("high", 0)):
        llm.add_request(name, PROMPTS[0], GREEDY, priority=priority)
    ended = []
    while llm.has_unfinished_requests():
        ended += [o.request_id for o in llm.step() if o.finished]
    assert ended == ["high", "mid", "low"]


def test_salted_prompts_share_only_with_their_own() -> None:
    llm = engine()
    hits = [
        llm.generate([{"prompt_token_ids": PROMPTS[3]} | salt], GREEDY, use_tqdm=False)[0].num_cached_tokens
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"cache_salt": "x"}, {})
    ]
    full = (len(PROMPTS[3]) - 1) // 8 * 8
    assert hits == [0, 0, 0, full, full]
    assert llm.reset_prefix_cache()
    assert llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


BAD_PROMPTS = {
    "empty": ([], "empty"),
    "negative": ([1, -1], "-1 is outside the vocabulary: ids go from 0 to 96"),
    "large": ([VOCAB], "97 is outside the vocabulary"),
    "not an id": ([1.5], "1.5 is outside"),
    "too long": ([1] * 128, "128"),
    "text without tokenizer": ("hello", "no tokenizer"),
    "unknown key": ({"prompt_ids": [1]}, "prompt_ids"),
    "no prompt": (3, "3"),
    "salt of another type": ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt 3"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_that_requests_error(name: str) -> None:
    prompt, words = BAD_PROMPTS[name]
    llm = engine()
    with pytest.raises(ValueError, match=words):
        llm.generate([PROMPTS[0], prompt], GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    assert tokens(llm, [PROMPTS[0]]) == [greedy(spec_of(TINY), numpy_weights(TINY), PROMPTS[0], 24)]


def test_params_of_the_wrong_length_name_both() -> None:
    with pytest.raises(ValueError, match="2 sampling params for 3 prompts"):
        engine().generate(PROMPTS[:3], [GREEDY] * 2, use_tqdm=False)


BAD_ARGUMENTS = {
    "layout": ({"layout": "diagonal"}, "token_major, head_major"),
    "attention": ({"attention": "magic"}, "cpu"),
    "argument": ({"max_num_seq": 3}, "max_num_seqs"),
    "block size": ({"block_size": 12}, "8, 16, 32"),
    "budget": ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "at least 4"),
    "pool": ({"num_gpu_blocks_override": 3}, "largest max_model_len that fits is 16"),
    "length": ({"max_model_len": 4096}, "128"),
    "backend": ({"backend": "tensorflow"}, "torch, jax"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_what_would_be_right(name: str) -> None:
    arguments, words = BAD_ARGUMENTS[name]
    with pytest.raises(ValueError, match=words):
        engine(**arguments)


def test_an_unknown_model_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere/at-all"):
        LLM("nowhere/at-all", download_dir=str(tmp_path))


def test_a_failed_launch_ends_the_requests_and_the_engine_serves_on(backend: str) -> None:
    llm = engine(backend=backend)
    llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    launch, llm.runner.launch = llm.runner.launch, _fail
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    llm.runner.launch = launch
    output = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == alone(backend, PROMPTS[3], GREEDY)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_cannot_be_read_ends_all_requests(backend: str, error: type[BaseException]) -> None:
    """Its token is lost, so nobody may go on behind it. The next step says so."""
    llm = engine(backend=backend, async_scheduling=True)
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()
    llm.replicas[0].unread = deque([Unreadable(error)])
    with pytest.raises(error):
        llm.step()
    (output,) = llm.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("a", "error")
    assert not llm.has_unfinished_requests()
    assert tokens(llm, [PROMPTS[0]]) == [alone(backend, PROMPTS[0], GREEDY)]


class Unreadable:
    def __init__(self, error: type[BaseException]):
        self.error = error

    def result(self) -> StepResult:
        raise self.error("while waiting")


def _fail(plan: Plan, mask: Any) -> Pending:
    raise RuntimeError("device lost")


class SlowDevice:
    """A device on which each step takes 20 ms, counted from its launch or from the end of the step before."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def launch(self, plan: Plan, mask: Any) -> Any:
        self.free_at = max(self.free_at, time.perf_counter()) + 0.020
        return _Promise(plan, self.free_at)


class _Promise:
    def __init__(self, plan: Plan, ready_at: float):
        self.plan, self.ready_at = plan, ready_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return StepResult([1] * len(self.plan.sampled))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "synchronous"])
def test_host_work_hides_behind_the_device(overlap: bool) -> None:
    llm = engine(async_scheduling=overlap)
    llm.runner.launch = SlowDevice().launch
    schedule = llm.scheduler.schedule

    def slow_schedule() -> Plan | None:
        time.sleep(0.015)
        return schedule()

    llm.scheduler.schedule = slow_schedule
    llm.add_request("x", PROMPTS[0], replace(GREEDY, max_tokens=40, ignore_eos=True))
    times = []
    while llm.has_unfinished_requests():
        start = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - start)
    # the median: a busy machine may lose a step or two
    usual = statistics.median(times)
    assert usual < 0.025 if overlap else usual >= 0.035
