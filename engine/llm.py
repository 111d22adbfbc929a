"""The loop from prompts to outputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from .build import build
from .config import engine_config
from .output_processor import Family, OutputProcessor
from .outputs import RequestOutput
from .progress import Progress
from .prompts import Prompt, list_of_messages, list_of_params, list_of_prompts, salt_of, token_ids_of
from .request import Request
from .runner import Pending
from .sampling_params import SamplingParams, request_key
from .stats import StatsLogger
from .tokenizer import Tokenizer


class LLM:
    """A model, ready to generate.

    `model` is an alias ("smollm2"), a directory, a .gguf file, a hub id, or a ModelSpec of one's own (with `weights=`
    a tree of arrays, or `load_format="dummy"`). The other arguments are vLLM's: docs/engine_arguments.md. Raises
    ValueError for what is wrong in them, NotImplementedError for what is not built yet.
    """

    def __init__(self, model: Any = "smollm2", *, weights: Any = None, **arguments: Any):
        parts = build(engine_config(model, **arguments), weights)
        self.config, self.model, self.backend = parts.config, parts.model, parts.backend
        self.layout, self.memory_plan = parts.layout, parts.memory_plan
        self.runner, self.scheduler, self.tokenizer = parts.runner, parts.scheduler, parts.tokenizer
        self.eos_ids, self.defaults, self.step_log = parts.eos_ids, parts.default_params, parts.step_log
        self.processor = OutputProcessor(self.tokenizer)
        self.stats = None if self.config.disable_log_stats else StatsLogger(self.scheduler)
        self.unread: Pending | None = None
        # what got a token, or an error, and was not returned yet; by request id
        self.news: dict[str, Family] = {}
        self.ids, self.num_arrived = itertools.count(), 0
        self.seeds = random.Random(self.config.seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order.

        A prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int]}. All requests are
        checked before the first runs.
        """
        prompts = list_of_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = list_of_params(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"{len(priority)} priorities for {len(prompts)} prompts")
        names = [self._next_id() for _ in prompts]
        families = [
            self._family(name, prompt, p, priority[i] if priority else 0)
            for i, (name, prompt, p) in enumerate(zip(names, prompts, params, strict=True))
        ]
        for name, family, prompt in zip(names, families, prompts, strict=True):
            self._admit(name, family, prompt)
        return self._run(names, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """generate, for one conversation or a list of them. `template` goes to the tokenizer's apply_chat_template."""
        conversations = list_of_messages(messages)
        prompts = [{"prompt_token_ids": self._chat_ids(c, **template)} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, **template: Any) -> Iterator[str]:
        """The text of one completion, piece by piece. `prompt` may also be a list of chat messages.

        Other requests go on meanwhile; leaving the loop early aborts this one. Several streams may be read in turns.
        """
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]:
            prompt = {"prompt_token_ids": self._chat_ids(prompt, **template)}
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if params.n != 1 or not params.detokenize or self.tokenizer is None:
            raise ValueError(
                f"stream gives one text: n is {params.n}, detokenize is {params.detokenize}, "
                f"and there is {'no' if self.tokenizer is None else 'a'} tokenizer"
            )
        request_id = self._next_id()
        self.add_request(request_id, prompt, params)
        (member,) = self.processor.families[request_id].members
        assert member.stream is not None
        try:
            while True:
                if piece := member.stream.delta():
                    yield piece
                elif member.request.finish_reason == "error":
                    raise RuntimeError(f"request {request_id!r} was ended by a step that failed in another call")
                elif member.request.finish_reason:
                    return
                else:
                    self._advance()
                    self.news.pop(request_id, None)
        finally:
            self.abort(request_id)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues one request; step() returns its outputs. Raises ValueError for what can never be served."""
        self._admit(request_id, self._family(request_id, prompt, params, priority, cache_salt), prompt)

    def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests and frees their blocks at once; ids that are not running are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            for request in self.processor.requests(name):
                if request.finish_reason is None:
                    self.scheduler.finish(request, "abort")
            self.processor.drop(name)
            self.news.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to return."""
        return self.scheduler.has_work or self.unread is not None or bool(self.news)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns what the requests that got a token have so far.

        Those that a generate() or stream() in between has moved on are among them. If the step fails, all requests
        end with "error", and the next call returns them.
        """
        self._advance()
        news, self.news = list(self.news.values()), {}
        return [self.processor.output(family) for family in news]

    def _advance(self) -> list[Request]:
        """Plans and launches a step, then reads the one before it (overlapped) or itself (synchronous)."""
        try:
            plan = self.scheduler.schedule()
            pending = self.runner.launch(plan) if plan else None
            if self.config.async_scheduling:
                pending, self.unread = self.unread, pending
            touched = self._absorb(pending) if pending else []
        except BaseException:
            # a plan, the cache or a token may be half done or lost (Ctrl-C too): nobody can go on from that
            self.unread = None
            self.scheduler.abandon()
            self.runner.reset()
            self.news |= self.processor.families
            raise
        if self.stats:
            self.stats.after_step(len(touched))
        self.news |= {family.id: family for family in self.processor.families_of(touched)}
        return touched

    def _absorb(self, pending: Pending) -> list[Request]:
        """Takes in what a step sampled. Returns the requests that got a token, ended ones included."""
        result = pending.result()
        touched = self.scheduler.update(pending.plan, result.token_ids)
        if self.step_log:
            self.step_log.append(pending.plan, result.token_ids, result.digests)
        at = {chunk.request_id: i for i, chunk in enumerate(pending.plan.sampled)}
        for request in touched:
            stop = self.processor.push(request, result, at[request.id])
            if stop is not None and request.finish_reason != "stop":
                if request.finish_reason is None:
                    self.scheduler.finish(request, "stop", stop)
                    self.processor.finish(request)
                request.finish_reason, request.stop_reason = "stop", stop
        return touched

    def _run(self, family_ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(family_ids)
        try:
            with Progress(len(wanted), use_tqdm) as bar:
                while len(done) < len(wanted):
                    touched = self._advance()
                    mine = [self.news.pop(name) for name in wanted & self.news.keys()]
                    ended = {f.id: self.processor.output(f) for f in mine if f.finished}
                    bar.advance(len(touched), len(ended))
                    done |= ended
        finally:
            self.abort([i for i in family_ids if i not in done])
        return [done[i] for i in family_ids]

    def _family(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> list[Request]:
        """The n requests of one prompt, checked but not queued. The first computes the prompt for all."""
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority {priority} needs scheduling_policy='priority'")
        names = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        if taken := [name for name in (request_id, *names) if name in self.processor]:
            raise ValueError(f"request id {taken[0]!r} is in use")
        ids = token_ids_of(prompt, self.tokenizer, self.model.vocab_size)
        eos = frozenset() if params.ignore_eos else self.eos_ids
        params = params.resolve(
            self.model.vocab_size, self.config.max_logprobs, has_tokenizer=self.tokenizer is not None, eos_ids=eos
        )
        seed = self.seeds.getrandbits(62) if params.seed is None else params.seed
        salt = salt_of(prompt, cache_salt)
        family: list[Request] = []
        for i, name in enumerate(names):
            request = Request(name, ids, params, request_key(seed, i), eos, priority, cache_salt=salt, index=i)
            request.first = family[0] if family else None
            self.scheduler.check(request)
            family.append(request)
        return family

    def _admit(self, name: str, family: list[Request], prompt: Prompt) -> None:
        for request in family:
            request.arrival = self.num_arrived
            self.num_arrived += 1
            self.scheduler.add(request)
        self.processor.add(name, family, prompt)

    def _next_id(self) -> str:
        """A request id that is not in use."""
        while (name := str(next(self.ids))) in self.processor:
            pass
        return name

    def _chat_ids(self, messages: Sequence[dict[str, Any]], **template: Any) -> list[int]:
        return self.get_tokenizer().apply_chat_template(messages, **template)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init, or a ModelSpec without one)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults that the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self.defaults)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests are running."""
        return self.scheduler.reset_prefix_cache()
