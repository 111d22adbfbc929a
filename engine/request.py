"""A request and where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .plan import Edits
from .reads import Wanted
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .structured_output import Grammar


@dataclass(slots=True)
class Times:
    """When what first happened to a request, in seconds of time.perf_counter; None: not yet."""

    queued: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: bool = False


@dataclass(eq=False)
class Request:
    """`computed` counts tokens scheduled, `in_flight` tokens sampled on the device that the host has not read.

    `tokens` are the known ones, prompt and output. Fields behind the blank line are the scheduler's.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    key: tuple[int, int] = (0, 0)  # the random stream, as two int32
    eos_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    priority: int = 0  # smaller goes first, under the priority policy
    arrival: int = 0  # order of arrival, unique
    cache_salt: str | None = None
    edits: Edits | None = None  # what params ask of the logits, in ids
    index: int = 0  # which of n samples
    first: Request | None = None  # the sibling that computes the prompt for all n
    # nobody decides by these two
    arrival_time: float = field(default_factory=time.perf_counter)
    times: Times | None = None  # kept by metrics.py, if at all
    replica: int = 0  # which of the engine's replicas has it
    samples: bool = True  # False: computed only
    embeds: Any = None  # PromptEmbeds, where it brought some; the scheduler does not look into them
    block_digests: tuple[bytes, ...] = ()  # what the K/V of its first blocks depend on beside tokens
    wanted: Wanted | None = None  # what else is read of its prompt
    grammar: Grammar | None = None  # where its output stands in the form that it must have
    error: str | None = None  # why it ended with "error"

    tokens: list[int] = field(default_factory=list)
    limit: int = 0  # tokens, prompt and output, at which it ends by length
    variant: int = 0  # of sampling.VARIANTS: the head it needs
    num_logprobs: int = -1
    computed: int = 0
    in_flight: int = 0
    row: int | None = None  # None: not running
    last_step: int = -1  # the last plan that goes on with it
    num_read: int = 0  # places below it are in a plan, as far as they are wanted
    complete: bool = False  # computed only, and its last chunk is in a plan
    first_step: int = 0  # the first plan that can hold it
    blocks: list[list[int]] = field(default_factory=list)  # one block table a cache group
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    num_cached: int | None = None  # tokens hit at the first admission
    preemptions: int = 0
    compiling: bool = False  # it cannot start before its grammar is there
    finish_reason: str | None = None  # "stop", "length", "repetition", "abort" or "error"
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        # each of its tokens is held against these
        self.stops = self.eos_ids.union(self.params.stop_token_ids)
        self.may_go_round = self.params.repetition_detection is not None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known and in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def num_wanted(self) -> int:
        """Tokens known and in flight that no plan computes yet."""
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def max_tokens(self) -> int | None:
        """Output tokens at most; None: as many as max_model_len leaves room for."""
        return self.params.max_tokens if self.samples else 0

    @property
    def most_hit(self) -> int:
        """How many of its first tokens need not be computed if they are in the cache."""
        last = len(self.tokens) - 1
        return last if self.wanted is None or self.num_read == self.wanted.stop else min(self.first_unread, last)

    @property
    def first_unread(self) -> int:
        """The first place that is wanted and not in any plan yet."""
        return max(self.num_read, self.wanted.start if self.wanted else 0)
