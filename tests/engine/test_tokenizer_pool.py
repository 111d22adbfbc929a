"""A pool of tokenizers gives what one gives, in the same order, and outlives its processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tokenizers
from backends import QUIET
from embedded import embedded_model
from tiny import GREEDY, VOCAB, engine

from octavo.engine import tokenizer_pool
from octavo.engine.child import Caught, Child, portable
from octavo.engine.errors import TokenizerDiedError
from octavo.engine.loading.checkpoint import open_model
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_pool import TokenizerPool

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces ",
    "naïve café",
    "日本語のテキスト",
    "👩‍🚀🚀",
    "\x00\n\t",
    "<|im_end|>",
]
TEXTS += [f"sentence number {i} " * (i % 7 + 1) for i in range(60)] + ["long " * 4000]
CHAT = [[{"role": "user", "content": text}] for text in TEXTS[:12]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model(embedded_model(), load_format="dummy").tokenizer()


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> Iterator[TokenizerPool]:
    pool = TokenizerPool(tokenizer, 2)
    yield pool
    pids = pool.pids
    pool.close()
    assert pids and not any(map(psutil.pid_exists, pids))


def test_results_and_order_are_those_of_one_tokenizer(tokenizer: Tokenizer, pool: TokenizerPool) -> None:
    assert pool.map("encode", TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    want = [tokenizer.apply_chat_template(messages) for messages in CHAT]
    assert pool.map("apply_chat_template", CHAT) == want
    prompts = ["a text", [1, 2], {"prompt": "salted", "cache_salt": "x"}, {"prompt_token_ids": [3]}, 7]
    made = [tokenizer.encode("a text"), tokenizer.encode("salted")]
    assert pool.tokenized(prompts) == [
        {"prompt": "a text", "prompt_token_ids": made[0]},
        [1, 2],
        {"prompt": "salted", "cache_salt": "x", "prompt_token_ids": made[1]},
        {"prompt_token_ids": [3]},
        7,
    ]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_errors_go_to_the_one_who_asked(tokenizer: Tokenizer, pool: TokenizerPool, size: int) -> None:
    one = pool if size == 2 else TokenizerPool(tokenizer, size)
    futures = [one.submit("encode", text) for text in ("fine", "\ud800", "fine")]
    with pytest.raises(ValueError, match="lone surrogate"):
        futures[1].result(30)
    assert futures[0].result(30) == futures[2].result(30) == tokenizer.encode("fine")
    with pytest.raises(ValueError, match="a dict with a role and content"):
        one.map("apply_chat_template", [CHAT[0], [5]])


def test_what_cannot_be_sent_is_that_jobs_error(pool: TokenizerPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        pool.call("apply_chat_template", CHAT[0], tools=[lambda: 0])
    assert pool.call("encode", "x")


def test_a_process_that_ends_before_it_begins_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[int] = []

    def stillborn(*names: str) -> Child:
        child = Child(*names)
        born.append(child.pid)
        if len(born) <= 2:
            child.kill()
        return child

    monkeypatch.setattr(tokenizer_pool, "Child", stillborn)
    both = TokenizerPool(tokenizer, 2)
    texts = [f"{i}" for i in range(8)]
    assert both.map("encode", texts) == [tokenizer.encode(text) for text in texts]
    assert not {*both.pids} & {*born[:2]} and both.stats.num_restarts == 2
    both.close()


def test_a_killed_process_is_replaced_and_its_work_done_again(tokenizer: Tokenizer, pool: TokenizerPool) -> None:
    pool.map("encode", TEXTS[:2])
    before, restarts = pool.pids, pool.stats.num_restarts
    texts = [f"{i} " + "many words of text " * 3000 for i in range(40)]
    futures = [pool.submit("encode", text) for text in texts]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert [f.result(60) for f in futures] == [tokenizer.encode(text) for text in texts]
    deadline = time.monotonic() + 10
    while (len(pool.pids) != 2 or {*pool.pids} & {*before}) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool.pids) == 2 and not {*pool.pids} & {*before}
    # a process that is killed as it takes up what another left is one more
    assert pool.stats.num_restarts >= restarts + 2


def test_a_text_that_ends_every_process_is_an_error_and_others_go_on(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    deadly = pool.submit("encode", "x" * 40_000_000)
    while not deadly.done():
        for pid in pool.pids:
            # the other process has nothing to do and stays small
            if psutil.pid_exists(pid) and psutil.Process(pid).memory_info().rss > 300_000_000:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    with pytest.raises(TokenizerDiedError, match="3 tokenizer processes ended at this text"):
        deadly.result()
    assert pool.call("encode", "fine") == tokenizer.encode("fine")
    pool.close()


def test_the_stats_count_and_time(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    before = pool.stats
    assert (before.num_workers, before.queue_length, before.num_done, before.mean_wait) == (2, 0, 0, 0.0)
    start = time.perf_counter()
    futures = [pool.submit("encode", "some text " * 20000) for _ in range(20)]
    assert pool.stats.queue_length >= 18
    for future in futures:
        future.result(60)
    seconds = time.perf_counter() - start
    pool.close()
    after = pool.stats
    assert (after.queue_length, after.num_done, after.num_taken) == (0, 20, 20)
    assert 0 < after.mean_wait < seconds
    alone = TokenizerPool(tokenizer, 1)
    assert alone.call("encode", "x") and alone.stats.num_done == 1 and not alone.pids


def test_a_pool_that_nobody_holds_leaves_no_process(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    pool.map("encode", ["x", "y"])
    pids = pool.pids
    del pool
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def test_a_closed_pool_ends_what_it_was_asked(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    futures = [pool.submit("encode", "some text " * 200000) for _ in range(8)]
    pool.close()
    assert all(f.done() for f in futures)
    assert isinstance(futures[-1].exception(), TokenizerDiedError)
    with pytest.raises(ValueError, match="closed"):
        pool.submit("encode", "x")


def test_a_pool_closed_while_it_is_asked_leaves_nobody_waiting(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TokenizerPool(tokenizer, 2)
    pool.call("encode", "until both have started")
    closing, put = threading.Thread(target=pool.close), pool._shared.jobs.put

    def closed_first(job: Any) -> None:
        if job is not None:
            closing.start()
            closing.join(0.5)
        put(job)

    monkeypatch.setattr(pool._shared, "jobs", SimpleNamespace(put=closed_first, get=pool._shared.jobs.get))
    future = pool.submit("encode", "late")
    with Caught():
        future.result(5)
    assert future.done()
    closing.join()


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Even if it is killed: their commands then end."""
    child = Child(__name__, "hold_a_pool")
    child.commands.send(str(embedded_model()))
    pids = child.results.recv()
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    child.close()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


