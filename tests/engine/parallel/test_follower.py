"""Lines between ranks: how they end, and what a rank other than 0 does and says. No second process."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import jax  # noqa: F401
import pytest
from tiny import PROMPTS, engine, tokens

from octavo.engine import SamplingParams
from octavo.engine.errors import DivergenceError
from octavo.engine.parallel.follower import Leader, follow
from octavo.engine.parallel.lead_runner import uninterrupted
from octavo.engine.parallel.team import (
    Bye,
    Check,
    Digest,
    Done,
    Failed,
    Forward,
    Head,
    Mail,
    Peer,
    Register,
    Reset,
    Result,
    Team,
    watch,
)
from octavo.models.logit_edits import LogitsProcessor

PATIENCE = 20.0  # seconds


def _launched(count: int) -> tuple[tuple[Peer, ...], list[Connection]]:
    """Ranks that nobody here started, reached by one line each, and the other ends of those."""
    lines = [Pipe() for _ in range(count)]
    return tuple(Peer(i + 1, here, here) for i, (here, _) in enumerate(lines)), [there for _, there in lines]


def test_one_that_ends_ends_the_watch_of_all() -> None:
    peers, (first, second) = _launched(2)
    mail = Mail(peers, len(peers) + 1)
    first.close()
    watch(peers, mail)
    assert mail.lost == "rank 1 has ended"
    with pytest.raises(EOFError):
        second.recv_bytes()


def test_launched_ranks_hear_that_the_team_is_lost_while_they_are_watched() -> None:
    peers, (there,) = _launched(1)
    mail = Mail(peers, len(peers) + 1)
    watching = threading.Thread(target=watch, args=(peers, mail), daemon=True)
    watching.start()
    # the thread is in its wait once it has taken this in
    there.send_bytes(pickle.dumps(Done(7)))
    with mail.news:
        assert mail.news.wait_for(lambda: mail.done == {1: 7}, PATIENCE)
    watching.join(0.1)
    mail.lose("ranks differ")
    assert there.poll(PATIENCE)
    with pytest.raises(EOFError):
        there.recv_bytes()
    watching.join(PATIENCE)
    assert not watching.is_alive() and mail.lost == "ranks differ"


class Rank:
    """Follows on a thread, with a real runner; told and heard through pipes as rank 0 would."""

    def __init__(self, runner: Any, reports: bool = False):
        theirs_in, self.commands = Pipe(duplex=False)
        self.results, theirs_out = Pipe(duplex=False)
        leader = Leader(theirs_in, theirs_out)
        self.thread = threading.Thread(target=self._follow, args=(leader, runner, reports), daemon=True)
        self.thread.start()

    def _follow(self, leader: Leader, runner: Any, reports: bool) -> None:
        # how it leaves its process
        with contextlib.suppress(SystemExit):
            follow(leader, runner, reports)

    def tell(self, *commands: Any) -> None:
        for command in commands:
            self.commands.send_bytes(pickle.dumps(command))

    def hear(self) -> Any:
        assert self.results.poll(PATIENCE), "it says nothing"
        return pickle.loads(self.results.recv_bytes())


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(engine(backend="jax").runner)
    assert rank.hear() == Done(0)
    yield rank
    rank.tell(Bye())
    rank.thread.join(PATIENCE)
    assert not rank.thread.is_alive()


FAILS = Forward(None, (), {})  # pyright: ignore[reportArgumentType]


def test_a_digest_of_before_a_failed_step_is_never_told(rank: Rank) -> None:
    rank.tell(Check(3), FAILS, FAILS, Reset(1))
    assert isinstance(rank.hear(), Failed)
    # and nothing of the second, which was on its way
    assert rank.hear() == Done(1)
    rank.tell(Register(LogitsProcessor("late", unread)), Check(9), Register(LogitsProcessor("later", unread)))
    told = rank.hear()
    assert isinstance(told, Digest) and told.step == 9 and told.plans == 0


def unread(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    """A processor that no request asks for."""
    return logits


class Elsewhere:
    """Reads as something that is not here: a class of rank 0's script."""

    def __reduce__(self) -> Any:
        return getattr, (Bye, "not_here")


