"""Who waits, and in which order: one queue a scheduling policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .request import Request


def rank(r: Request) -> tuple[int, int]:
    """Order under the priority policy: the smallest goes first, the greatest is preempted."""
    return r.priority, r.arrival


class WaitingQueue(Protocol):
    """Requests without a row, iterated from the head."""

    def head(self) -> Request: ...
    def push(self, r: Request) -> None: ...
    def give_back(self, requests: Sequence[Request]) -> None:
        """Puts preempted or set-aside requests, which are in order, before all that wait."""
        ...

    def remove(self, r: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self.requests: OrderedDict[Request, None] = OrderedDict()

    def head(self) -> Request:
        return next(iter(self.requests))

    def push(self, r: Request) -> None:
        self.requests[r] = None

    def give_back(self, requests: Sequence[Request]) -> None:
        for r in reversed(requests):
            self.requests[r] = None
            self.requests.move_to_end(r, last=False)

    def remove(self, r: Request) -> None:
        del self.requests[r]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class RankedQueue:
    """Smallest rank first. A preempted request goes back to its own place. A rank must not change while it waits."""

    def __init__(self, rank: Callable[[Request], Any] = rank, policy: str = "priority") -> None:
        self.rank, self.policy = rank, policy
        # the first there was: all others, also of requests that run now, must have an order with it
        self.first: list[Any] = []
        # ranks and requests apart, so that only ranks are compared; equal ones keep their order
        self.ranks: list[Any] = []
        self.requests: list[Request] = []

    def head(self) -> Request:
        return self.requests[0]

    def push(self, r: Request) -> None:
        """Raises ValueError for a request whose rank has no order with the others."""
        mine = self.rank(r)
        try:
            bisect_right(self.first or [mine], mine)
            at = bisect_right(self.ranks, mine)
        except TypeError as error:
            beside = f" beside {self.first[0]!r}" if self.first else ""
            raise ValueError(
                f"policy {self.policy!r}: request {r.id!r} has rank {mine!r}, which has no order{beside}: numbers, or "
                "tuples of them, are right"
            ) from error
        self.first = self.first or [mine]
        self.ranks.insert(at, mine)
        self.requests.insert(at, r)

    def give_back(self, requests: Sequence[Request]) -> None:
        for r in reversed(requests):
            at = bisect_left(self.ranks, mine := self.rank(r))
            self.ranks.insert(at, mine)
            self.requests.insert(at, r)

    def remove(self, r: Request) -> None:
        at = self.requests.index(r)
        del self.requests[at], self.ranks[at]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)
