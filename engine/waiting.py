"""Who waits, and in which order: one queue a scheduling policy."""

from __future__ import annotations

from bisect import insort_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

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


class PriorityQueue:
    """Smallest (priority, arrival) first. A preempted request goes back to its own place."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # the head at the end, where it is cheap to remove

    def head(self) -> Request:
        return self.requests[-1]

    def push(self, r: Request) -> None:
        insort_left(self.requests, r, key=lambda x: (-x.priority, -x.arrival))

    def give_back(self, requests: Sequence[Request]) -> None:
        for r in requests:
            self.push(r)

    def remove(self, r: Request) -> None:
        if self.requests[-1] is r:
            self.requests.pop()
        else:
            self.requests.remove(r)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self.requests)


QUEUES = {"fcfs": FcfsQueue, "priority": PriorityQueue}
