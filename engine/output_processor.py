"""Sampled ids to outputs: text, stop strings, logprobs, one RequestOutput for all n samples of a prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenizer import TextStream
from .logprobs import container, entry_of, prompt_entries
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .plan import Read
from .prompts import Prompt, text_of
from .read_head import ReadResult
from .request import Request
from .routed_experts import Parts, experts_of
from .runner import StepResult
from .sampling_params import RequestOutputKind
from .tokenizer import Tokenizer


@dataclass(eq=False)
class Member:
    """One of the n samples of a family, and what has come out of it."""

    request: Request
    stream: TextStream | None
    logprobs: Any  # a list of entries, or FlatLogprobs
    cumulative_logprob: float | None = 0.0
    reads: list[ReadResult] = field(default_factory=list)  # in the order of places
    routed: Parts | None = None  # its experts so far
    num_told: int = 0  # tokens that outputs have told of
    told_end: bool = False


@dataclass(eq=False)
class Family:
    """The n samples of one prompt."""

    id: str
    prompt: str | None
    members: list[Member]
    queued: bool  # by add_request: LLM.step returns its outputs
    arrival_time: float  # of time.time()
    first_token_time: float | None = None
    prompt_logprobs: Any = None  # entries so far, if they were asked for
    told_prompt: bool = False

    @property
    def finished(self) -> bool:
        return all(m.request.finish_reason is not None for m in self.members)

    def now(self) -> float:
        """The time of day, as far behind arrival_time as a monotonic clock says."""
        return self.arrival_time + time.perf_counter() - self.members[0].request.arrival_time


class OutputProcessor:
    """Knows every request that has been added and not yet given back as finished."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1, logprobs_mode: str = "raw_logprobs"):
        self.tokenizer, self.stream_interval = tokenizer, stream_interval
        # logits have no sum of any meaning
        self.no_sum: float | None = None if logprobs_mode.endswith("logits") else 0.0
        self.families: dict[str, Family] = {}
        self.home: dict[str, tuple[Family, Member]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.families or request_id in self.home

    def add(self, family_id: str, requests: Sequence[Request], prompt: Prompt, queued: bool) -> Family:
        """Takes in the n requests of one prompt."""
        self.check_free(family_id, requests)
        params = requests[0].params
        members = [Member(r, self._stream(r), container(params.flat_logprobs), self.no_sum) for r in requests]
        arrived = time.time() - (time.perf_counter() - requests[0].arrival_time)
        family = Family(family_id, text_of(prompt), members, queued, arrived)
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            family.prompt_logprobs = container(params.flat_logprobs)
            for _ in range((params.prompt_logprob_start or 0) + 1):
                family.prompt_logprobs.append(None)
        self.families[family_id] = family
        for m in members:
            self.home[m.request.id] = (family, m)
        return family

    def check_free(self, family_id: str, requests: Sequence[Request]) -> None:
        """Raises ValueError if one of these ids is in use, the n samples' own included."""
        for name in (family_id, *(r.id for r in requests)):
            if name in self:
                raise ValueError(f"request id {name!r} is in use")

    def _stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None or not request.params.detokenize:
            return None
        return TextStream(self.tokenizer, request.prompt, request.params)

    def requests(self, family_id: str) -> list[Request]:
        """The requests of a family; none if it is not known."""
        family = self.families.get(family_id)
        return [m.request for m in family.members] if family else []

    def push_read(self, request: Request, read: Read, found: ReadResult) -> None:
        """Takes in the next part of what a request wants read of its prompt."""
        family, member = self.home[request.id]
        if family.prompt_logprobs is not None:
            for entry in prompt_entries(request, read, found, self.tokenizer):
                family.prompt_logprobs.append(entry)
        if read.hidden or not request.samples:
            member.reads.append(found)

    def gather_experts(self, parts: Mapping[str, Parts]) -> None:
        """Takes in where the experts of requests gather, by id."""
        for name, found in parts.items():
            if name in self.home:
                self.home[name][1].routed = found

    def push(self, request: Request, result: StepResult, at: int) -> str | None:
        """Takes in the token that a step sampled for a request. Returns the stop string that it completed."""
        family, member = self.home[request.id]
        if family.first_token_time is None:
            family.first_token_time = family.now()
        if request.num_logprobs >= 0:
            self._push_logprob(member, result, at)
        stream = member.stream
        if stream is None:
            return None
        stream.push((result.token_ids[at],), request.finish_reason == "stop")
        if request.finish_reason is not None:
            stream.finish()
        return stream.stop

    def _push_logprob(self, member: Member, result: StepResult, at: int) -> None:
        params, tokens = member.request.params, member.request.tokens
        entry = entry_of(
            result, at, tokens[-1], params.num_logprobs, params.logprob_token_ids or (),
            tokenizer=self.tokenizer, context_ids=tokens[-5:-1],
        )  # fmt: skip
        if member.cumulative_logprob is not None:
            member.cumulative_logprob += entry[tokens[-1]].logprob
        member.logprobs.append(entry)

    def finish(self, request: Request) -> None:
        """Makes the text of an ended request final."""
        _, member = self.home[request.id]
        if member.stream is not None:
            member.stream.finish()

    def families_of(self, requests: Sequence[Request]) -> list[Family]:
        """The families of these requests, each once, in order."""
        return list({id(f): f for f in (self.home[r.id][0] for r in requests)}.values())

    def news(self, family: Family) -> RequestOutput | None:
        """What its output_kind wants to be told now; None: nothing yet. A finished family is forgotten."""
        params = family.members[0].request.params
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.output(family) if family.finished else None
        interval = params.stream_interval or self.stream_interval
        due = [m for m in family.members if _is_due(m, interval)]
        if not due:
            return None
        if params.output_kind is RequestOutputKind.DELTA:
            return self.output(family, [_delta(m) for m in due])
        for m in family.members:
            _tell(m)
        return self.output(family)

    def output(self, family: Family, completions: list[CompletionOutput] | None = None) -> RequestOutput:
        """These completions, or all that a family has so far. A finished one is forgotten."""
        if family.finished:
            self.drop(family.id)
        first = family.members[0].request
        return RequestOutput(
            request_id=family.id,
            prompt=family.prompt,
            prompt_token_ids=first.prompt,
            outputs=[_completion(m) for m in family.members] if completions is None else completions,
            finished=family.finished,
            prompt_logprobs=self._prompt_logprobs(family, completions is not None),
            num_cached_tokens=first.num_cached or 0,
            metrics=_metrics(family),
        )

    def _prompt_logprobs(self, family: Family, delta: bool) -> Any:
        """Those so far; of deltas only the first, which comes behind the prompt, has them."""
        told, family.told_prompt = family.told_prompt, True
        return None if family.prompt_logprobs is None or (delta and told) else family.prompt_logprobs[:]

    def drop(self, family_id: str) -> None:
        """Forgets a family; nothing happens if it is not known."""
        family = self.families.pop(family_id, None)
        for m in family.members if family else ():
            del self.home[m.request.id]


def _metrics(family: Family) -> RequestMetrics:
    requests = [m.request for m in family.members]
    times = [r.times for r in requests if r.times is not None]
    return RequestMetrics(
        arrival_time=family.arrival_time,
        first_token_time=family.first_token_time,
        finished_time=family.now() if family.finished else None,
        num_preemptions=sum(r.preemptions for r in requests),
        num_generation_tokens=sum(len(r.tokens) - len(r.prompt) for r in requests),
        queued_ts=min((t.queued for t in times), default=None),
        scheduled_ts=min((t.scheduled for t in times if t.scheduled is not None), default=None),
        first_token_ts=min((t.first_token for t in times if t.first_token is not None), default=None),
        last_token_ts=max((t.last_token for t in times if t.last_token is not None), default=None),
    )


def _completion(m: Member, start: int = 0, text: str | None = None) -> CompletionOutput:
    """What a sample has so far, from its start-th token on; `text` of these, if that is not all."""
    r, wanted = m.request, m.request.num_logprobs >= 0
    return CompletionOutput(
        index=r.index,
        text=text if text is not None else m.stream.text if m.stream else "",
        token_ids=r.tokens[len(r.prompt) + start :],
        cumulative_logprob=m.cumulative_logprob if wanted else None,
        logprobs=m.logprobs[start:] if wanted else None,
        finish_reason=r.finish_reason,
        stop_reason=r.stop_reason,
        error=r.error,
        routed_experts=experts_of(m.routed, len(r.tokens)) if m.routed and r.finish_reason is not None else None,
    )


def _is_due(m: Member, interval: int) -> bool:
    """Whether there is an end to tell of, a first token, or as many new ones as make an output."""
    if m.request.finish_reason is not None:
        return not m.told_end
    num_new = m.request.num_output - m.num_told
    return num_new >= (interval if m.num_told else 1)


def _tell(m: Member) -> int:
    """Marks all that there is as told. Returns how many tokens were before."""
    before, m.num_told = m.num_told, m.request.num_output
    m.told_end = m.request.finish_reason is not None
    return before


def _delta(m: Member) -> CompletionOutput:
    """What has come since the last one. All of them together are the completion."""
    return _completion(m, _tell(m), m.stream.delta() if m.stream else "")
