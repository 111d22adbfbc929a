"""What one step does, as a value: ids, rows and blocks, no live object. Serialisable, so that it can be logged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Reason(StrEnum):
    """Why a plan treats a request as it does. A running request that just gets its next tokens is a chunk, no more."""

    # what happened to it
    ADMITTED = "admitted"
    FORKED = "forked"  # admitted, and its prompt taken over from a running sibling
    RESUMED = "resumed"  # admitted again after a preemption
    PREEMPTED = "preempted"  # since the last plan, like the five ends below
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"
    # why a running one gets no tokens
    ENDS_UNREAD = "ends_unread"  # all of it is planned: it gives up its seat, once only its last token is unread
    # why the head of the waiting queue, and so all behind it, does not start
    NO_BUDGET = "no_budget"  # also a running one: the token budget is spent
    NEXT_BATCH = "next_batch"  # likewise: this batch has its share of the requests
    NO_SEAT = "no_seat"  # max_num_seqs are running
    NO_ROOM = "no_room"  # its blocks do not fit
    AFTER_PREEMPTION = "after_preemption"  # a step that preempts admits nobody
    # why a waiting one is set aside, without holding up those behind it
    IN_FLIGHT = "in_flight"  # preempted, with a token unread; a running one too where there are several batches
    GRAMMAR = "grammar"  # its grammar is being compiled
    SIBLING = "sibling"  # the first of its family computes the prompt


class Chunk(NamedTuple):
    """One request's part of one step: tokens start .. start + num_tokens. The one value made for each every step."""

    request_id: str
    row: int
    start: int
    num_tokens: int
    samples: bool  # whether a token comes out; a chunk that stops before the last known token yields none


@dataclass(frozen=True)
class Edits:
    """What few requests ask of the logits, in ids: whoever asks for none of it has no Edits."""

    allowed: tuple[int, ...] = ()  # empty: all
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    processors: tuple[tuple[int, float], ...] = ()  # columns of rows["processors"] that are not 0


@dataclass(frozen=True)
class Admission:
    """A row of CacheState.rows to be filled before the step."""

    row: int
    tokens: tuple[int, ...]
    num_computed: int
    prompt_len: int
    key: tuple[int, int]
    params: tuple[float, ...]  # in the order of sampling.PARAMS
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # what min_tokens forbids
    edits: Edits | None = None


@dataclass(frozen=True)
class TableWrite:
    """Block ids put into a row of one group's block table, from `index` on."""

    group: int
    row: int
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A block to be copied within a group before the step's writes."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class Read:
    """What the host reads of one chunk beside its sampled token: of the sequence's tokens start .. stop - 1."""

    chunk: int  # which of Plan.chunks
    start: int
    stop: int
    targets: tuple[int, ...] = ()  # ids whose logprob behind each is wanted; empty: none are
    num_logprobs: int = 0  # of the most likely, with each target
    token_ids: tuple[tuple[int, ...], ...] = ()  # more ids with each target
    hidden: tuple[str, ...] = ()  # names of hidden rows: "last", "norm", "embed", "layer.i"


@dataclass(frozen=True)
class Plan:
    """One decision of the scheduler. Equal state and events give equal plans."""

    step: int
    chunks: tuple[Chunk, ...]
    admitted: tuple[Admission, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    variant: str = "greedy"  # of the head: the largest that a sampled row needs
    num_logprobs: int = -1  # the largest that a sampled row asks for; -1: none
    reasons: tuple[tuple[str, Reason], ...] = ()  # by request id; of events since the last plan, then of this one
    reads: tuple[Read, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()  # a sampled chunk: ids whose logprobs it wants; empty: nobody does
    ended: tuple[str, ...] = ()  # ids of computed-only requests whose last chunk this is
    cuts: bool = False  # whether the layout drops tokens of a prompt behind a chunk
    # (row, position, id) of tokens sampled in earlier steps, for whoever did not sample them: where there are stages
    tokens: tuple[tuple[int, int, int], ...] = ()

    @property
    def taps(self) -> tuple[str, ...]:
        """The hidden rows that the forward has to keep, beside the last layer's."""
        return tuple(sorted({name for read in self.reads for name in read.hidden} - {"last"}))

    @cached_property
    def sampled(self) -> list[Chunk]:
        """The chunks out of which a token comes; asked for several times a step."""
        return [c for c in self.chunks if c.samples]


def retell(events: list[tuple[str, Reason]], request_id: str, reason: Reason) -> str:
    """Changes the last reason told of a request, which no plan has yet. Returns the new one."""
    at = max(i for i, (name, _) in enumerate(events) if name == request_id)
    events[at] = (request_id, reason)
    return str(reason)
