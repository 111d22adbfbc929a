"""A file of requests in OpenAI's batch format through one engine: `octavo run-batch`. Its promises: docs/batch.md."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from .batch_file import FileResults, Line, PipeResults, Results, check_line, failure, read_lines, success
from .collector import Seldom
from .llm import LLM
from .openai_embeddings import EmbeddingAsk, embedding_ask, embedding_response
from .openai_protocol import Ask, RequestError, chat_ask, check_model, completion_ask, served_names
from .openai_response import response
from .outputs import RequestOutput
from .progress import Progress
from .sampling_params import RequestOutputKind, SamplingParams

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
# samples in the engine at a time: twice what runs, so that a seat that gets free is taken in the next step
IN_FLIGHT = 2
# lines read and not yet written, for each sample that runs: those that are done wait for slower ones before them
UNWRITTEN, LEAST_UNWRITTEN = 32, 1024


@dataclass
class Summary:
    """What became of a batch. `resumed` lines had a result before; the rest counts those of this run."""

    num_lines: int = 0
    num_resumed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        speed = self.num_completion_tokens / self.seconds if self.seconds else 0.0
        before = f", {self.num_resumed} lines had been done before" if self.num_resumed else ""
        return (
            f"{self.num_lines} lines in {self.seconds:.1f} s, {self.num_failed} of them with an error{before}; "
            f"{self.num_prompt_tokens} tokens in, {self.num_completion_tokens} out ({speed:.1f} tok/s)"
        )


def _open_results(target: str) -> Results:
    if target == "-":
        return PipeResults(sys.stdout.buffer)
    if (path := Path(target)).exists() and not path.is_file():
        return PipeResults(open(path, "wb"))  # a named pipe, /dev/null
    return FileResults(path)


@dataclass
class Entry:
    """A line that has been read and whose result is not written yet."""

    line: Line
    ask: Ask | EmbeddingAsk | None = None
    model: str = ""
    outputs: list[RequestOutput | None] = field(default_factory=list)
    result: bytes | None = None
    num_tokens: int = 0


class Batch:
    """The files of one batch, open. Raises ValueError if the output holds results of other requests.

    `source` and `target` are paths, or "-" for stdin and stdout. `model` is what LLM gets: another model's results are
    not gone on with.
    """

    def __init__(self, source: str, target: str, model: Any):
        if source != "-" and target != "-" and Path(source).resolve() == Path(target).resolve():
            raise ValueError(f"{source} is both input and output")
        self.names, self.summary, self.total = served_names(model), Summary(), None
        self.custom_ids: dict[str, int] = {}  # to the number of the line
        with ExitStack() as files:
            lines: BinaryIO = sys.stdin.buffer if source == "-" else files.enter_context(open(source, "rb"))
            if source != "-":
                self.total = sum(1 for raw in lines if raw.strip())
                lines.seek(0)
            self.results = _open_results(target)
            files.callback(self.results.close)
            self.lines = self.results.resume(read_lines(lines, self.names[0]), self._took)
            # nothing was wrong: they stay open
            self.files = files.pop_all()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def run(self, llm: LLM, *, progress: bool = False) -> Summary:
        """Serves all lines that have no result yet. What is written stays when it is interrupted."""
        if llm.config.max_num_queued_reqs is not None:
            raise ValueError(f"max_num_queued_reqs {llm.config.max_num_queued_reqs}: a batch fills the queue itself")
        start = time.perf_counter()
        with Progress(self.total, progress) as bar:
            bar.advance(0, self.summary.num_resumed)
            _Run(llm, self, bar.advance).run()
        self.summary.seconds = time.perf_counter() - start
        return self.summary

    def check_new(self, custom_id: str, line: Line) -> None:
        """Raises RequestError for a custom_id that an earlier line has: nobody could tell their results apart."""
        first = self.custom_ids.setdefault(custom_id, line.number)
        if first != line.number:
            raise RequestError(f"custom_id {custom_id!r} is that of line {first} too", param="custom_id")

    def _took(self, line: Line) -> None:
        self.summary.num_resumed += 1
        try:
            custom_id, _, _ = check_line(line.parse())
        except RequestError:
            return
        self.custom_ids.setdefault(custom_id, line.number)


class _Run:
    """The loop: feeds lines while there is room, runs steps, writes what is done in the order of the input."""

    def __init__(self, llm: LLM, batch: Batch, advance: Callable[[int, int], None]):
        self.llm, self.batch, self.advance = llm, batch, advance
        self.lines: Iterator[Line] = batch.lines
        self.unwritten: deque[Entry] = deque()
        self.home: dict[str, tuple[Entry, int]] = {}  # request id to the line, and which of its prompts
        self.embeddings: list[Entry] = []  # to be served together
        self.num_in_flight = 0  # samples and embeddings
        seats = llm.config.max_num_seqs * llm.config.data_parallel_size
        self.most_in_flight, self.most_unwritten = IN_FLIGHT * seats, max(LEAST_UNWRITTEN, UNWRITTEN * seats)

    def run(self) -> None:
        try:
            with Seldom():
                while self._feed() or self.unwritten:
                    self._step()
        finally:
            self.llm.abort(list(self.home))

    def _step(self) -> None:
        if self.embeddings:
            self._embed()
        self._write()
        if self.home:
            for output in self.llm.step():
                if output.finished:
                    self._take(output)

    def _feed(self) -> bool:
        """Starts lines while there is room; False: there are no more."""
        while self.num_in_flight < self.most_in_flight and len(self.unwritten) < self.most_unwritten:
            line = next(self.lines, None)
            if line is None:
                return False
            entry = Entry(line)
            self.unwritten.append(entry)
            try:
                self._start(entry)
            # the last two: numbers beyond a float, and nesting too deep for Python
            except (ValueError, NotImplementedError, OverflowError, RecursionError) as error:
                self._fail(entry, error)
        return True

    def _start(self, entry: Entry) -> None:
        """Gives a line's prompts to the engine: all, or none and an exception."""
        custom_id, url, body = check_line(entry.line.parse())
        self.batch.check_new(custom_id, entry.line)
        entry.ask = ask = self._ask(url, body)
        entry.model = check_model(body, self.batch.names)
        if isinstance(ask, EmbeddingAsk):
            self.embeddings.append(entry)
            self.num_in_flight += len(ask.prompts)
            return
        if ask.stream:
            raise RequestError("stream=true: a batch has nobody to stream to", param="stream")
        names = [f"{entry.line.id}-{i}" for i in range(len(ask.prompts))]
        entry.outputs = [None] * len(names)
        try:
            for i, (name, prompt) in enumerate(zip(names, ask.prompts)):
                self.llm.add_request(name, prompt, self._params(entry, ask, i), priority=ask.priority)
                self.home[name] = (entry, i)
                self.num_in_flight += ask.params.n
        except BaseException:
            self._drop(names)
            raise

    def _ask(self, url: str, body: Any) -> Ask | EmbeddingAsk:
        match url:
            case "/v1/chat/completions":
                return chat_ask(body, self.llm.get_tokenizer(), self.llm.defaults)
            case "/v1/completions":
                return completion_ask(body, self.llm.tokenizer, self.llm.defaults)
            case "/v1/embeddings":
                return embedding_ask(body)
        raise RequestError(f"url {url!r} is none of {', '.join(URLS)}", param="url", status=404, code="unknown_url")

    def _embed(self) -> None:
        """Serves the embeddings that are waiting. Requests in the engine go on meanwhile."""
        entries, self.embeddings = self.embeddings, []
        try:
            self._embed_all(entries)
        except ValueError:
            # one of them cannot be served, and nothing has run
            for entry in entries:
                try:
                    self._embed_all([entry])
                except ValueError as error:
                    self._fail(entry, error)
        self.num_in_flight -= sum(len(entry.ask.prompts) for entry in entries if entry.ask)

    def _embed_all(self, entries: list[Entry]) -> None:
        asks = [entry.ask for entry in entries if isinstance(entry.ask, EmbeddingAsk)]
        each = [(prompt, ask.params) for ask in asks for prompt in ask.prompts]
        vectors = iter(self.llm.embed([p for p, _ in each], [params for _, params in each], use_tqdm=False))
        for entry, ask in zip(entries, asks, strict=True):
            body = embedding_response(ask, list(islice(vectors, len(ask.prompts))), model=entry.model)
            self._succeed(entry, body, ask.request_id)

    def _params(self, entry: Entry, ask: Ask, index: int) -> SamplingParams:
        """The params with a seed that follows from the line: a batch that was killed goes on as if it had not been."""
        params = ask.params
        seed = params.seed
        if seed is None:
            seed = int(entry.line.id.rsplit("_", 1)[1][:15], 16) ^ (self.llm.config.seed & (2**60 - 1))
            seed += index * params.n
        return replace(params, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY)

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if (at := self.home.pop(name, None)) and isinstance(at[0].ask, Ask):
                self.num_in_flight -= at[0].ask.params.n
                self.llm.abort(name)

    def _take(self, output: RequestOutput) -> None:
        """Takes in a finished prompt; makes the line's result if it was the last."""
        entry, index = self.home.pop(output.request_id)
        entry.outputs[index] = output
        self.num_in_flight -= len(output.outputs)
        done = [o for o in entry.outputs if o is not None]
        if len(done) < len(entry.outputs):
            return
        failed = [sample.error for o in done for sample in o.outputs if sample.finish_reason == "error"]
        if failed:
            # what it can say is what was wrong with the request: a grammar that cannot be compiled, say
            message = failed[0] or "the engine ended the request with an error"
            self._fail(entry, RequestError(message, status=400 if failed[0] else 500))
            return
        assert isinstance(entry.ask, Ask)
        request_id = entry.line.id.removeprefix("batch_req_")
        body = response(
            entry.ask, done, self.llm.tokenizer, request_id=request_id, created=int(time.time()), model=entry.model
        )
        self._succeed(entry, body, entry.ask.request_id)

    def _succeed(self, entry: Entry, body: Mapping[str, Any], request_id: str | None) -> None:
        try:
            entry.result = success(entry.line, body, request_id)
        except ValueError as error:
            # NaN: of a model that overflows, say
            self._fail(entry, RequestError(f"the engine's answer cannot be written as JSON: {error}", status=500))
            return
        entry.num_tokens = body["usage"].get("completion_tokens", 0)
        self.batch.summary.num_prompt_tokens += body["usage"]["prompt_tokens"]
        self.batch.summary.num_completion_tokens += entry.num_tokens

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.result = failure(entry.line, error)
        self.batch.summary.num_failed += 1

    def _write(self) -> None:
        """Writes the results that no slower line is before."""
        ready: list[Entry] = []
        while self.unwritten and self.unwritten[0].result is not None:
            ready.append(self.unwritten.popleft())
        if ready:
            self.batch.results.append([e.result for e in ready if e.result is not None])
            self.batch.summary.num_lines += len(ready)
            self.advance(sum(e.num_tokens for e in ready), len(ready))
