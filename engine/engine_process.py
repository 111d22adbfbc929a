"""The engine's process: an LLM, fed by one pipe, telling its news through another."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from .child import GONE, Caught, portable, unpickled
from .collector import Seldom
from .errors import RequestFailedError
from .llm import LLM
from .messages import QUESTIONS, Abort, Add, Answer, Ask, Command, Ended, Failed, News, Ready, Report, Start
from .outputs import RequestOutput
from .request import Request
from .sleep import check_sleep

log = logging.getLogger("octavo")


def serve(commands: Connection, results: Connection) -> None:
    """The life of the process. It ends when its commands do."""
    try:
        start = _received(commands)
    except GONE:
        return
    if not isinstance(start, Start):
        results.send(start)
        return
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    log.setLevel(start.log_level)
    inbox: SimpleQueue[Command | Ended] = SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), daemon=True).start()
    with Caught() as caught:
        llm = LLM(start.model, weights=start.weights, **start.arguments)
    if caught.error is not None:
        results.send(Failed(portable(caught.error)))
        return
    plan, params = llm.memory_plan, llm.get_default_sampling_params()
    results.send(Ready(plan.max_model_len, llm.model.vocab_size, tuple(plan.num_blocks), params))
    del start
    with Seldom():
        Engine(llm, inbox, results).run()


def _received(commands: Connection) -> Any:
    """The next message; or if it cannot be read here, what is to be answered."""
    number, data = commands.recv()
    with Caught() as caught:
        return unpickled(data, "the engine's process")
    assert caught.error
    return Failed(caught.error) if number is None else Ended(number, caught.error)


def _listen(commands: Connection, inbox: SimpleQueue[Command | Ended]) -> None:
    """Passes commands on. Ends the process with them: whoever gave them is gone, and a step may take long."""
    try:
        while True:
            inbox.put(_received(commands))
    except GONE:
        os._exit(0)


def has_failed(r: Request) -> bool:
    """Whether a step that failed has ended it."""
    return r.finish_reason == "error" and r.error is None


class Engine:
    """Steps while there is work, sleeps while there is none."""

    def __init__(self, llm: LLM, inbox: SimpleQueue[Command | Ended], results: Connection):
        self.llm, self.inbox, self.results = llm, inbox, results
        self.numbers: dict[str, int] = {}  # of the requests that are alive, by id
        self.names: dict[int, str] = {}
        self.told: set[int] = set()  # whose prompt's ids have been sent
        self.later: deque[Command | Ended] = deque()  # asked while a sleep waits, to be done before the inbox's

    def run(self) -> None:
        """Serves until the process ends."""
        while True:
            self._take_commands(wait=not self.llm.has_unfinished_requests())
            if self.llm.has_unfinished_requests():
                self._step()

    def _take_commands(self, wait: bool) -> None:
        """Does all that has been asked so far; with `wait`, waits for something first."""
        try:
            while True:
                command = self.later.popleft() if self.later else self.inbox.get(block=wait)
                wait = False
                self._do(command)
        except Empty:
            return

    def _take_aborts(self) -> None:
        """Does what aborts ask. All that has been asked is kept for later: an abort may be of one that comes then."""
        with contextlib.suppress(Empty):
            while True:
                self.later.append(self.inbox.get(block=False))
        for command in self.later:
            if isinstance(command, Abort):
                self._abort(command)

    def _do(self, command: Command | Ended) -> None:
        if isinstance(command, Ended):
            self._send(command)
        elif isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            self._abort(command)
        else:
            self._answer(command)

    def _add(self, add: Add) -> None:
        llm = self.llm
        with Caught() as caught:
            params = llm.get_default_sampling_params() if add.params is None else add.params
            llm.add_request(add.request_id, add.prompt, params, priority=add.priority, cache_salt=add.cache_salt)
        if caught.error is not None:
            self._send(Ended(add.number, portable(caught.error)))
        else:
            self.numbers[add.request_id], self.names[add.number] = add.number, add.request_id

    def _abort(self, abort: Abort) -> None:
        """Ends requests, and tells of them what has not been told. Those that have ended are passed over."""
        llm, names = self.llm, [self.names[n] for n in abort.numbers if n in self.names]
        families = [llm.processor.families[name] for name in names if name in llm.processor.families]
        llm.abort(names)
        self._tell([output for family in families if (output := llm.processor.news(family)) is not None])

    def _answer(self, ask: Ask) -> None:
        value = None
        with Caught() as caught:
            if ask.question not in QUESTIONS:
                raise ValueError(f"unknown question {ask.question!r}")
            if ask.question == "sleep" and not self.llm.is_sleeping():
                self._settle(**ask.arguments)
            value = getattr(self.llm, ask.question)(**ask.arguments)
        self._send(Answer(ask.number, value, None if caught.error is None else portable(caught.error)))
        if caught.error is not None:
            # while it waits for requests before a sleep it steps
            self._check_cache(caught.error)

    def _settle(self, level: int = 1, mode: str = "abort") -> None:
        """Ends all requests before a sleep, and tells of them."""
        check_sleep(self.llm.config, level, mode)
        if mode == "abort":
            self._abort(Abort(tuple(self.names)))
        while self.llm.has_unfinished_requests():
            self._take_aborts()
            self._step()

    def _step(self) -> None:
        outputs: list[RequestOutput] = []
        with Caught() as caught:
            outputs = self.llm.step()
        if caught.error is None:
            self._tell(outputs)
            return
        # it has ended the requests that were running (decision 009)
        log.error("a step failed and ends what was running", exc_info=caught.error)
        error = RequestFailedError(f"a step failed: {type(caught.error).__name__}: {caught.error}")
        for name, number in list(self.numbers.items()):
            family = self.llm.processor.families.get(name)
            # what has ended well, or by a fault of its own, is news of the next step
            if family is None or any(has_failed(m.request) for m in family.members):
                self.llm.abort(name)
                self._forget(number)
                self._send(Ended(number, error))
        self._check_cache(caught.error)

    def _check_cache(self, error: BaseException) -> None:
        """Raises the error where no later step can go better: this process ends, so that its health is bad."""
        if not self.llm.is_sleeping() and not all(r.runner.has_cache for r in self.llm.replicas):
            raise error

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Sends news, in one message; of a request that has only itself to blame for its end, the error."""
        news = []
        for output in outputs:
            number = self.numbers[output.request_id]
            if output.finished:
                self._forget(number)
            wrong = [c.error for c in output.outputs if c.finish_reason == "error"]
            if wrong:
                self.llm.abort(output.request_id)
                if not output.finished:
                    self._forget(number)
                self._send(Ended(number, ValueError(f"request {output.request_id!r}: {wrong[0]}")))
                continue
            if number in self.told:
                output = replace(output, prompt_token_ids=())
            elif not output.finished:
                self.told.add(number)
            news.append((number, output))
        if news:
            self._send(News(tuple(news)))

    def _forget(self, number: int) -> None:
        del self.numbers[self.names.pop(number)]
        self.told.discard(number)

    def _send(self, report: Report) -> None:
        try:
            self.results.send(report)
        except OSError:
            # nobody is left to hear it
            os._exit(0)
