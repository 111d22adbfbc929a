"""Compiles grammars off the hot path: tried out in a process that can be killed, then compiled in a thread of ours."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from . import grammar_worker
from .grammar_worker import GrammarError, Vocabulary, compiled, token_trie

log = logging.getLogger("octavo")

GIB = 2**30
START_SECONDS = 300.0  # for a process to start: not the grammar's fault, so no short limit


@dataclass(frozen=True)
class Limits:
    """What compiling may cost."""

    seconds: float = 10.0  # of one grammar
    memory: int = 2 * GIB  # bytes, of one process
    workers: int = 2  # processes
    cached: int = 256  # grammars


@dataclass(eq=False)
class Compilation:
    """A grammar that is being compiled. `done` is set last; then one of `matcher` and `error` is there."""

    matcher: Any = None
    error: str | None = None
    done: bool = False


class CrashError(GrammarError):
    """Its process was killed, for time or memory, or died of it."""


class Worker:
    """A process that tries grammars out."""

    def __init__(self, setup: str, limits: Limits):
        self.limits = limits
        command = [sys.executable, "-P", str(Path(grammar_worker.__file__).resolve())]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, encoding="utf-8")
        try:
            self._ask(setup, START_SECONDS)
        except CrashError as error:
            status = self.process.returncode
            raise CrashError(f"the process that tries grammars out did not start: exit status {status}") from error

    def try_out(self, kind: str, text: str) -> str:
        """The constraint as a grammar that compiles. Raises GrammarError; a CrashError is the end of the worker."""
        answer = self._ask(json.dumps([kind, text]), self.limits.seconds)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            # what was written to a dead process cannot be flushed
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(f"{line}\n")
                self.process.stdin.flush()
            answer = self.process.stdout.readline()
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if answer.endswith("\n"):
            return json.loads(answer)
        self.close()
        if timed_out:
            raise CrashError(f"it took more than {seconds:g} seconds to compile (compile_timeout)")
        raise CrashError(
            f"compiling it took more than {self.limits.memory / GIB:g} GiB of memory, or crashed the grammar library"
        )


class GrammarCompiler:
    """Compiles each grammar once. Threads of its own; `wake` is set whenever one is done."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: Limits):
        self.limits, self.wake, self.lock = limits, threading.Event(), threading.Lock()
        self.make_vocabulary = vocabulary
        # apart from the other lock, for which an engine waits
        self.preparing = threading.Lock()
        self.trie: Any = None
        self.setup = ""
        self.cache: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        self.workers: SimpleQueue[Worker] = SimpleQueue()
        self.pool = ThreadPoolExecutor(limits.workers, thread_name_prefix="octavo-grammar")
        weakref.finalize(self, _close, self.pool, self.workers)

    def compile(self, source: tuple[str, str]) -> Compilation:
        """The compilation of a constraint (StructuredOutputsParams.source), which may have ended or just begun."""
        with self.lock:
            found = self.cache.get(source)
            if found is None:
                found = self.cache[source] = Compilation()
                self.pool.submit(_run, weakref.ref(self), source, found)
                if len(self.cache) > self.limits.cached:
                    self.cache.popitem(last=False)
            self.cache.move_to_end(source)
            return found

    def run(self, source: tuple[str, str], into: Compilation) -> None:
        """Compiles, in a thread of the pool."""
        try:
            self._prepare()
            into.matcher = compiled(self.trie, self._tried(source))
        except GrammarError as error:
            into.error = str(error)
            if isinstance(error, CrashError):
                # it may have been the machine's fault: the next request tries again
                with self.lock:
                    self.cache.pop(source, None)
        finally:
            # nobody may wait for ever, whatever happened here
            if into.matcher is None and into.error is None:
                log.error("the grammar compiler failed", exc_info=True)
                into.error = "the grammar compiler failed"
            into.done = True
            self.wake.set()

    def _prepare(self) -> None:
        """Makes the vocabulary, at the first grammar."""
        with self.preparing:
            if self.trie is None:
                vocabulary = self.make_vocabulary()
                self.setup = grammar_worker.pack(vocabulary, sys.path, self.limits.memory, self.limits.seconds)
                self.trie = token_trie(vocabulary)

    def _tried(self, source: tuple[str, str]) -> str:
        """The constraint as a grammar that has compiled in a worker."""
        try:
            worker = self.workers.get_nowait()
        except Empty:
            worker = Worker(self.setup, self.limits)
        try:
            return worker.try_out(*source)
        finally:
            if worker.process.poll() is None:
                self.workers.put(worker)


def _run(compiler: weakref.ref[GrammarCompiler], source: tuple[str, str], into: Compilation) -> None:
    # threads shall not keep an engine alive that nobody holds any more
    if (alive := compiler()) is not None:
        alive.run(source, into)


def _close(pool: ThreadPoolExecutor, workers: SimpleQueue[Worker]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    while not workers.empty():
        workers.get_nowait().close()
