"""The loop from prompts to outputs."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..models.logit_edits import LogitsProcessor
from .beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from .build import build
from .checks import integer, sequence
from .collector import Paused
from .config import engine_config
from .edits import edits_of
from .engine_stats import EngineStats, stats_of
from .errors import QueueFullError
from .limits import queue_order
from .logprob_params import sibling_params, wanted_of
from .metrics import EngineMetrics
from .metrics_export import Exporter, Metric, engine_exporter
from .output_processor import Family, OutputProcessor
from .outputs import RequestOutput
from .parallel.remote_runner import register
from .pooling import (
    EmbeddingRequestOutput,
    HiddenStatesOutput,
    PoolingParams,
    RoutedExpertsOutput,
    embed,
    hidden_states,
    routed_experts,
)
from .prompt_embeds import check_beside, embeds_of
from .prompts import (
    Prompt,
    check_id,
    check_params,
    cut,
    is_chat,
    list_of_messages,
    list_of_params,
    list_of_prompts,
    salt_of,
    template_arguments,
    token_ids_of,
)
from .request import Request
from .routing import ROUTINGS
from .sampling_params import SamplingParams, request_key
from .score import ScoreOutput, score
from .sleep import Sleeps
from .stats import StatsLogger
from .structured_output import StructuredOutput, StructuredOutputsConfig
from .tokenizer import Tokenizer
from .tokenizer_pool import TokenizerPool


class LLM(Sleeps):
    """A model, ready to generate.

    `model` is an alias ("smollm2"), a directory, a .gguf file, a hub id, or a ModelSpec of one's own (with `weights=`
    a tree of arrays, or `load_format="dummy"`). The other arguments are vLLM's: docs/engine_arguments.md. Raises
    ValueError for what is wrong in them, NotImplementedError for what is not built yet.

    Threads may share one: whoever runs a step runs it for the requests of all.
    """

    def __init__(self, model: Any = "smollm2", *, weights: Any = None, **arguments: Any):
        parts = build(engine_config(model, **arguments), weights)
        self.config, self.model, self.backend = parts.config, parts.model, parts.backend
        self.layout, self.memory_plan = parts.layout, parts.memory_plan
        self.tokenizer, self.eos_ids, self.defaults = parts.tokenizer, parts.eos_ids, parts.default_params
        self.replicas, self.team = parts.replicas, parts.team
        self.routing = ROUTINGS[self.config.data_parallel_routing]([r.scheduler for r in self.replicas])
        self.tokenizer_pool = TokenizerPool(self.tokenizer, self.config.tokenizer_pool_size)
        if not self.config.disable_log_stats:
            for r in self.replicas:
                # those that step together count the tokens of all
                counted = r.runner.load_of_all if self.config.num_joint == 1 or r.index == 0 else None
                r.metrics = EngineMetrics(r.scheduler, expert_load=counted)
        watched = [r.metrics for r in self.replicas if r.metrics]
        self.stats = StatsLogger(watched) if watched else None
        self.processor = OutputProcessor(self.tokenizer, self.config.stream_interval, self.config.logprobs_mode)
        form = StructuredOutputsConfig.of(self.config.structured_outputs_config)
        self.structured = StructuredOutput(form, self.tokenizer, self.model.vocab_size, self.eos_ids)
        self.max_unread = max(2, self.config.pipeline_parallel_size) if self.config.async_scheduling else 1
        # queued requests with news that step() has not returned yet
        self.touched: dict[str, Family] = {}
        self.lock = threading.RLock()
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

        A prompt is a string, a list or array of token ids, {"prompt": str} or {"prompt_token_ids": [int]}. All requests
        are checked before the first runs; of more than there are seats, the last that fill those start longest first.
        What ends by a fault of its own (a wrong grammar), or by a step of another thread's call that fails, has
        finish_reason "error" and what was made until then.
        """
        prompts = self.tokenizer_pool.tokenized(list_of_prompts(prompts))
        params = list_of_params(self._or_default(sampling_params), len(prompts))
        priorities = [0] * len(prompts) if priority is None else sequence("priority", priority)
        if len(priorities) != len(prompts):
            raise ValueError(f"{len(priorities)} priorities for {len(prompts)} prompts")
        names = [self._next_id() for _ in prompts]
        each = zip(names, prompts, params, priorities, strict=True)
        # a collection would look at every id of every prompt: better once the first step runs
        with Paused() as pause:
            members = [self._members(name, prompt, p, first) for name, prompt, p, first in each]
            try:
                seats = sum(r.scheduler.limits.max_num_seqs for r in self.replicas)
                order = queue_order(members, seats, self.scheduler.config.max_model_len)
                queued = {i: self._admit(names[i], members[i], prompts[i]) for i in order}
                families = [queued[i] for i in range(len(prompts))]
                self._run(families, use_tqdm, pause)
                with self.lock:
                    return [self.processor.output(family) for family in families]
            finally:
                self.abort(names)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """generate, for one conversation or a list of them. `template` goes to the tokenizer's apply_chat_template."""
        conversations, variables = list_of_messages(messages), template_arguments(template)
        self.get_tokenizer()
        ids = self.tokenizer_pool.map("apply_chat_template", conversations, **variables)
        prompts = [{"prompt_token_ids": i} for i in ids]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best sequences behind each prompt; `concurrency_limit` is how many prompts are searched at a time."""
        return beam_search(self, prompts, params, use_tqdm=use_tqdm, concurrency_limit=concurrency_limit)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt. Params of all are given as PoolingParams, or by name: pooling="mean", dimensions=64."""
        if pooling_params is not None and params:
            raise ValueError(f"pooling_params and {', '.join(params)}: give one of them")
        return embed(self, prompts, PoolingParams(**params) if pooling_params is None else pooling_params, use_tqdm)

    def hidden_states(
        self, prompts: Prompt | Sequence[Prompt], layers: Sequence[int] = (-1,), *, use_tqdm: bool = True
    ) -> list[HiddenStatesOutput]:
        """Hidden states of all tokens of each prompt, by layer: 0 is the embedding, i what layer i - 1 gives.

        The last one has been through the final norm, as with transformers' output_hidden_states.
        """
        return hidden_states(self, prompts, layers, use_tqdm)

    def routed_experts(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[RoutedExpertsOutput]:
        """Which experts all tokens of each prompt go through, by layer. Raises ValueError if the model has none.

        Of a finished request, give its prompt's ids and its output's as one prompt.
        """
        return routed_experts(self, prompts, use_tqdm)

    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Any, *, use_tqdm: bool = True
    ) -> list[list[ScoreOutput]]:
        """How likely continuations are: for each prompt a list of one ScoreOutput a continuation.

        `continuations` has a continuation (text or token ids), or a list of them, for each prompt. A prompt is computed
        once, but for its last block, if the prefix cache is on. Text is encoded apart from the prompt, without special
        tokens: a space between the two belongs to the continuation. Raises ValueError for what cannot be scored.
        """
        return score(self, prompts, continuations, use_tqdm)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, **template: Any) -> Iterator[str]:
        """The text of one completion, piece by piece. `prompt` may also be a list of chat messages.

        Other requests go on meanwhile; leaving the loop early aborts this one. Raises RuntimeError if a step fails
        that somebody else runs.
        """
        if is_chat(prompt):
            prompt = {"prompt_token_ids": self._chat_ids(prompt, template)}
        elif template:
            raise ValueError(f"{', '.join(template)}: only a list of chat messages goes through a chat template")
        params = check_params(self._or_default(sampling_params))
        self.get_tokenizer()
        if params.n != 1 or not params.detokenize:
            raise ValueError(f"stream gives one text: n is {params.n}, detokenize is {params.detokenize}")
        name = self._next_id()
        members = self._members(name, prompt, params)
        try:
            yield from self._pieces(self._admit(name, members, prompt))
        finally:
            self.abort(name)

    def _pieces(self, family: Family) -> Iterator[str]:
        (member,) = family.members
        assert member.stream is not None
        while True:
            with self.lock:
                piece, ended = member.stream.delta(), member.request.finish_reason
            if piece:
                yield piece
            elif ended == "error" and member.request.error is not None:
                raise ValueError(f"request {family.id!r}: {member.request.error}")
            elif ended == "error":
                raise RuntimeError(f"request {family.id!r} was ended by a step that failed in another call")
            elif ended:
                return
            else:
                self._advance()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues one request; step() returns its outputs.

        Raises ValueError for what can never be served, QueueFullError beyond max_num_queued_reqs.
        """
        members = self._members(request_id, prompt, params, priority, cache_salt)
        with self.lock:
            self._check_queue(request_id, len(members))
            self._admit(request_id, members, prompt, queued=True)

    def _check_queue(self, request_id: str, num_new: int) -> None:
        most, schedulers = self.config.max_num_queued_reqs, [r.scheduler for r in self.replicas]
        if most is None:
            return
        num_waiting = max(0, sum(len(s.alive) - s.limits.max_num_seqs for s in schedulers) + num_new)
        if num_waiting > most:
            if self.metrics:
                self.metrics.num_rejected += num_new
            raise QueueFullError(
                f"request {request_id!r} is refused: {num_waiting} would wait, and max_num_queued_reqs is {most}"
            )

    def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests and frees their blocks at once; ids that are not running are passed over."""
        names = [request_id] if isinstance(request_id, str) else sequence("request_id", request_id)
        with self.lock:
            for name in names:
                for request in self.processor.requests(name):
                    if request.finish_reason is None:
                        replica = self.replicas[request.replica]
                        replica.scheduler.finish(request, "abort")
                        if replica.metrics:
                            replica.metrics.ended([request])
                self.processor.drop(name)
                self.touched.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return any(r.is_busy for r in self.replicas) or bool(self.touched)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the news of the requests of add_request: what their output_kind asks for, of those
        that got a token, stream_interval of them since the last output, or have ended.

        Also of those that got one in the steps of a generate or stream meanwhile, and of those that end with "error"
        because a step failed: that step's exception went to whoever ran it.
        """
        with self.lock:
            self._advance()
            touched, self.touched = self.touched, {}
            news = map(self.processor.news, touched.values())
            return [output for output in news if output is not None]

    def _members(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> list[Request]:
        """The n requests of one prompt, checked but not queued. The first computes the prompt for all."""
        arrived = time.perf_counter()
        check_id(request_id)
        if integer("priority", priority) and not self.scheduler.policy.ranks:
            raise ValueError(f"priority {priority} needs scheduling_policy='priority', or one of your own with a rank")
        embeds = embeds_of(prompt, self.model, self.config.block_size)
        ids = embeds.token_ids if embeds else token_ids_of(prompt, self.tokenizer, self.model.vocab_size)
        params, eos = self._resolved(params)
        if embeds:
            check_beside(params)
        else:
            ids = cut(ids, params, self.scheduler.config.max_model_len, self.config.allow_auto_truncate)
        edits = edits_of(params, self.model.vocab_size, self.tokenizer, self.runner.processors)
        salt = salt_of(prompt, cache_salt)
        seed = self.seeds.getrandbits(62) if params.seed is None else params.seed
        # what is read of the prompt is read once
        wanted, others, family = wanted_of(params, ids), sibling_params(params), []
        for i in range(params.n):
            name = request_id if params.n == 1 else f"{i}_{request_id}"
            request = Request(
                name, ids, params, request_key(seed, i), eos, priority, cache_salt=salt, index=i, edits=edits
            )
            request.wanted, wanted, params = wanted, None, others
            request.embeds, request.block_digests = embeds, embeds.digests if embeds else ()
            request.first, request.arrival_time = family[0] if family else None, arrived
            family.append(request)
        self.processor.check_free(request_id, family)
        # what it looks at is the same in all n
        self.scheduler.check(family[0])
        return family

    def _resolved(self, params: SamplingParams) -> tuple[SamplingParams, frozenset[int]]:
        """The params as this engine understands them, and the ids that end the request's text."""
        self.structured.check(check_params(params))
        eos = frozenset() if params.ignore_eos else self.eos_ids
        limits = self.model.vocab_size, self.config.max_logprobs
        return params.resolve(*limits, has_tokenizer=self.tokenizer is not None, eos_ids=eos), eos

    def _admit(self, name: str, members: list[Request], prompt: Prompt, *, queued: bool = False) -> Family:
        with self.lock:
            self._check_awake()
            family = self.processor.add(name, members, prompt, queued)
            replica = self.replicas[self.routing.choose(members)]
            scheduler = replica.scheduler
            try:
                for request in members:
                    request.arrival, request.replica = self.num_arrived, replica.index
                    self.num_arrived += 1
                    self.structured.start(request)
                    if request.embeds:
                        replica.runner.embeds[request.id] = request.embeds
                    scheduler.add(request)
            except BaseException:
                # a policy's rank may raise: all n are taken in, or none
                for request in members:
                    if scheduler.alive.get(request.id) is request:
                        scheduler.finish(request, "abort")
                    request.finish_reason = "abort"
                self.processor.drop(name)
                raise
            if replica.metrics:
                for request in members:
                    replica.metrics.queued(request)
            return family

    def _next_id(self) -> str:
        """A request id that is not in use."""
        while (name := str(next(self.ids))) in self.processor:
            pass
        return name

    def _chat_ids(self, messages: Sequence[Any], template: Mapping[str, Any]) -> list[int]:
        return self.get_tokenizer().apply_chat_template(messages, **template_arguments(template))

    def _or_default(self, params: Any) -> Any:
        return self.get_default_sampling_params() if params is None else params

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init, or a ModelSpec without one)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults that the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self.defaults)

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted and timed so far: docs/metrics.md. Needs disable_log_stats=False."""
        return self._exporter.values()

    def metrics_text(self) -> str:
        """The same as Prometheus scrapes it."""
        return self._exporter.text()

    def metrics_registry(self) -> Any:
        """The prometheus_client registry that holds them; it reads them whenever it is read."""
        return self._exporter.registry

    @cached_property
    def _exporter(self) -> Exporter:
        metrics = [r.metrics for r in self.replicas if r.metrics]
        if not metrics:
            raise ValueError(
                "disable_log_stats=True: there are no metrics; LLM(..., disable_log_stats=False) keeps them"
            )
        return engine_exporter(metrics, self.tokenizer_pool, self.config, self.memory_plan)

    def get_stats(self) -> EngineStats:
        """How the engine stands."""
        with self.lock:
            return stats_of([r.scheduler for r in self.replicas])

    def set_limits(self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> None:
        """Changes how much runs at a time in each replica, from the next step on; None: as it is.

        What is too many is preempted. Raises ValueError for more than the engine was made with.
        """
        with self.lock:
            for r in self.replicas:
                r.scheduler.set_limits(max_num_seqs, max_num_batched_tokens)

    def shutdown(self) -> None:
        """Aborts all requests and ends all processes of the engine. Not needed: whatever has no user left ends too."""
        self.abort(list(self.processor.families))
        self.tokenizer_pool.close()
        if self.team:
            self.team.close()

    def register_logits_processor(self, processor: LogitsProcessor) -> None:
        """Adds one while running. The head that holds them all is compiled when a request first selects one."""
        with self.lock:
            register(self.runners, self.team, processor)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests are running."""
        with self.lock:
            if any(r.scheduler.running for r in self.replicas):
                return False
            for r in self.replicas:
                self.routing.forget(r.index)
                r.scheduler.reset_prefix_cache()
            return True
