"""What a request returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .detokenizer import token_text
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's place in the distribution: natural logarithm (or logit, by logprobs_mode), rank from 1, and what it
    says where it stands: "" inside of a character, all of it at its end. `Tokenizer.token_bytes` has its exact bytes.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None  # None: there is no tokenizer

    def __repr__(self) -> str:
        return f"Logprob({self.logprob:.4f}, rank={self.rank}, {self.decoded_token!r})"


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When what happened to a request, in seconds; None: not yet. Of n samples, the first or the last of all.

    The `_time`s are times of day whose differences a monotonic clock measured. The `_ts`, vLLM's, are that clock's own
    (time.perf_counter), and are kept only with disable_log_stats=False.
    """

    arrival_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def first_token_latency(self) -> float | None:
        """vLLM's name of time_to_first_token."""
        return self.time_to_first_token

    @property
    def latency(self) -> float | None:
        """From arrival to the last token."""
        return _between(self.arrival_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n completions of a request, as far as it has come.

    `logprobs` has a dict of token id to Logprob for each of `token_ids`, the sampled token first. `finish_reason` is
    "stop", "length", "repetition", "abort", "error" or None; `stop_reason` the stop string or id that ended it, None
    for end-of-text. `routed_experts` (enable_return_routed_experts, of one that has ended) is int16 [tokens, layers,
    chosen]: of each token of prompt and output but the last, in the layers that have experts, the best expert first.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    error: str | None = None  # what went wrong, of one that ended with "error"
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        parts = [f"index={self.index}", f"text={self.text!r}", f"token_ids={_short(self.token_ids)}"]
        parts += [f"finish_reason={self.finish_reason!r}"]
        if self.stop_reason is not None:
            parts.append(f"stop_reason={self.stop_reason!r}")
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        if self.cumulative_logprob is not None:
            parts.append(f"cumulative_logprob={self.cumulative_logprob:.4f}")
        return f"CompletionOutput({', '.join(parts)})"


@dataclass(frozen=True)
class RequestOutput:
    """What is known of a request. `outputs` are its n completions in order of their index."""

    request_id: str
    prompt: str | None  # None: it came as token ids
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None  # one a token; None where none was asked for
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None: not admitted yet
    lora_request: Any = None

    def __repr__(self) -> str:
        prompt = _short(self.prompt_token_ids) if self.prompt is None else repr(self.prompt)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, finished={self.finished}, "
            f"num_cached_tokens={self.num_cached_tokens}, outputs={self.outputs})"
        )


def _short(ids: Sequence[int], most: int = 16) -> str:
    """The ids as a list, its middle left out when it is long."""
    if len(ids) <= most:
        return str(list(ids))
    head, tail = (", ".join(map(str, part)) for part in (ids[: most // 2], ids[-(most // 2) :]))
    return f"[{head}, ... {len(ids) - most} more ..., {tail}]"


def logprobs_of(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    given: Iterable[tuple[int, float, int]] = (),
    *,
    tokenizer: Tokenizer | None,
    context_ids: Sequence[int],
) -> dict[int, Logprob]:
    """Returns the entry of one position: the token there, the top ones, most likely first, and those in `given`.

    `top_logprobs` fall, so the rank of one is how many are at least as large. `context_ids` are the tokens before this
    one, at least 4 if there are so many: of some characters a token is only a part.
    """

    def text(i: int) -> str | None:
        return None if tokenizer is None else token_text(tokenizer.pieces, context_ids, i)

    entry = {token_id: Logprob(logprob, rank, text(token_id))}
    for i, value, place in zip(top_ids, top_logprobs, _ranks(top_logprobs), strict=True):
        if i != token_id:
            entry[i] = Logprob(value, place, text(i))
    for i, value, place in given:
        if i not in entry:
            entry[i] = Logprob(value, place, text(i))
    return entry


def _ranks(falling: Sequence[float]) -> list[int]:
    """How many of all values are at least as large as each; equal ones share the last place."""
    ranks = list(range(1, len(falling) + 1))
    for i in range(len(falling) - 2, -1, -1):
        if falling[i] == falling[i + 1]:
            ranks[i] = ranks[i + 1]
    return ranks
