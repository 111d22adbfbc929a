"""The other processes that run a model together with this one, rank 0: told what to do, watched, and compared.

Rank 0 plans; the others run the same programs in the same order on their own shards (follower.py), and say nothing
unless they are asked or something is wrong. Whatever ends one of them ends the engine with an error, soon: a
collective that lacks a rank would never end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from ...models.logit_edits import LogitsProcessor
from ..child import GONE, Child, check_elsewhere, pickled
from ..config import EngineConfig
from ..errors import DivergenceError, RankLostError
from ..plan import Plan
from ..prompt_embeds import PromptEmbeds
from ..runner import StepResult

# seconds that the others have: to answer, after one has failed alone, and to end
PATIENCE, GRACE, FAREWELL = 30.0, 3.0, 5.0
OTHERS = "the other ranks' processes"


@dataclass(frozen=True, slots=True)
class Join:
    """The first command to a process that rank 0 started."""

    rank: int
    size: int
    meeting: str  # "host:port" where the array library's processes meet
    config: EngineConfig
    weights: Any
    log_level: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Bytes that the poorest of all devices has free."""

    available: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """Rank 0 has its weights, and has left behind what makes loading them quick."""


@dataclass(frozen=True, slots=True)
class Forward:
    plan: Plan
    taps: tuple[str, ...]
    embeds: Mapping[str, PromptEmbeds]  # of the plan's requests


@dataclass(frozen=True, slots=True)
class Head:
    """Of the plan of the last Forward."""

    mask: Any


@dataclass(frozen=True, slots=True)
class Register:
    processor: LogitsProcessor


@dataclass(frozen=True, slots=True)
class Reset:
    """Starts from an empty cache; wants Done."""

    number: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    pass


@dataclass(frozen=True, slots=True)
class Sleep:
    """Runner.sleep; wants Done."""

    number: int
    level: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Runner.wake_up; wants Done."""

    number: int
    tags: tuple[str, ...]
    weights: Any


@dataclass(frozen=True, slots=True)
class Check:
    """Wants a Digest."""

    step: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The engine is shut down."""


@dataclass(frozen=True, slots=True)
class Here:
    """A process has its backend: how many bytes are free on its device."""

    available: int | None


@dataclass(frozen=True, slots=True)
class Done:
    number: int


