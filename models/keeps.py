"""What a cache layout keeps of a sequence: how the host counts its slots, and where chunks must end. Plain ints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Keeps:
    """Either by place or by budget; without any of it, everything.

    By place, a query sees the first `sinks` tokens and the last `window`, itself included; a token's slot is its
    position, and the host frees the blocks between. What lies in a block follows from the tokens up to it alone.

    By budget, the device chooses. A prompt is read in sections of `section` tokens (None: in one), and a cut follows
    each: one that the prompt goes on behind leaves `budget - section` tokens, so that never more than `budget` are
    held; the one at the prompt's end leaves `budget`. What is left lies in the first slots. Behind the prompt
    a token takes the slot of another once `budget` are held (`rolling`), or a slot of its own. What is kept depends on
    what came after, so such blocks are nobody else's: no prefix is hit, and no sibling forks.

    Without `forks` a request goes on from full blocks alone: what it has of another lies in its row.

    A chunk never goes beyond a cut, so tokens do not depend on how steps are cut.
    """

    window: int | None = None  # tokens
    sinks: int = 0
    budget: int | None = None  # tokens
    section: int | None = None
    rolling: bool = True
    forks: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1 token, or None")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ValueError(f"sinks {self.sinks} must be at least 0, and need a window")
        if self.budget is None:
            if self.section is not None:
                raise ValueError(f"section {self.section} must divide the budget of tokens, and there is none")
            return
        if self.budget < 1 or self.window is not None:
            raise ValueError(f"budget {self.budget} must be at least 1 token, and goes with no window")
        if self.section is not None and (not 0 < self.section < self.budget or self.budget % self.section):
            raise ValueError(f"section {self.section} must divide the budget of {self.budget} tokens, and be less")

    def slots(self, computed: int, prompt: int) -> int:
        """Slots that hold something once so many tokens of a sequence are computed, before a cut that follows."""
        if self.budget is None:
            return computed
        read = held = min(computed, prompt)
        if self.section is not None and read:
            start = (read - 1) // self.section * self.section
            held = min(start, self.budget - self.section) + read - start
        if computed <= prompt:
            return held
        held = min(held, self.budget) + computed - prompt
        return min(held, self.budget) if self.rolling else held

    def left(self, computed: int, prompt: int) -> int:
        """The same after the cut, if one follows there."""
        held = self.slots(computed, prompt)
        if self.budget is None or computed > prompt:
            return held
        if computed == prompt:
            return min(held, self.budget)
        ends = self.section is not None and computed % self.section == 0
        return min(held, self.budget - self.section) if ends and self.section else held

    def most(self, tokens: int, prompt: int) -> int:
        """The most slots that hold something at any time until so many tokens are computed."""
        read = min(tokens, prompt)
        return max(read if self.section is None else min(read, self.budget or read), self.slots(tokens, prompt))

    def chunk(self, computed: int, prompt: int) -> int | None:
        """How many tokens the next chunk may have; None: any number."""
        if self.budget is None:
            return None
        if computed < prompt:
            left = prompt - computed
            return left if self.section is None else min(left, self.section - computed % self.section)
        return 1 if self.rolling else None


ALL = Keeps()


def keeps_of(layout: Any) -> Keeps:
    """What a layout keeps in layers without a window of their own."""
    return getattr(layout, "keeps", ALL)


def by_window(keeps: Keeps, windows: Iterable[int | None]) -> list[Keeps]:
    """What cache groups of these windows keep under such a layout: a window of their own goes before what it keeps."""
    return [keeps if window is None else Keeps(window=window) for window in windows]
