"""SnapKV (arXiv:2404.14469): at its end a prompt is cut to what its last queries look at, and what is near to that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..interface import Array, Step
from ..keeps import Keeps
from .evicting import Evicting


@dataclass(frozen=True)
class SnapKV(Evicting):
    """Of a prompt `budget` tokens a kv head stay, among them the last `recent`, whose queries choose; of an output all.

    A token's rank is the attention that those queries paid it, summed over the heads of its group, and pooled: the sum
    over the `pool` tokens around it.
    """

    pool: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.recent < self.budget:
            raise ValueError(f"recent {self.recent} must be at least 1, and less than the budget of {self.budget}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool {self.pool} must be odd")

    @property
    def keeps(self) -> Keeps:
        return Keeps(budget=self.budget, rolling=False)

    def counts(self, step: Step) -> Array:
        """The prompt's last queries."""
        behind_T = step.prompt_lens_S[step.seq_ids_T] - step.positions_T
        return (behind_T > 0) & (behind_T <= self.recent)

    def rank(self, ops: Any, weight_SKM: Array) -> Array:
        """Before the cut slots are positions, so neighbours are neighbours."""
        around, size = self.pool // 2, weight_SKM.shape[-1]
        none = ops.xp.zeros_like(weight_SKM[..., :around])
        padded = ops.xp.concat([none, weight_SKM, none], axis=-1)
        return sum(padded[..., i : i + size] for i in range(self.pool))