@dataclass(frozen=True, slots=True)
class Digest:
    """What a rank's state comes to behind a step: crc32 of the plans so far, of its rows' counts and of their tokens.

    Stages of a pipeline know of other tokens: only those of one stage are compared.
    """

    step: int
    plans: int
    counts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the next step of a replica elsewhere gave."""

    value: StepResult


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException


READY = 0  # the number of the Done that says that a rank is built


@dataclass(frozen=True)
class Peer:
    """Another rank: what goes to it, what comes from it, and its process if rank 0 started it."""

    rank: int
    commands: Connection
    results: Connection
    child: Child | None = None

    def ended(self) -> str:
        """How it ended, as far as is known here."""
        if self.child is None:
            return f"rank {self.rank} has ended"
        return f"rank {self.rank} (process {self.child.pid}) ended with status {self.child.wait(FAREWELL)}"

    def end(self) -> None:
        """Ends it at once, or has it end: it may be waiting for somebody who is gone, and others for it."""
        if self.child is not None:
            self.child.process.kill()
            return
        # not closed: a line that `watch` waits for would stay open until it stops waiting
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.commands.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


@dataclass
class Mail:
    """What has come from the others, and what became of them. Shared with the thread that watches."""

    peers: tuple[Peer, ...]
    replica_size: int  # so many ranks in turn are one replica
    abort: Callable[[], None] | None = None  # ends collectives of this process that wait for somebody who is gone
    farewell: Callable[[], None] | None = None  # what this process does once the others have ended
    remedy: str = "make a new LLM"
    lost: str | None = None
    cause: BaseException | None = None
    kind: type[RankLostError] = RankLostError
    here: dict[int, int | None] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    digests: dict[int, list[Digest]] = field(default_factory=dict)
    results: dict[int, deque[StepResult]] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, rank: int, report: Here | Done | Digest | Result | Failed) -> None:
        with self.news:
            if isinstance(report, Here):
                self.here[rank] = report.available
            elif isinstance(report, Done):
                self.done[rank] = report.number
            elif isinstance(report, Digest):
                self.digests.setdefault(rank, []).append(report)
            elif isinstance(report, Result):
                # what follows a step that failed is of no use
                if rank not in self.failed:
                    self.results.setdefault(rank, deque()).append(report.value)
            else:
                self.failed[rank] = report.error
                # if all failed alike, rank 0 asks for a reset before long
                timer = threading.Timer(GRACE, self._failed_alone, (rank, report.error))
                timer.daemon = True
                timer.start()
            self.news.notify_all()

    def _failed_alone(self, rank: int, error: BaseException) -> None:
        # of a replica elsewhere, the first rank's error is found where its result is read
        if self.failed.get(rank) is error and rank - rank % self.replica_size not in self.failed:
            self.lose(f"rank {rank} failed: {type(error).__name__}: {error}", error)

    def lose(self, reason: str, cause: BaseException | None = None, kind: type[RankLostError] = RankLostError) -> None:
        """Nothing more will come of this team. Only the first reason counts."""
        with self.news:
            if self.lost is not None:
                return
            self.lost, self.cause, self.kind = reason, cause, kind
            self.news.notify_all()
        for peer in self.peers:
            peer.end()
        if self.abort is not None:
            self.abort()

    def close(self) -> bool:
        """Says that nothing more is wanted; False if the team is lost already."""
        with self.news:
            was, self.lost = self.lost, self.lost or "the engine has been shut down"
            return was is None


def watch(peers: Sequence[Peer], mail: Mail) -> None:
    """Takes in what the others report until all of them have ended."""
    left = {peer.results: peer for peer in peers}
    while left:
        try:
            ready = wait(list(left))
        except OSError:
            if mail.lost is None:
                raise
            # `dismiss` has closed lines that carry both ways: nobody wants to hear of it
            return
        for results in ready:
            peer = left[results]  # pyright: ignore[reportArgumentType]
            try:
                report = pickle.loads(peer.results.recv_bytes())
            except GONE:
                del left[peer.results]
                mail.lose(peer.ended())
                continue
            mail.take(peer.rank, report)


class Team:
    """All ranks but this one, or those of one replica. All are ended when the whole team is closed, or dropped.

    `stage_size` ranks in turn are in one stage of a pipeline, the last stage's first; `replica_size` are in one replica
    (None: all are). `mail` is that of the whole team, `first` the first rank, where this is a part of one.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        stage_size: int | None = None,
        replica_size: int | None = None,
        *,
        mail: Mail | None = None,
        first: int = 0,
    ):
        self.peers, self.first = tuple(peers), first
        self.ranks = {peer.rank for peer in peers}
        self.stage_size = stage_size or len(self.peers) + 1
        self.num_orders = READY
        self.own: list[Digest] = []
        if mail is not None:
            self.mail = mail
            return
        self.mail = mail = Mail(self.peers, replica_size or len(self.peers) + 1)
        self.thread = threading.Thread(target=watch, args=(self.peers, mail), name="octavo-ranks", daemon=True)
        self.thread.start()
        self.dismissal = weakref.finalize(self, dismiss, self.peers, mail)

    def part(self, replica: int) -> Team:
        """The ranks of one replica, but for this one: told, and compared, by themselves."""
        size = self.mail.replica_size
        peers = [peer for peer in self.peers if peer.rank // size == replica]
        return Team(peers, min(size, self.stage_size), mail=self.mail, first=replica * size)

    def tell(self, command: Any) -> bytes:
        """Sends all of them a command; returns it as sent. Raises what check does; ValueError if it cannot be sent."""
        self.check()
        data = pickled(command, OTHERS)
        for peer in self.peers:
            try:
                peer.commands.send_bytes(data)
            except OSError:
                self.mail.lose(peer.ended())
                self.check()
        return data

    def check_sendable(self, value: Any) -> None:
        """Raises ValueError for what cannot be sent, or not be read there."""
        data = pickled(value, OTHERS)
        if any(peer.child for peer in self.peers):
            check_elsewhere(data, OTHERS)

    def check(self) -> None:
        """Raises RankLostError if a rank is gone, DivergenceError if ranks are known to differ."""
        if self.mail.lost is not None:
            raise self.mail.kind(
                f"{self.mail.lost}; the model needs all of its {len(self.mail.peers) + 1} ranks: {self.mail.remedy}"
            ) from self.mail.cause
        while found := self._next_digests():
            for rank, digest in found.items():
                first = self.first
                self._compare(rank, digest, first, replace(found[first], tokens=digest.tokens))
                first = rank - rank % self.stage_size
                self._compare(rank, digest, first, found[first])

    def _next_digests(self) -> dict[int, Digest] | None:
        """What every rank says of one step; None: not all have."""
        here = {} if self.first in self.ranks else {0: self.own}
        said = here | {rank: self.mail.digests.get(rank, []) for rank in sorted(self.ranks)}
        return {rank: digests.pop(0) for rank, digests in said.items()} if all(said.values()) else None

    def _compare(self, rank: int, digest: Digest, other: int, expected: Digest) -> None:
        """Raises DivergenceError if a rank's digest is not what another's makes expect."""
        if digest != expected:
            what = "rows" if digest.plans == expected.plans else "plans"
            reason = f"the {what} of rank {rank} differ from those of rank {other} behind step {expected.step}"
            self.mail.lose(reason, None, DivergenceError)
            self.check()

    def compare(self, digest: Digest) -> None:
        """Rank 0's own state behind a step, to be compared when the others' have come."""
        self.own.append(digest)
        self.check()

    def least(self, available: int | None) -> int | None:
        """The smallest of all ranks' free memory, told to all of them."""
        self._await(lambda: len(self.mail.here) == len(self.peers))
        known = [n for n in (available, *self.mail.here.values()) if n is not None]
        least = min(known, default=None)
        self.tell(Agree(least))
        return least

    def await_ready(self) -> None:
        """Waits until all are built. Raises the error of one that cannot be."""
        self._await(lambda: self._all_done(READY))

    def order(self, make: Callable[[int], Any]) -> Callable[[], None]:
        """Tells what `make` makes of a number. Returns what waits until all have done it, and raises their errors."""
        self.num_orders += 1
        number = self.num_orders
        self.tell(make(number))
        return lambda: self._await(lambda: self._all_done(number))

    def reset(self) -> None:
        """Has all start anew. Raises RankLostError if one is stuck."""
        self.num_orders += 1
        self.own.clear()
        number, mail = self.num_orders, self.mail
        self.tell(Reset(number))
        with mail.news:
            came = mail.news.wait_for(lambda: mail.lost or self._all_done(number), PATIENCE)
            # what they said before
            for rank in self.ranks:
                for said in (mail.failed, mail.digests, mail.results):
                    said.pop(rank, None)
        if not came:
            mail.lose("not all ranks came back from a failed step")
        self.check()

    def _all_done(self, number: int) -> bool:
        return all(self.mail.done.get(peer.rank) == number for peer in self.peers)

    def _await(self, condition: Callable[[], bool]) -> None:
        """Waits while the others are built. Raises the error of one that cannot be."""
        mail = self.mail
        with mail.news:
            mail.news.wait_for(lambda: mail.lost or self.ranks & mail.failed.keys() or condition())
        for rank in self.ranks & mail.failed.keys():
            mail.lose(f"rank {rank} failed", mail.failed[rank])
            raise mail.failed[rank]
        self.check()

    def has_result(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        mail = self.mail
        return bool(mail.lost or mail.results.get(self.first) or self.first in mail.failed)

    def result(self) -> StepResult:
        """What the next step of a replica elsewhere gave. Raises the error that its first rank failed with."""
        mail, rank = self.mail, self.first
        with mail.news:
            mail.news.wait_for(self.has_result)
            if found := mail.results.get(rank):
                return found.popleft()
        self.check()
        raise mail.failed[rank]

    def close(self) -> None:
        """Ends the others."""
        self.dismissal()


def dismiss(peers: Sequence[Peer], mail: Mail) -> None:
    """Says goodbye where there is somebody to hear it, and ends the processes that rank 0 started."""
    is_whole = mail.close()
    for peer in peers:
        try:
            if is_whole:
                peer.commands.send_bytes(pickle.dumps(Bye()))
            peer.commands.close()
        except OSError:
            continue
    for peer in peers:
        if peer.child is not None:
            peer.child.wait(FAREWELL)
    if mail.farewell is not None:
        mail.farewell()
