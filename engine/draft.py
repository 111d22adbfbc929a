"""A plan in the making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..models.sampling import VARIANTS
from .plan import Admission, Chunk, Plan, Read, Reason, TableWrite, Transfer
from .request import Request


@dataclass(slots=True)
class Draft:
    """A plan in the making. `planned` may still be undone, `committed` not."""

    budget: int
    planned: dict[Request, int] = field(default_factory=dict)
    committed: dict[Request, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    writes: dict[Request, list[TableWrite]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    reasons: list[tuple[str, Reason]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    preempted: bool = False
    variant: int = 0
    num_logprobs: int = -1
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)  # whose logprobs are wanted, by request id
    cuts: bool = False
    tokens: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_taken(self) -> int:
        """Requests that it has so far."""
        return len(self.planned) + len(self.committed)

    def computed_before(self, r: Request) -> int:
        """Tokens of a request that earlier steps have computed."""
        return r.computed - self.committed.get(r, 0)

    def plan(self, step: int, events: Iterable[tuple[str, Reason]]) -> Plan:
        """The value it has become, with what happened since the last one."""
        return Plan(
            step,
            tuple(self.chunks),
            tuple(self.admitted),
            tuple(write for of_one in self.writes.values() for write in of_one),
            tuple(self.transfers),
            VARIANTS[self.variant],
            self.num_logprobs,
            (*events, *self.reasons),
            tuple(self.reads),
            tuple(self.token_ids.get(c.request_id, ()) for c in self.chunks if c.samples) if self.token_ids else (),
            tuple(self.ended),
            self.cuts,
            tuple(self.tokens),
        )


def admission(r: Request) -> Admission:
    """What the device must know of a request that has just been given a row."""
    assert r.row is not None
    stops = tuple(sorted({*r.eos_ids, *r.params.stop_token_ids})) if r.params.min_tokens else ()
    return Admission(
        r.row,
        tuple(r.tokens),
        r.computed,
        len(r.prompt),
        r.key,
        r.params.row(),
        # no request gets beyond its limit, and the device counts in int32
        min(r.params.min_tokens, r.limit) if stops else 0,
        stops,
        r.edits,
    )
