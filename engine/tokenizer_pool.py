"""Processes that turn text into token ids, so that the engine's does not wait for it.

A thread for each process: it hands over one job at a time and waits for the answer. A process that ends in the middle
of one is replaced, and the job done again.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from .child import GONE, Caught, Child, portable
from .errors import TokenizerDiedError
from .prompts import Prompt, untokenized, with_ids
from .tokenizer import Tokenizer

log = logging.getLogger("octavo")

TRIES = 3  # processes that may end at one job


@dataclass(frozen=True)
class PoolStats:
    """How a pool does. A job waits from its submission until a process takes it."""

    num_workers: int  # 0: texts are tokenised where they are asked for
    queue_length: int  # jobs that no process has taken yet
    num_done: int
    total_wait: float  # seconds, of all jobs taken
    num_taken: int
    num_restarts: int  # processes that had to be replaced

    @property
    def mean_wait(self) -> float:
        """Seconds."""
        return self.total_wait / self.num_taken if self.num_taken else 0.0


@dataclass
class _Job:
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    future: Future[Any] = field(default_factory=Future)
    submitted: float = field(default_factory=time.perf_counter)


class TokenizerPool:
    """`size` processes with the same tokenizer; with a size of 0 or 1 none: jobs are then done by whoever asks.

    Results do not depend on the size. Threads may share a pool.
    """

    def __init__(self, tokenizer: Tokenizer | None, size: int):
        self.tokenizer = tokenizer
        self.size = size if size > 1 and tokenizer is not None else 0
        self._shared = _Shared(tokenizer)
        self._threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"octavo-tokenizer-{i}", daemon=True)
            for i in range(self.size)
        ]
        for thread in self._threads:
            thread.start()
        # the threads know only what they share, so a pool that nobody holds is collected, and this called
        self.close = weakref.finalize(self, _close, self._shared, self._threads)

    def submit(self, method: str, *arguments: Any, **keywords: Any) -> Future[Any]:
        """The result, to come, of a method of the tokenizer."""
        job = _Job(method, arguments, keywords)
        if not self.size:
            self._shared.took(job)
            _do(job, self.tokenizer)
            self._shared.finished()
            return job.future
        with self._shared.lock:
            # or nobody would be left to do it
            if self._shared.closed:
                raise ValueError("this tokenizer pool is closed")
            self._shared.jobs.put(job)
        return job.future

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of a method of the tokenizer."""
        return self.submit(method, *arguments, **keywords).result()

    def map(self, method: str, each: Sequence[Any], **keywords: Any) -> list[Any]:
        """The results for each argument, in order. Raises the first error in that order, once all is done."""
        futures = [self.submit(method, one, **keywords) for one in each]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts, those of text with their ids, where there are processes to do it."""
        if not self.size:
            return list(prompts)
        texts = [untokenized(p) for p in prompts]
        ids = iter(self.map("encode", [t for t in texts if t is not None]))
        return [p if t is None else with_ids(p, next(ids)) for p, t in zip(prompts, texts, strict=True)]

    @property
    def stats(self) -> PoolStats:
        s = self._shared
        with s.lock:
            return PoolStats(self.size, s.jobs.qsize(), s.num_done, s.total_wait, s.num_taken, s.num_restarts)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        with self._shared.lock:
            return [child.pid for child in self._shared.children]


class _Shared:
    """What a pool and its threads have in common."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.children: set[Child] = set()
        self.closed = False
        self.num_done = self.num_taken = self.num_restarts = 0
        self.total_wait = 0.0

    def took(self, job: _Job) -> None:
        with self.lock:
            self.num_taken += 1
            self.total_wait += time.perf_counter() - job.submitted

    def finished(self) -> None:
        with self.lock:
            self.num_done += 1

    def start(self) -> Child:
        """A new process, already given its tokenizer."""
        with self.lock:
            if self.closed:
                raise BrokenPipeError("the pool is closed")
            child = Child(__name__, "serve")
            self.children.add(child)
        assert self.tokenizer is not None
        try:
            child.commands.send(self.tokenizer.parts)
        except GONE:
            # it ended before it began
            self.lost(child)
            raise
        return child

    def lost(self, child: Child) -> None:
        """Takes leave of a process that has ended by itself."""
        status = child.kill()
        self.end(child)
        if not self.closed:
            log.warning("a tokenizer process ended (exit status %d) and is replaced", status)
        with self.lock:
            self.num_restarts += 1

    def end(self, child: Child) -> None:
        child.close()
        with self.lock:
            self.children.discard(child)


def _work(shared: _Shared) -> None:
    """A thread's life: starts a process, does jobs with it, replaces it when it ends."""
    child: Child | None = None
    with Caught():
        child = shared.start()
    while (job := shared.jobs.get()) is not None:
        shared.took(job)
        if job.future.set_running_or_notify_cancel():
            child = _hand_over(shared, job, child)
        shared.finished()
    if child is not None:
        shared.end(child)


def _hand_over(shared: _Shared, job: _Job, child: Child | None) -> Child | None:
    """Has a process do a job. Returns the process to use from now on."""
    for _ in range(TRIES):
        try:
            child = child or shared.start()
            with Caught() as unsendable:
                message = pickle.dumps((job.method, job.arguments, job.keywords))
            if unsendable.error is not None:
                job.future.set_exception(unsendable.error)
                return child
            child.commands.send_bytes(message)
            value, error = child.results.recv()
        except GONE:
            if child is not None:
                shared.lost(child)
                child = None
            continue
        if error is None:
            job.future.set_result(value)
        else:
            job.future.set_exception(error)
        return child
    what = "the tokenizer pool was closed" if shared.closed else f"{TRIES} tokenizer processes ended at this text"
    job.future.set_exception(TokenizerDiedError(what))
    return None


def _do(job: _Job, tokenizer: Tokenizer | None) -> None:
    with Caught() as caught:
        job.future.set_result(getattr(tokenizer, job.method)(*job.arguments, **job.keywords))
    if caught.error is not None:
        job.future.set_exception(caught.error)


def _close(shared: _Shared, threads: Sequence[threading.Thread]) -> None:
    """Ends the processes. Jobs that are not done fail."""
    with shared.lock:
        shared.closed = True
        children = list(shared.children)
    for child in children:
        child.kill()
    for _ in threads:
        shared.jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def serve(commands: Connection, results: Connection) -> None:
    """The life of a process: one tokenizer, one job at a time, until its commands end."""
    try:
        tokenizer = Tokenizer(*commands.recv())
        while True:
            method, arguments, keywords = commands.recv()
            value = None
            with Caught() as caught:
                value = getattr(tokenizer, method)(*arguments, **keywords)
            results.send((value, None if caught.error is None else portable(caught.error)))
    except GONE:
        return
