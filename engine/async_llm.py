"""The engine for an event loop: LLM in a process of its own, and an async iterator for each request."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from .build import tokenizer_of
from .checks import sequence
from .config import engine_config
from .engine_client import EngineClient
from .engine_stats import EngineStats
from .errors import EngineDeadError
from .inboxes import Inbox, Inboxes
from .messages import Abort, Add
from .metrics_export import pool_exporter
from .outputs import RequestOutput
from .prompts import Prompt, check_id, check_params, is_chat, template_arguments, text_of, untokenized, with_ids
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer import Tokenizer
from .tokenizer_pool import TokenizerPool

# of this process alone: prompts reach the engine's as ids
OURS = ("tokenizer_pool_size", "renderer_num_workers")


class AsyncEngineArgs:
    """The arguments of an AsyncLLM: those of LLM, checked. `config` is what they mean."""

    def __init__(self, model: Any = "smollm2", *, weights: Any = None, **arguments: Any):
        self.model, self.weights, self.arguments = model, weights, arguments
        self.config = engine_config(model, **arguments)

    def __repr__(self) -> str:
        return f"AsyncEngineArgs({', '.join(f'{k}={v!r}' for k, v in {'model': self.model, **self.arguments}.items())})"


class StreamClosed(Exception):
    """Another task has closed the iterator that this one waits for."""


class OutputStream:
    """The outputs of one request, up to the finished one. An async iterator.

    The request is sent when the first is waited for. It is aborted when the iterator is closed or collected, or a task
    cancelled that waits for an output.
    """

    def __init__(self, begin: Callable[[], Awaitable[Inbox]], end: Callable[[Inbox], None], text: str | None):
        self.begin, self.end, self.text = begin, end, text
        self.inbox: Inbox | None = None
        self.closed = self.waited_for = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.closed:
            raise StopAsyncIteration
        if self.waited_for:
            raise RuntimeError("another task waits for this iterator's next output: an iterator has one reader")
        self.waited_for = True
        try:
            if self.inbox is None:
                self.inbox = await self.begin()
            if self.closed:
                raise StreamClosed
            output = await self.inbox.get(self.text)
        except StreamClosed:
            self._end()
            raise StopAsyncIteration from None
        except BaseException:
            self._end()
            raise
        finally:
            self.waited_for = False
        if output.finished:
            self._end()
        return output

    async def aclose(self) -> None:
        """Aborts the request, if it has not ended. A task that waits for its next output finds the end."""
        inbox = self.inbox
        self._end()
        if inbox is not None:
            inbox.fail(StreamClosed())

    def _end(self) -> None:
        inbox, self.inbox, self.closed = self.inbox, None, True
        if inbox is not None:
            self.end(inbox)

    def __del__(self) -> None:
        self._end()


class AsyncLLM:
    """A model in a process of its own, ready to generate for an event loop, or for several in turn.

    Construction takes as long as LLM's, and raises what LLM's would. Use it as an async context manager, or call
    `shutdown`; its process ends with this one in any case, however that ends. `tokenizer_pool` turns prompts into ids,
    in this process or in more of them, so that the engine does not wait for that.

    If the engine's process dies, EngineDeadError is raised by all that is open and all that comes after.
    """

    def __init__(self, model: Any = "smollm2", *, weights: Any = None, **arguments: Any):
        args = AsyncEngineArgs(model, weights=weights, **arguments)
        self.config, self.inboxes = args.config, Inboxes()
        theirs = {name: value for name, value in arguments.items() if name not in OURS}
        self.client = EngineClient(model, weights, theirs, self.inboxes)
        try:
            self.tokenizer = tokenizer_of(self.config)
            self.tokenizer_pool = TokenizerPool(self.tokenizer, self.config.tokenizer_pool_size)
            self.info = self.client.ready.result()
        except BaseException:
            self.client.close()
            raise
        # nothing that lives on its own knows of this object, so one that nobody holds is collected, and this called
        self._close = weakref.finalize(self, _close, self.client, self.tokenizer_pool)

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLM:
        return cls(args.model, weights=args.weights, **args.arguments)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """The outputs of one request, as its output_kind says, up to the one that is finished.

        A slow reader finds what it has missed in one output. Leaving the loop, or cancelling the task that is in it,
        aborts the request. Raises ValueError for what is wrong with the request, QueueFullError,
        RequestFailedError if a step fails, EngineDeadError.
        """

        async def ids() -> Prompt:
            text = untokenized(prompt)
            if text is None or self.tokenizer is None:
                return prompt
            return with_ids(prompt, await self._tokenizer_call("encode", text))

        return self._outputs(ids, text_of(prompt), sampling_params, request_id, priority, cache_salt)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **template: Any,
    ) -> OutputStream:
        """generate, for one conversation. `template` goes to the tokenizer's apply_chat_template."""

        async def ids() -> Prompt:
            if not is_chat(messages):
                raise ValueError(f"messages {messages!r} is not one conversation: a list of at least one message")
            self.get_tokenizer()
            variables = template_arguments(template)
            return {"prompt_token_ids": await self._tokenizer_call("apply_chat_template", messages, **variables)}

        return self._outputs(ids, None, sampling_params, request_id, priority, cache_salt)

    def _outputs(
        self,
        ids: Callable[[], Awaitable[Prompt]],
        text: str | None,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> OutputStream:
        async def begin() -> Inbox:
            if request_id is not None:
                check_id(request_id)
            deltas = params is not None and check_params(params).output_kind is RequestOutputKind.DELTA
            inbox = self.inboxes.make(request_id, deltas)
            try:
                prompt = await ids()
                self.client.send(Add(inbox.number, inbox.request_id, prompt, params, priority, cache_salt))
            except BaseException:
                self.inboxes.remove(inbox)
                raise
            inbox.sent = True
            if inbox.aborted:
                self.client.send(Abort((inbox.number,)))
            return inbox

        def end(inbox: Inbox) -> None:
            # what an error has ended is not open any more
            if self.inboxes.remove(inbox) and not inbox.finished:
                self.client.send(Abort((inbox.number,)))

        return OutputStream(begin, end, text)

    async def _tokenizer_call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of a method of the tokenizer. The event loop goes on meanwhile."""
        pool = self.tokenizer_pool
        if pool.size:
            return await asyncio.wrap_future(pool.submit(method, *arguments, **keywords))
        return await asyncio.to_thread(pool.call, method, *arguments, **keywords)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests: their iterators give one last output, of finish_reason "abort". Others are passed over."""
        names = [request_id] if isinstance(request_id, str) else sequence("request_id", request_id)
        inboxes = self.inboxes.find(names)
        for inbox in inboxes:
            inbox.aborted = True
        if sent := tuple(inbox.number for inbox in inboxes if inbox.sent):
            self.client.send(Abort(sent))

    async def get_stats(self) -> EngineStats:
        """How the engine stands, behind all that it was asked before."""
        return await self._ask("get_stats")

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests are running."""
        return await self._ask("reset_prefix_cache")

    async def set_limits(self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> None:
        """LLM.set_limits, while requests are running."""
        await self._ask("set_limits", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """LLM.sleep. Iterators of requests that it aborts give one last output, of finish_reason "abort"."""
        await self._ask("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Sequence[str] | None = None, *, weights: Any = None) -> None:
        """LLM.wake_up."""
        await self._ask("wake_up", tags=tags, weights=weights)

    async def is_sleeping(self) -> bool:
        """LLM.is_sleeping."""
        return await self._ask("is_sleeping")

    async def get_metrics(self) -> Any:
        """LLM.get_metrics, and those of the tokenizer pool here."""
        return await self._ask("get_metrics") + pool_exporter(self.tokenizer_pool, self.config.model).values()

    async def metrics_text(self) -> str:
        """LLM.metrics_text, and those of the tokenizer pool here."""
        return await self._ask("metrics_text") + pool_exporter(self.tokenizer_pool, self.config.model).text()

    async def _ask(self, question: str, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self.client.ask(question, **arguments))

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead."""
        self.client.check()

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self.client.dead is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why it is dead."""
        return self.client.dead

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init, or a ModelSpec without one)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults that the checkpoint's generation_config.json asks for."""
        return self.info.default_params

    def shutdown(self) -> None:
        """Ends the engine's process and the tokenizers'. What is open ends with EngineDeadError."""
        self._close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.shutdown)


def _close(client: EngineClient, pool: TokenizerPool) -> None:
    client.close()
    pool.close()
