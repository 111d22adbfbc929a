"""Scheduling policies: who waits before whom, who is preempted, and which cached block is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .block_pool import BlockPool
from .request import Request
from .user_code import load_object
from .waiting import FcfsQueue, RankedQueue, WaitingQueue, rank


@dataclass(frozen=True)
class Policy:
    """What the scheduler asks. `evict` names the free block of a pool that is used next; None: the one freed first."""

    name: str
    queue: Callable[[], WaitingQueue]
    victim: Callable[[dict[Request, None]], Request]  # of the running ones, in order of admission
    evict: Callable[[BlockPool], int] | None = None

    @property
    def ranks(self) -> bool:
        """Whether it looks at requests at all, and so at their priority."""
        return self.queue is not FcfsQueue


def _last_admitted(running: dict[Request, None]) -> Request:
    return next(reversed(running))


def ranked(name: str, rank: Callable[[Request], Any], evict: Callable[[BlockPool], int] | None = None) -> Policy:
    """The smallest rank starts first, the greatest is preempted; of equal ones, who came first, and who came last."""

    def victim(running: dict[Request, None]) -> Request:
        return max(reversed(running), key=rank)

    return Policy(name, partial(RankedQueue, rank, name), victim, evict)


POLICIES = {"fcfs": Policy("fcfs", FcfsQueue, _last_admitted), "priority": ranked("priority", rank)}


def as_policy(value: Any) -> Policy:
    """A policy by name, or a user's: an object with rank(request), evict(pool), or both; FILE.py:NAME loads one.

    Without `rank` it is first come, first served. A rank must not change while a request waits. `evict` is asked for
    one of pool.free (block ids, the one freed first in front); pool.key_of has those whose content is cached. Raises
    ValueError for anything else.
    """
    if isinstance(value, str) and ":" in value:
        value = load_object(value)
    if isinstance(value, str):
        if value not in POLICIES:
            raise ValueError(f"policy {value!r} is none of {', '.join(POLICIES)}, nor FILE.py:NAME")
        return POLICIES[value]
    rank, evict = getattr(value, "rank", None), getattr(value, "evict", None)
    if rank is None and evict is None:
        raise ValueError(f"policy {value!r} has neither rank(request) nor evict(pool)")
    if isinstance(value, type):
        raise ValueError(f"policy {value!r} is a class: an object of it is right")
    for method, found in (("rank", rank), ("evict", evict)):
        if found is not None and not callable(found):
            raise ValueError(f"policy {value!r}: {method} {found!r} is no method")
    name = type(value).__name__
    return ranked(name, rank, evict) if rank else Policy(name, FcfsQueue, _last_admitted, evict)


def checked_policy(name: str, value: Any) -> Any:
    """The value, if as_policy takes it. Raises ValueError, naming the argument."""
    try:
        as_policy(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return value
