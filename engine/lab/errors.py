"""How far two arrays are apart: absolute, relative to the row, and in units of the last place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

TINY = 1e-30
ULP_BINS = 32  # 0, 1, 2-3, 4-7 ... : bin i holds distances of i bits
COLUMNS = (0, 1, 4, 7, 11)  # bins with which the columns of a printed histogram begin


@dataclass
class Error:
    """Of one op over all that was compared. `max_rel` is relative to the greatest number of the token's row."""

    name: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    ulps: Counter[int] = field(default_factory=Counter)  # bits of the distance -> numbers

    def add(self, found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Takes in two arrays [T, ...]; returns the relative error of each token [T]. NaN counts as infinite."""
        found, wanted = (x.reshape(len(x), -1).astype(np.float64) for x in (found, wanted))
        apart = np.nan_to_num(np.abs(found - wanted), nan=np.inf)
        rel_T = apart.max(1, initial=0) / np.maximum(np.abs(wanted).max(1, initial=0), TINY)
        self.max_abs = max(self.max_abs, float(apart.max(initial=0)))
        self.max_rel = max(self.max_rel, float(rel_T.max(initial=0)))
        self.ulps.update(ulp_bits(found, wanted))
        return rel_T

    def histogram(self) -> dict[str, str]:
        """The parts, in %, of numbers that are 0, 1 to 7, 8 to 63 ... units of the last place apart."""
        total, ends = max(1, self.ulps.total()), (*COLUMNS, ULP_BINS + 1)
        parts = {}
        for first, behind in pairwise(ends):
            count = sum(self.ulps[bits] for bits in range(first, behind))
            low, high = (1 << first) // 2, (1 << behind - 1) - 1
            name = str(low) if low == high else f"{low}-" + (str(high) if behind <= ULP_BINS else "")
            parts[name] = "" if not count else "<1" if 100 * count < total else f"{100 * count // total}"
        return parts

    def to_json(self) -> dict[str, Any]:
        total = max(1, self.ulps.total())
        parts = {_bin(bits): count / total for bits, count in sorted(self.ulps.items())}
        return {"name": self.name, "max_abs": self.max_abs, "max_rel": self.max_rel, "ulps": parts}


def ulp_bits(found: np.ndarray, wanted: np.ndarray) -> dict[int, int]:
    """How many numbers are how many bits apart, counted in float32's units of the last place."""
    a, b = (_ordered(x.astype(np.float32)) for x in (found, wanted))
    bits = np.minimum(np.ceil(np.log2(np.abs(a - b) + 1)).astype(int), ULP_BINS)
    values, counts = np.unique(bits, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def kl_divergence(found_RV: np.ndarray, wanted_RV: np.ndarray) -> np.ndarray:
    """KL(wanted || found) of each row's distribution, in nats; both are logits."""
    p, q = (log_softmax(x.astype(np.float64)) for x in (wanted_RV, found_RV))
    return (np.exp(p) * (p - q)).sum(-1)


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 as integers of the same order, neighbours being 1 apart."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _bin(bits: int) -> str:
    low, high = (1 << bits) // 2, (1 << bits) - 1
    return str(low) if low == high else f"{low}-{high}"