def hold_a_pool(commands, results) -> None:
    pool = TokenizerPool(open_model(commands.recv(), load_format="dummy").tokenizer(), 2)
    pool.map("encode", ["x", "y"])
    results.send(pool.pids)
    commands.recv()


class Stubborn(Exception):
    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


def test_errors_that_cannot_travel_keep_their_words() -> None:
    assert str(portable(Stubborn(1, 2))) == "Stubborn: 1 and 2"
    with Caught() as caught:
        raise KeyError("a")
    error = portable(caught.error)
    assert isinstance(error, KeyError) and "test_tokenizer_pool" in error.__notes__[0]


def test_an_engine_with_a_pool_makes_the_same(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB + 1)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    template = {"chat_template": "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ mood }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    one, two = (engine(tokenizer=str(tmp_path), tokenizer_pool_size=n, **QUIET) for n in (1, 2))
    prompts = [" ".join(f"w{i}" for i in range(n)) for n in range(1, 6)]
    chats = [[{"role": "w1", "content": f"w{i}"}] for i in range(3)]
    for call in (
        lambda llm: llm.generate(prompts, GREEDY, use_tqdm=False),
        lambda llm: llm.chat(chats, GREEDY, use_tqdm=False, mood="w9"),
    ):
        got, want = ([(o.prompt, list(o.prompt_token_ids), o.outputs) for o in call(llm)] for llm in (two, one))
        assert got == want
    assert two.tokenizer_pool.stats.num_done == 8 and len(two.tokenizer_pool.pids) == 2
    with pytest.raises(ValueError, match="97"):
        two.generate(["w1", "w97"], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="lone surrogate"):
        two.generate(["w1", "\ud800"], GREEDY, use_tqdm=False)
    pids = two.tokenizer_pool.pids
    two.shutdown()
    assert not any(map(psutil.pid_exists, pids))
