"""Several users of one engine at a time: streams, generate beside queued requests, threads, failures, interruptions."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, engine, tokens

from octavo.engine import LLM, QueueFullError, SamplingParams
from octavo.engine.outputs import RequestOutput

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ mood }}"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words w0, w1, ... with two more than the model has."""
    path = tmp_path_factory.mktemp("words")
    words = {f"w{i}": i for i in range(VOCAB + 2)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens, **more)


@functools.cache
def alone(backend: str, first: int, last: int) -> list[list[int]]:
    """What a new engine makes of some of the PROMPTS."""
    return tokens(engine(backend=backend), PROMPTS[first:last])


def drained(llm: LLM) -> dict[str, RequestOutput]:
    """The last output of each request that steps to the end return."""
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {o.request_id: o for o in llm.step()}
    return outputs


def assert_empty(llm: LLM) -> None:
    """Nobody is left, and the engine goes on as a new one would."""
    drained(llm)
    s, p = llm.scheduler, llm.processor
    assert not (s.alive or s.running or len(s.waiting) or s.orphans or p.families or p.home or llm.touched)
    assert s.blocks.usage() == 0 and len(s.free_rows) == s.config.max_num_seqs
    assert tokens(llm, PROMPTS[:3]) == alone(llm.config.backend, 0, 3)


def test_what_was_queued_keeps_its_end_when_generate_runs_it(backend: str) -> None:
    llm = engine(backend=backend)
    llm.add_request("short", PROMPTS[1], params(3))
    llm.add_request("long", PROMPTS[2], params(40))
    assert tokens(llm, [PROMPTS[0]]) == alone(backend, 0, 1)
    ends = drained(llm)
    assert {name: len(o.outputs[0].token_ids) for name, o in ends.items()} == {"short": 3, "long": 40}
    assert all(o.finished for o in ends.values())
    assert_empty(llm)


def test_streams_run_beside_each_other_generate_and_step(folder: Path) -> None:
    llm = engine(tokenizer=str(folder))
    want = [o.outputs[0].text for o in llm.generate(PROMPTS[:3], params(12), use_tqdm=False)]
    one, two, three = (llm.stream(p, params(12)) for p in PROMPTS[:3])
    texts = [next(one), next(two), next(three)]
    llm.add_request("queued", PROMPTS[4], params(2))
    assert all(o.request_id == "queued" for _ in range(2) for o in llm.step())
    llm.generate([PROMPTS[3]], params(30), use_tqdm=False)
    texts = [first + "".join(rest) for first, rest in zip(texts, (one, two, three), strict=True)]
    assert texts == want
    assert drained(llm)["queued"].finished
    assert_empty(llm)


def test_a_stream_that_is_aborted_inside_its_loop_ends(folder: Path) -> None:
    llm = engine(tokenizer=str(folder))
    pieces = []
    for piece in llm.stream(PROMPTS[0], params(30)):
        pieces.append(piece)
        llm.abort(list(llm.processor.families))
    assert len(pieces) == 1
    for _ in llm.stream(PROMPTS[0], params(30)):
        break
    assert_empty(llm)


def test_a_stream_says_that_a_step_of_somebody_else_failed(folder: Path) -> None:
    llm = engine(tokenizer=str(folder))
    stream = llm.stream(PROMPTS[0], params(30))
    next(stream)
    broken(llm, llm.runner, "launch", 2, lambda: llm.generate(PROMPTS[1:3], GREEDY, use_tqdm=False))
    with pytest.raises(RuntimeError, match="was ended by a step that failed in another call"):
        list(stream)
    assert_empty(llm)


def broken(llm: LLM, owner: Any, name: str, at: int, call: Callable[[], Any]) -> None:
    """Interrupts `call` at the at-th use of a method, after its work is done."""
    whole, count = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result, count = whole(*args, **kwargs), count + 1
        if count == at:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        call()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "synchronous"])
@pytest.mark.parametrize(
    "place",
    [
        ("scheduler", "add"), ("scheduler", "schedule"), ("scheduler", "_leave"), ("scheduler", "update"),
        ("scheduler", "_admit"), ("runner", "launch_forward"), ("runner", "launch"), ("backend", "read"),
        ("processor", "push"), ("processor", "families_of"),
    ],
    ids=lambda p: ".".join(p),
)  # fmt: skip
def test_an_interruption_anywhere_leaves_a_usable_engine(overlap: bool, place: tuple[str, str]) -> None:
    llm = engine(async_scheduling=overlap, num_gpu_blocks_override=40, max_num_seqs=2)
    llm.add_request("queued", PROMPTS[4], params(60))
    owner = getattr(llm, place[0])
    broken(llm, owner, place[1], 3, lambda: llm.generate(PROMPTS, replace(GREEDY, max_tokens=5), use_tqdm=False))
    ends = drained(llm)
    # before the first step nobody but the interrupted ones is concerned
    assert ends["queued"].outputs[0].finish_reason == ("length" if place[1] == "add" else "error")
    assert_empty(llm)


def test_threads_share_an_engine(backend: str) -> None:
    llm, got = engine(backend=backend), {}
    want = {i: alone(backend, i, i + 4) for i in range(4)}

    def work(i: int) -> None:
        got[i] = tokens(llm, PROMPTS[i : i + 4])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert got == want
    assert_empty(llm)


