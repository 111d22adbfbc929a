"""Cuts of the experts' two products that experts_h200.py --sweep tries, by tokens.

Each entry: rows of a block, then cuts of the first and of the second product: columns (of the first, so many of gate
and of up), depth, warps and stages. What an earlier sweep left far behind is no longer here (docs/LOG.md).
"""

from __future__ import annotations

FEW = (
    [(64, 128, 8, 5), (64, 128, 4, 5), (64, 64, 4, 6), (64, 64, 4, 8), (32, 128, 4, 4), (128, 64, 4, 3)],
    [(64, 128, 4, 4), (64, 64, 4, 8), (64, 128, 4, 5), (128, 64, 4, 4)],
)
BY_MEMORY = (
    [(128, 64, 4, 3), (128, 64, 8, 3), (128, 32, 4, 4), (64, 64, 4, 4), (256, 32, 8, 4)],
    [(128, 64, 4, 4), (128, 64, 4, 3), (256, 64, 4, 3), (256, 64, 8, 4), (256, 32, 8, 4)],
)
SIXTY_FOUR = (
    [(64, 64, 4, 3), (64, 64, 4, 4), (128, 32, 4, 4), (128, 64, 8, 4), (256, 32, 8, 4)],
    [(128, 64, 4, 4), (128, 64, 4, 3), (256, 32, 4, 5)],
)
FULL = (
    [(128, 32, 8, 5), (128, 32, 8, 6), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 8, 3), (64, 64, 4, 3)],
    [(128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 32, 8, 6), (128, 64, 4, 3)],
)
CUTS = {
    1: [(16, *FEW)],
    8: [(16, *FEW), (16, *BY_MEMORY)],
    64: [(16, *BY_MEMORY)],
    128: [(16, *BY_MEMORY), (32, *BY_MEMORY)],
    256: [(16, *BY_MEMORY), (32, *BY_MEMORY)],
    830: [(64, *SIXTY_FOUR)],
    1536: [(64, *SIXTY_FOUR), (128, *FULL)],
    8192: [(128, *FULL)],
}
