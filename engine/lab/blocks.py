"""Which block of a sequence holds other keys or values than it should."""

from __future__ import annotations

import numpy as np

from ..plan import Chunk
from ..runner import Runner

APART = 1e-3  # relative to the greatest number of the block; content that was computed twice is far nearer


def wrong_entry(found: Runner, wanted: Runner, layer: int, chunk: Chunk) -> str | None:
    """The first entry of a chunk's block table that is not the other runner's; both have had the same plans."""
    g = next(g for g, group in enumerate(found.model.groups) if layer in group.layers)
    here, there = (r.tables[g][chunk.row] for r in (found, wanted))
    for j, (a, b) in enumerate(zip(here, there, strict=True)):
        if a != b:
            return f"block {j} of the sequence: the block table has {a}, and should have {b}"
    return None


def wrong_content(found: Runner, wanted: Runner, layer: int, chunk: Chunk) -> str | None:
    """The first block of a chunk's sequence that holds other keys or values than the other runner's.

    Of the last block only what is written counts, so it is compared if full.
    """
    g, i = next((g, x.layers.index(layer)) for g, x in enumerate(found.model.groups) if layer in x.layers)
    mine, theirs = (r.backend.read_tree(r.cache.groups[g][i]) for r in (found, wanted))
    for j, block in enumerate(found.tables[g][chunk.row][: (chunk.start + chunk.num_tokens) // found.block_size]):
        # the null block stands for what a window has forgotten
        for name in theirs if block else ():
            error = _apart(mine[name][block], theirs[name][block])
            if error > APART:
                return f"block {j} of the sequence (physical {block}) holds other {name!r}: relative error {error:.1e}"
    return None


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.nan_to_num(np.abs(a - b), nan=np.inf).max() / max(np.abs(b).max(), 1e-30))