def test_the_progress_bar_keeps_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    engine().generate([PROMPTS[1]], params(2), use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "generating" in captured.err


def test_ids_of_samples_are_in_use_too() -> None:
    llm = engine()
    llm.add_request("1_x", PROMPTS[1], params(4))
    with pytest.raises(ValueError, match="'1_x' is in use"):
        llm.add_request("x", PROMPTS[1], replace(RANDOM, n=2))
    llm.add_request("y", PROMPTS[1], replace(RANDOM, n=2, max_tokens=4))
    with pytest.raises(ValueError, match="'0_y' is in use"):
        llm.add_request("0_y", PROMPTS[1], GREEDY)
    assert set(drained(llm)) == {"1_x", "y"}
    assert_empty(llm)


BAD_REQUESTS = {
    "no params": (lambda llm: llm.add_request("a", [1], None), "None is not a SamplingParams"),
    "params of a dict": (lambda llm: next(llm.stream([1], {"n": 1})), "is not a SamplingParams"),
    "params of none": (lambda llm: llm.generate([[1]], [], use_tqdm=False), "0 sampling params for 1 prompts"),
    "id": (lambda llm: llm.add_request(5, [1], GREEDY), "request id 5 is not a string"),
    "abort": (lambda llm: llm.abort(5), "5 is not a list"),
    "salt": (lambda llm: llm.add_request("a", [1] * 9, GREEDY, cache_salt=5), "cache_salt 5 is not a string"),
    "priority": (lambda llm: llm.add_request("a", [1], GREEDY, priority="high"), "priority 'high' is not a whole"),
    "priorities": (lambda llm: llm.generate([[1]], GREEDY, priority=0), "priority 0 is not a list"),
    "bytes": (lambda llm: llm.generate(b"\1\2", GREEDY), "a prompt is a string, a list"),
    "a foreign token": (lambda llm: llm.generate("w97", GREEDY), "token id 97, and the model's go to 96"),
    "one message": (lambda llm: llm.chat({"role": "user", "content": "w1"}), "is not a list of at least one"),
    "a text as chat": (lambda llm: llm.chat("w1"), "'w1' is not a list of at least one, like"),
    "conversations": (lambda llm: llm.chat([[{"role": "user"}], 5]), "conversation 5 is not a list of messages"),
    "a message": (lambda llm: llm.chat([5]), "a dict with a role and content, not 5"),
    "tokenize": (lambda llm: llm.chat([{"role": "w2"}], GREEDY, tokenize=False), "tokenize"),
    "template": (lambda llm: next(llm.stream("w1", GREEDY, mood="w3")), "mood: only a list of chat messages"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_named_and_the_engine_serves_on(name: str, folder: Path) -> None:
    call, words = BAD_REQUESTS[name]
    llm = engine(tokenizer=str(folder))
    with pytest.raises(ValueError, match=words):
        call(llm)
    assert_empty(llm)


def test_a_stream_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        next(engine().stream([1], GREEDY))


def test_template_arguments_reach_the_template_by_either_name(folder: Path) -> None:
    llm, chat = engine(tokenizer=str(folder)), [{"role": "w4", "content": "w5"}]
    for form in ({"mood": "w6"}, {"chat_template_kwargs": {"mood": "w6"}}):
        assert llm.chat(chat, params(2), use_tqdm=False, **form)[0].prompt_token_ids == [4, 5, 6]
        assert list(llm.stream(chat, params(2), **form))
    with pytest.raises(NotImplementedError, match="lora_request"):
        llm.chat(chat, params(2), lora_request="mine")


def test_numbers_beyond_all_bounds_mean_the_bound(backend: str) -> None:
    llm = engine(backend=backend)
    huge = SamplingParams(max_tokens=None, min_tokens=10**12, stop_token_ids=[3], seed=1, top_k=10**400)
    made = llm.generate([PROMPTS[1]], huge, use_tqdm=False)[0].outputs[0]
    assert len(made.token_ids) == TINY.max_model_len - 1 and 3 not in made.token_ids
    llm.add_request("salted", PROMPTS[0], GREEDY, cache_salt="\ud800")
    assert drained(llm)["salted"].finished
    assert_empty(llm)


def test_the_cache_is_not_reset_in_the_middle_of_a_step() -> None:
    llm, answers = engine(), []
    thread = threading.Thread(target=lambda: answers.append(llm.reset_prefix_cache()))
    with llm.lock:
        thread.start()
        thread.join(0.2)
        assert not answers
    thread.join()
    assert answers == [True]


def test_threads_that_add_at_a_time_do_not_pass_the_bound_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, both, refused = engine(max_num_seqs=1, max_num_queued_reqs=1), threading.Barrier(2), []
    check = llm._check_queue

    def checked(*args: Any) -> None:
        check(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)

    def add(name: str) -> None:
        try:
            llm.add_request(name, [1, 2], GREEDY)
        except QueueFullError:
            refused.append(name)

    llm.add_request("first", [1, 2], GREEDY)
    monkeypatch.setattr(llm, "_check_queue", checked)
    threads = [threading.Thread(target=add, args=(name,)) for name in ("second", "third")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and len(llm.scheduler.alive) == 2
