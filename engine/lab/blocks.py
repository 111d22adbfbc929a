"""Which block of a sequence holds other keys or values than it should."""

from __future__ import annotations

import numpy as np

from ..plan import Chunk
from .subjects import CachedSubject

# relative to the greatest number of the block; content that was computed twice is far nearer, where nothing rounds it
APART, APART_ROUNDED = 1e-3, 3e-1


def wrong_entry(found: CachedSubject, wanted: CachedSubject, layer: int, chunk: Chunk) -> str | None:
    """The first entry of a chunk's block table that is not the other's; both have had the same plans."""
    here, there = (s.table(layer, chunk.row) for s in (found, wanted))
    for j, (a, b) in enumerate(zip(here, there)):
        if a != b:
            return f"block {j} of the sequence: the block table has {a}, and should have {b}"
    return None


def wrong_content(found: CachedSubject, wanted: CachedSubject, layer: int, chunk: Chunk, block_size: int) -> str | None:
    """The first block of a chunk's sequence that holds other keys or values than the other's.

    Of the last block only what is written counts, so it is compared if full.
    """
    table = found.table(layer, chunk.row)[: (chunk.start + chunk.num_tokens) // block_size]
    # the null block stands for what a window has forgotten
    places = [j for j, block in enumerate(table) if block]
    blocks = [table[j] for j in places]
    mine, theirs = (s.content(layer, blocks) for s in (found, wanted))
    for i, (j, block) in enumerate(zip(places, blocks, strict=True)):
        for name in theirs:
            error = _apart(mine[name][i], theirs[name][i])
            if error > (APART_ROUNDED if found.rounds else APART):
                return f"block {j} of the sequence (physical {block}) holds other {name!r}: relative error {error:.1e}"
    return None


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.nan_to_num(np.abs(a - b), nan=np.inf).max() / max(np.abs(b).max(), 1e-30))
