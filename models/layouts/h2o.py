"""H2O (arXiv:2306.14048): tokens that have got the most attention so far stay, and the latest."""

from __future__ import annotations

from dataclasses import dataclass

from ..interface import Array, Step
from ..keeps import Keeps
from .evicting import Evicting


@dataclass(frozen=True)
class H2O(Evicting):
    """At most `budget` tokens a sequence and kv head, the last `recent` of them (0: half) whatever their weight.

    A token's weight is the attention that all queries so far paid it, summed over the heads of its group. Behind the
    prompt each new token takes the place of the lightest. A prompt is read `sections` to a budget and cut after each,
    so that its length costs nothing; None reads it whole first, as the paper does.
    """

    recent: int = 0
    sections: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "recent", self.recent or max(1, self.budget // 2))
        keeps = self.keeps
        most = self.budget - max(1, keeps.section or 0)
        if not 0 < self.recent <= most:
            raise ValueError(
                f"recent {self.recent} of budget {self.budget}: with {self.sections} sections at most {most}"
            )

    @property
    def keeps(self) -> Keeps:
        if self.sections is None:
            return Keeps(budget=self.budget)
        if self.sections < 2 or self.budget % self.sections:
            raise ValueError(f"sections {self.sections}: a divisor of the budget {self.budget}, at least 2, is right")
        return Keeps(budget=self.budget, section=self.budget // self.sections)

    def counts(self, step: Step) -> Array:
        """All queries."""
        return step.is_real_T
