"""The n samples of one prompt: the first computes it, the others fork from whoever has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .block_manager import BlockManager, Hit
from .draft import Draft
from .request import Request


def may_fork(r: Request) -> bool:
    """Whether it has nothing but the prompt that it shares with siblings."""
    alone = r.first is None or r.wanted is not None or r.params.skip_reading_prefix_cache
    return not alone and len(r.tokens) == len(r.prompt)


def first_will_compute(r: Request, draft: Draft) -> bool:
    """Whether the first of the family is still at the prompt."""
    first = r.first
    assert first is not None
    at_prompt = first.finish_reason is None and len(first.tokens) == len(first.prompt)
    return at_prompt and draft.computed_before(first) < len(first.prompt)


def fork(r: Request, sources: Iterable[Request], draft: Draft, blocks: BlockManager) -> Hit | None:
    """What a sibling that still has its blocks has computed of the prompt, in earlier steps.

    Transfers come before this one.
    """
    for x in sources:
        ready = (x is r.first or x.first is r.first) and draft.computed_before(x) >= len(r.prompt)
        if ready and (hit := blocks.fork(r, x)):
            return hit
    return None


class Estates:
    """The blocks of requests that have ended, held until the next plan for siblings that have never run.

    Without them, siblings of one that ends with its first token would have nobody to fork from.
    """

    def __init__(self, forks: bool = True) -> None:
        """Without `forks` nobody is an heir: each computes its prompt."""
        self.forks = forks
        self.heirs: Counter[Request] = Counter()  # siblings that have never run, by the first of the family
        self.kept: list[Request] = []

    def expect(self, r: Request) -> None:
        """Counts a request that is queued, if it has never run."""
        if self.forks and r.first is not None and r.num_cached is None:
            self.heirs[r.first] += 1

    def keeps(self, r: Request) -> bool:
        """Whether a request that ends shall leave its blocks here; then it does."""
        wanted = self.heirs[r.first or r] > 0 and r.computed >= len(r.prompt)
        if wanted:
            self.kept.append(r)
        return wanted

    def fork(self, r: Request, running: Iterable[Request], draft: Draft, blocks: BlockManager) -> Hit | None:
        """What a request may fork from a sibling that runs, or has left its blocks here."""
        return fork(r, (*running, *self.kept), draft, blocks) if self.may_fork(r) else None

    def may_fork(self, r: Request) -> bool:
        """Whether it may take its prompt over from a sibling."""
        return self.forks and may_fork(r)

    def served(self, r: Request, blocks: BlockManager) -> None:
        """Takes note that a request is about to run for the first time, or has ended without."""
        if not self.forks or r.first is None or r.num_cached is not None:
            return
        self.heirs[r.first] -= 1
        if not self.heirs[r.first]:
            del self.heirs[r.first]
            self.settle(blocks, r.first)

    def settle(self, blocks: BlockManager, first: Request | None = None) -> bool:
        """Gives back the blocks of one family, or of all; whether there were any."""
        left = [x for x in self.kept if first is None or first in (x, x.first)]
        self.kept = [x for x in self.kept if x not in left]
        for x in left:
            blocks.release(x)
        return bool(left)
