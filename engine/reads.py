"""What the host reads of a request's known tokens beside those that are sampled: logprobs, and hidden rows.

A request that samples nothing (`Request.samples` False) is computed only: it ends when its prompt is computed and read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan import Plan, Read

if TYPE_CHECKING:
    from .draft import Draft
    from .request import Request
    from .scheduler import Scheduler


@dataclass(frozen=True)
class Wanted:
    """What is read of the places start to stop - 1 of a request's prompt, each once, whatever happens to it.

    `targets`: ids, one a place, whose logprob behind it is wanted (empty: none are); `num_logprobs` of the most likely
    come with each, and those of `token_ids`, if there are any: a tuple of ids a place. `hidden`: which hidden rows come
    to the host, "last" (of the last layer, before the final norm), "norm" (behind it), "embed" or "layer.i".
    """

    start: int
    stop: int
    targets: tuple[int, ...] = ()
    num_logprobs: int = 0
    token_ids: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"places {self.start} to {self.stop} - 1 are none that can be read")
        for name, values in (("targets", self.targets), ("token_ids", self.token_ids)):
            if values and len(values) != self.stop - self.start:
                raise ValueError(f"{len(values)} {name} for {self.stop - self.start} places")
        if not self.targets and not self.hidden:
            raise ValueError("neither targets nor hidden rows: there is nothing to read")

    def part(self, chunk: int, start: int, stop: int) -> Read:
        """The read of places start to stop - 1, from the chunk of that index."""
        own = slice(start - self.start, stop - self.start)
        return Read(chunk, start, stop, self.targets[own], self.num_logprobs, self.token_ids[own], self.hidden)


def plan_reads(r: Request, start: int, draft: Draft) -> None:
    """Adds what is read of the newest chunk, which computes a request's tokens from start to r.computed - 1."""
    if r.wanted:
        low, high = max(start, r.first_unread), min(r.computed, r.wanted.stop)
        if low < high:
            draft.reads.append(r.wanted.part(len(draft.chunks) - 1, low, high))
            r.num_read = high
    if not r.samples and r.computed == len(r.prompt):
        r.complete = True
        draft.ended.append(r.id)


def is_of(r: Request | None, plan: Plan) -> bool:
    """Whether a plan's part is this request's, and not that of an ended one which had the same id."""
    return r is not None and plan.step >= r.first_step


def readers(scheduler: Scheduler, plan: Plan) -> list[Request | None]:
    """Whose each of a plan's reads is; None: of a request that has ended. To be asked before `update`."""
    found = (scheduler.alive.get(plan.chunks[read.chunk].request_id) for read in plan.reads)
    return [r if is_of(r, plan) else None for r in found]


def complete_of(scheduler: Scheduler, plan: Plan) -> list[Request]:
    """The requests that are computed only and whose last chunk was in this plan."""
    found = [scheduler.alive.get(name) for name in plan.ended]
    return [r for r in found if r is not None and is_of(r, plan)]


def wanted_from(value: Mapping[str, Any] | None) -> Wanted | None:
    """The Wanted of which `vars` were kept as JSON."""
    if value is None:
        return None
    tuples = {name: tuple(value[name]) for name in ("targets", "hidden")}
    return Wanted(**{**value, **tuples, "token_ids": tuple(map(tuple, value["token_ids"]))})
