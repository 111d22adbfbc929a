"""The n samples of one prompt: the first computes it, the others fork from whoever has."""

from __future__ import annotations

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


def fork(r: Request, running: Iterable[Request], draft: Draft, blocks: BlockManager) -> Hit | None:
    """What a running sibling has computed of the prompt, in earlier steps: transfers come before this one."""
    for x in running:
        ready = (x is r.first or x.first is r.first) and draft.computed_before(x) >= len(r.prompt)
        if ready and (hit := blocks.fork(r, x)):
            return hit
    return None
