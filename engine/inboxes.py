"""News of requests on their way from the thread that reads them to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .errors import EngineDeadError
from .outputs import CompletionOutput, RequestOutput


class Inbox:
    """The news of one request that its reader has not taken yet: one output at most, whatever it has missed.

    Belongs to the event loop on which it was made; only `loop` is touched elsewhere.
    """

    def __init__(self, number: int, request_id: str, deltas: bool):
        self.number, self.request_id, self.deltas = number, request_id, deltas
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.prompt_token_ids: Any = ()
        self.sent = self.aborted = False  # whether the engine knows of it; whether it is to be aborted when it does
        self.finished = False  # whether its last output has been taken

    def put(self, output: RequestOutput) -> None:
        """Takes in an output."""
        if output.prompt_token_ids:
            self.prompt_token_ids = output.prompt_token_ids
        before = self.output
        self.output = joined(before, output) if before is not None and self.deltas else output
        self.event.set()

    def fail(self, error: BaseException) -> None:
        """Ends it, behind what it still holds."""
        self.error = error
        self.event.set()

    async def get(self, prompt: str | None) -> RequestOutput:
        """The next output. Raises what the request was ended by."""
        while self.output is None:
            if self.error is not None:
                raise self.error
            self.event.clear()
            await self.event.wait()
        output, self.output = self.output, None
        self.finished = output.finished
        return replace(output, prompt=prompt, prompt_token_ids=self.prompt_token_ids)


class Inboxes:
    """Those of all open requests. The listener of an EngineClient."""

    def __init__(self) -> None:
        # collecting an iterator, which may happen anywhere, closes an inbox
        self.lock = threading.RLock()
        self.open: dict[int, Inbox] = {}
        self.by_id: dict[str, Inbox] = {}
        self.numbers = itertools.count()
        self.dead: EngineDeadError | None = None

    def make(self, request_id: str | None, deltas: bool) -> Inbox:
        """A new one, of this event loop. Raises ValueError for an id in use, EngineDeadError if the engine is dead."""
        with self.lock:
            if self.dead is not None:
                raise EngineDeadError(*self.dead.args)
            number = next(self.numbers)
            if request_id is None:
                request_id = next(name for i in itertools.count(number) if (name := str(i)) not in self.by_id)
            if request_id in self.by_id:
                raise ValueError(f"request id {request_id!r} is in use")
            inbox = Inbox(number, request_id, deltas)
            self.open[number] = self.by_id[request_id] = inbox
            return inbox

    def remove(self, inbox: Inbox) -> bool:
        """Closes one. Returns whether it was open: not if an error has ended it."""
        with self.lock:
            self.by_id.pop(inbox.request_id, None)
            return self.open.pop(inbox.number, None) is not None

    def find(self, request_ids: Iterable[str]) -> list[Inbox]:
        """Those that are open, each once."""
        with self.lock:
            return [self.by_id[name] for name in dict.fromkeys(request_ids) if name in self.by_id]

    def news(self, outputs: tuple[tuple[int, RequestOutput], ...]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, RequestOutput]]] = {}
        with self.lock:
            for number, output in outputs:
                if (inbox := self.open.get(number)) is not None:
                    by_loop.setdefault(inbox.loop, []).append((inbox, output))
        for loop, items in by_loop.items():
            _call(loop, _deliver, items)

    def ended(self, number: int, error: BaseException) -> None:
        with self.lock:
            inbox = self.open.pop(number, None)
        if inbox is not None:
            _call(inbox.loop, inbox.fail, error)

    def died(self, error: EngineDeadError) -> None:
        with self.lock:
            self.dead = error
            inboxes, self.open = list(self.open.values()), {}
        for inbox in inboxes:
            _call(inbox.loop, inbox.fail, EngineDeadError(*error.args))


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas as one."""
    parts = {c.index: c for c in first.outputs}
    for c in second.outputs:
        parts[c.index] = _joined(parts[c.index], c) if c.index in parts else c
    # the first delta of all has them, the others none
    prompt_logprobs = first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs
    return replace(second, outputs=[parts[i] for i in sorted(parts)], prompt_logprobs=prompt_logprobs)


def _joined(a: CompletionOutput, b: CompletionOutput) -> CompletionOutput:
    # a list, or FlatLogprobs
    kind: Any = type(b.logprobs)
    logprobs = None if b.logprobs is None else kind([*(a.logprobs or ()), *b.logprobs])
    return replace(b, text=a.text + b.text, token_ids=[*a.token_ids, *b.token_ids], logprobs=logprobs)


def _deliver(items: list[tuple[Inbox, RequestOutput]]) -> None:
    for inbox, output in items:
        inbox.put(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Runs a function on an event loop, soon. Nobody is there to hear it if that is closed."""
    if loop.is_closed():
        return
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # closed meanwhile
        return
