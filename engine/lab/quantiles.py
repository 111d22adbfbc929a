"""Quantiles of a stream of times in constant memory."""

from __future__ import annotations

import math
from collections import Counter

RESOLUTION = 0.01  # a quantile is right to one part in a hundred
GROWTH = math.log1p(RESOLUTION)
LEAST = 1e-9  # seconds; what is shorter counts as this


class Quantiles:
    """Counts values in buckets whose bounds grow by 1 %. Holds a few thousand numbers at most, however many it sees."""

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        self.count, self.total, self.greatest = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Takes in one value, at least 0."""
        self.buckets[math.floor(math.log(max(value, LEAST)) / GROWTH)] += 1
        self.count += 1
        self.total += value
        self.greatest = max(self.greatest, value)

    def quantile(self, q: float) -> float:
        """The value that a part q (0 to 1) of all values does not exceed, to within RESOLUTION; 0 if there are none."""
        left = q * self.count
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(math.exp((bucket + 0.5) * GROWTH), self.greatest)
        return self.greatest

    def summary(self) -> dict[str, float]:
        mean = self.total / self.count if self.count else 0.0
        return {"mean": mean, "p50": self.quantile(0.5), "p95": self.quantile(0.95), "p99": self.quantile(0.99)}