def test_what_cannot_be_read_is_told_and_the_rank_lives_on(rank: Rank) -> None:
    rank.tell(Register(Elsewhere()), Reset(1))  # pyright: ignore[reportArgumentType]
    told = rank.hear()
    assert isinstance(told, Failed) and isinstance(told.error, ValueError)
    assert "this cannot be read in the process of another rank" in str(told.error) and "not_here" in str(told.error)
    assert rank.hear() == Done(1)


@pytest.mark.parametrize(
    ("rank", "other", "words"),
    [
        (1, Digest(7, 1, 2, 4), "the rows of rank 1 differ from those of rank 0 behind step 7"),
        (3, Digest(7, 1, 2, 3), "the rows of rank 3 differ from those of rank 2 behind step 7"),
        (2, Digest(7, 1, 5, 4), "the rows of rank 2 differ from those of rank 0 behind step 7"),
        (3, Digest(7, 6, 2, 4), "the plans of rank 3 differ from those of rank 0 behind step 7"),
    ],
)
def test_tokens_are_compared_within_a_stage_and_the_rest_with_rank_0(rank: int, other: Digest, words: str) -> None:
    """Of two stages of two ranks: the first, that of ranks 2 and 3, has not heard of all tokens."""
    peers, theirs = _launched(3)
    team = Team(peers, stage_size=2)
    mine, first = Digest(7, 1, 2, 3), Digest(7, 1, 2, 4)
    for r, digest in ((1, mine), (2, first), (3, first)):
        team.mail.take(r, digest)
    team.compare(mine)
    assert not team.own
    for r, digest in ((1, mine), (2, first), (3, first)):
        team.mail.take(r, other if r == rank else digest)
    with pytest.raises(DivergenceError, match=words):
        team.compare(mine)
    for there in theirs:
        there.close()
    team.thread.join(PATIENCE)


def test_an_interrupt_waits_until_the_others_have_what_they_need() -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all")
        assert done == ["all"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def unchanged(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    return logits


@pytest.mark.parametrize("of_script", [False, True])
def test_what_another_rank_could_not_have_registers_nowhere(of_script: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in a first replica that has no other ranks: requests would get it there and not elsewhere."""
    llm, (here, _) = engine(backend="jax"), Pipe()
    child: Any = object()
    monkeypatch.setattr(llm, "team", Team(()))
    monkeypatch.setattr(llm.team, "peers", [Peer(1, here, here, child)])
    error, f = r"this cannot be sent to the other ranks' processes: .*lambda", lambda *args: args[0]
    if of_script:
        error, f = "this cannot be read in the other ranks' processes: unchanged is of the script itself", unchanged
        monkeypatch.setattr(f, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], f.__name__, f, raising=False)
    with pytest.raises(ValueError, match=error):
        llm.register_logits_processor(LogitsProcessor("local", f))
    assert llm.runner.processors == ()


def test_a_rank_reports_what_its_steps_give() -> None:
    pytest.importorskip("torch")
    llm = engine(backend="torch")
    follower = engine(backend="torch")
    rank = Rank(follower.runner, reports=True)
    assert rank.hear() == Done(0)
    told: list[Any] = []
    launch = llm.runner.launch

    def watched(plan: Any, mask: Any = None) -> Any:
        rank.tell(Forward(plan, (), {}), Head(mask))
        pending = launch(plan, mask)
        told.append(pending)
        return pending

    llm.runner.launch = watched
    tokens(llm, PROMPTS[:2], SamplingParams(temperature=0, max_tokens=5))
    assert len(told) > 4
    for pending in told:
        heard = rank.hear()
        assert isinstance(heard, Result) and heard.value.token_ids == pending.result().token_ids
    # one that cannot be read is told as an error, and nothing is left behind once it starts anew
    rank.tell(Forward(None, (), {}), Reset(1))
    assert isinstance(rank.hear(), Failed) and rank.hear() == Done(1)
    rank.tell(Bye())
    rank.thread.join(PATIENCE)
