"""This side of the engine's process: commands go out through one thread, and news come in through another.

So nobody who asks ever waits for a pipe. Knows no event loop: what comes in is handed to a listener, in the thread that
reads.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

from .child import GONE, Child, pickled
from .errors import EngineDeadError
from .messages import Answer, Ask, Command, Ended, Failed, News, Ready, Start
from .outputs import RequestOutput

PATIENCE = 5.0  # seconds that a process whose pipe has closed has to end


class Listener(Protocol):
    """What wants to hear of requests. Called in the thread that reads, one call at a time."""

    def news(self, outputs: tuple[tuple[int, RequestOutput], ...]) -> None: ...
    def ended(self, number: int, error: BaseException) -> None: ...
    def died(self, error: EngineDeadError) -> None: ...


class EngineClient:
    """A running engine. `ready` is what it found when it was built, or why it could not be."""

    def __init__(self, model: Any, weights: Any, arguments: Mapping[str, Any], listener: Listener):
        start = _pickled(Start(model, weights, dict(arguments), logging.getLogger("octavo").getEffectiveLevel()))
        self.child, self.listener = Child(f"{__package__}.engine_process", "serve"), listener
        self.ready: Future[Ready] = Future()
        self.dead: EngineDeadError | None = None
        self.closing = False
        self.lock = threading.Lock()
        self.questions: dict[int, Future[Any]] = {}
        self.numbers = itertools.count()
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.outbox.put(start)
        self.threads = [
            threading.Thread(target=self._write, name="octavo-engine-commands", daemon=True),
            threading.Thread(target=self._read, name="octavo-engine-news", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def send(self, command: Command) -> None:
        """Sends a command, in the order of calls; nothing happens if the engine is dead.

        Raises ValueError for one that cannot be pickled.
        """
        self.outbox.put(_pickled(command))

    def ask(self, question: str, **arguments: Any) -> Future[Any]:
        """The answer, to come. Raises EngineDeadError, now or there, if the engine is dead."""
        answer: Future[Any] = Future()
        number = next(self.numbers)
        with self.lock:
            self.check()
            self.questions[number] = answer
        self.send(Ask(number, question, arguments))
        return answer

    def check(self) -> None:
        """Raises EngineDeadError if the engine is dead."""
        if self.dead is not None:
            # a fresh one each time: an error that is raised twice collects tracebacks
            raise EngineDeadError(*self.dead.args)

    def close(self) -> None:
        """Ends the process; all that is open ends with EngineDeadError."""
        self.closing = True
        self.child.kill()
        self.outbox.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        self.child.close()

    def _write(self) -> None:
        """The thread that writes. That the engine is dead is for the other one to notice."""
        try:
            while (message := self.outbox.get()) is not None:
                self.child.commands.send_bytes(message)
        except GONE:
            return

    def _read(self) -> None:
        try:
            while True:
                report = self.child.results.recv()
                if isinstance(report, News):
                    self.listener.news(report.outputs)
                elif isinstance(report, Ended):
                    self.listener.ended(report.number, report.error)
                elif isinstance(report, Answer):
                    self._answer(report)
                elif isinstance(report, Ready):
                    self.ready.set_result(report)
                elif isinstance(report, Failed):
                    self.ready.set_exception(report.error)
        except GONE:
            self._die()

    def _answer(self, answer: Answer) -> None:
        with self.lock:
            question = self.questions.pop(answer.number)
        if not question.set_running_or_notify_cancel():
            return
        if answer.error is None:
            question.set_result(answer.value)
        else:
            question.set_exception(answer.error)

    def _die(self) -> None:
        """Tells everybody that waits."""
        status = self.child.wait(PATIENCE)
        why = "it was shut down" if self.closing else f"its process {self.child.pid} ended, exit status {status}"
        error = EngineDeadError(f"the engine is dead: {why}")
        with self.lock:
            self.dead = error
            questions, self.questions = self.questions, {}
        self.outbox.put(None)
        for question in questions.values():
            if question.set_running_or_notify_cancel():
                question.set_exception(EngineDeadError(*error.args))
        if not self.ready.done():
            self.ready.set_exception(error)
        self.listener.died(error)


def _pickled(message: Start | Command) -> bytes:
    """The message, and around it whose it is: it may be that it cannot be read over there."""
    return pickle.dumps((getattr(message, "number", None), pickled(message, "the engine's process")))
