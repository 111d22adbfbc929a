"""Which replica of an engine a request goes to. All n samples of a prompt go to one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .request import Request
from .scheduler import Scheduler

# tokens of a prompt that cost about as much as one more request that decodes: measured by benchmarks/routing.py
TOKENS_A_REQUEST = 256


class Routing(Protocol):
    """Chooses a replica for each request, in the order in which they come."""

    def choose(self, family: Sequence[Request]) -> int:
        """The index of the replica for the samples of one prompt, which are about to be added there."""
        ...

    def forget(self, replica: int) -> None:
        """The prefix cache of a replica is empty now."""
        ...


@dataclass(frozen=True)
class Load:
    """How a replica stands, as one of the clients sees it that send requests to it."""

    in_flight: int  # requests that this client has sent and that have not ended
    waiting: int
    running: int
    kv_usage: float  # part of the cache's blocks in use, 0 to 1

    def score(self, num_clients: int = 1) -> float:
        """The less, the better: vLLM's measure (semantics 2.7). Waiting weighs more where the cache is full."""
        crowded = max(self.in_flight * num_clients, self.waiting + self.running)
        return crowded + self.waiting * 6 * max(0.0, self.kv_usage - 0.5)


def least_loaded(loads: Sequence[Load], start: int = 0, num_clients: int = 1) -> int:
    """The index of the least score; of equals, the first at or behind `start`, going round."""
    order = [(start + i) % len(loads) for i in range(len(loads))]
    return min(order, key=lambda i: loads[i].score(num_clients))


class LeastLoaded:
    """vLLM's rule. An engine is the only client of its replicas, so the scan starts at the first."""

    def __init__(self, schedulers: Sequence[Scheduler]):
        self.schedulers = schedulers

    def choose(self, family: Sequence[Request]) -> int:
        if len(self.schedulers) == 1:
            return 0
        return least_loaded(
            [Load(len(s.alive), len(s.waiting), s.num_running, s.blocks.usage()) for s in self.schedulers]
        )

    def forget(self, replica: int) -> None:
        pass


class PrefixAware:
    """The replica with the least to compute: what it owes to others, and of this prompt what its cache does not have.

    So a prefix draws requests to where it is cached, until those who are there already cost more than computing it once
    more elsewhere. What a replica's cache will have is known from its pool, and from the prompts that were sent to it.
    """

    def __init__(self, schedulers: Sequence[Scheduler]):
        self.schedulers = schedulers
        self.sent = [Sent(max(s.blocks.num_blocks)) for s in schedulers]
        self.owed = [Owed() for _ in schedulers]

    def choose(self, family: Sequence[Request]) -> int:
        first = family[0]
        length, places = len(first.prompt), range(len(self.schedulers))
        left = [length - self._cached(first, i) for i in places]
        best = min(places, key=lambda i: left[i] + self.owed[i].total() + TOKENS_A_REQUEST * self._alive(i))
        self.sent[best].add(first.hashes)
        self.owed[best].add(first, left[best])
        return best

    def forget(self, replica: int) -> None:
        self.sent[replica].blocks.clear()

    def _alive(self, i: int) -> int:
        return len(self.schedulers[i].alive)

    def _cached(self, r: Request, i: int) -> int:
        """Tokens of a prompt that need not be computed on a replica, as far as one can know before."""
        blocks = self.schedulers[i].blocks
        found = blocks.lookup(r).length
        coming = self.sent[i].num_first(r.hashes[: r.most_hit // blocks.block_size])
        return max(found, coming * blocks.block_size)


class Sent:
    """Hashes of the blocks of prompts sent to a replica: the last ones, as many as it has room for."""

    def __init__(self, room: int):
        self.room = room
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_first(self, hashes: Iterable[bytes]) -> int:
        """How many of the first of these there are."""
        count = 0
        for h in hashes:
            if h not in self.blocks:
                break
            count += 1
        return count

    def add(self, hashes: Iterable[bytes]) -> None:
        # the head of a prompt is of use to more: it is the last to go, as in the pool
        for h in reversed(list(hashes)):
            self.blocks[h] = None
            self.blocks.move_to_end(h)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)


class Owed:
    """Tokens of prompts that a replica has not computed yet, in the order in which they came."""

    def __init__(self) -> None:
        self.left: deque[tuple[Request, int]] = deque()
        self.tokens = 0

    def add(self, r: Request, tokens: int) -> None:
        self.left.append((r, tokens))
        self.tokens += tokens

    def total(self) -> int:
        """Their sum. One that ends before those in front of it have started counts until they have."""
        while self.left and _is_computed(self.left[0][0]):
            self.tokens -= self.left.popleft()[1]
        return self.tokens


def _is_computed(r: Request) -> bool:
    return r.finish_reason is not None or r.computed >= len(r.prompt) or r.num_tokens > len(r.prompt)


ROUTINGS = {"least_loaded": LeastLoaded, "prefix": PrefixAware}
