"""Hidden rows of a text to one vector, on the host, in float64."""

from __future__ import annotations

import numpy as np

POOLINGS = ("last", "mean")


def first_row(pooling: str, num_tokens: int) -> int:
    """The first of the text's rows that a pooling looks at."""
    return num_tokens - 1 if pooling == "last" else 0


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """The rows [T, E] of a text that was computed in parts."""
    return np.concatenate(parts)


def pooled(rows_TE: np.ndarray, *, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """The mean [E] of rows, cut to its first dimensions (arXiv:2205.13147), then of length 1 if asked for.

    The mean of one row is that row: which rows are given makes the pooling.
    """
    vector_E = rows_TE.astype(np.float64).mean(0)[:dimensions]
    if not normalize:
        return vector_E
    return vector_E / max(float(np.linalg.norm(vector_E)), 1e-12)
