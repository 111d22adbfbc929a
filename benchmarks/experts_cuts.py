"""Cuts of the experts' two products that experts_h200.py --sweep tries, by tokens.

Each entry: rows of a block, then cuts of the first and of the second product: columns, depth, warps, stages, and what
else there is (expert_kernels.py, Sizes): way, once, halves, ahead. A few rows an expert are bound by memory: wide
columns, what is read once leaves the cache first. Many are bound by products: tiles of 256 columns in all.
"""

from __future__ import annotations

A, J, D = "apart", "joint", "described"

FEW = [
    (
        16,
        [
            (32, 128, 4, 4), (32, 128, 4, 4, A, True), (32, 128, 4, 4, J, True), (32, 128, 2, 4, A, True),
            (32, 64, 4, 8, A, True), (32, 256, 4, 3, A, True), (64, 64, 4, 8, A, True), (64, 64, 4, 8, J, True),
            (64, 128, 4, 5, A, True), (64, 128, 8, 5, J, True), (64, 64, 4, 6, A, True), (16, 256, 4, 4, A, True),
            (128, 32, 4, 8, J, True), (32, 128, 4, 4, D), (64, 64, 4, 8, D), (64, 128, 4, 5, D),
        ],
        [
            (64, 128, 4, 4), (64, 128, 4, 4, A, True), (64, 128, 4, 4, A, True, False, 128),
            (64, 128, 4, 4, A, True, False, 512), (64, 128, 4, 4, A, False, False, 512),
            (64, 128, 4, 4, A, False, False, 1024), (32, 128, 4, 5, A, True, False, 512), (32, 128, 4, 5, A, True),
            (128, 64, 4, 6, A, True), (128, 64, 4, 6, A, False, False, 512), (64, 64, 4, 8, A, True),
            (64, 256, 4, 3, A, True), (64, 128, 4, 4, D), (128, 64, 4, 6, D),
        ],
    ),
]  # fmt: skip
BY_MEMORY = (
    [
        (64, 64, 4, 4), (64, 64, 4, 4, A, True), (64, 64, 4, 4, J, True), (64, 64, 4, 5, A, True),
        (64, 128, 4, 3, A, True), (64, 64, 4, 4, A, True, False, 64), (64, 32, 4, 6, A, True), (64, 64, 2, 4, A, True),
        (128, 64, 4, 3), (128, 64, 4, 3, A, True), (128, 64, 4, 3, J, True), (128, 64, 4, 4, A, True),
        (128, 64, 8, 3, J, True), (128, 64, 4, 3, A, True, False, 64), (128, 64, 4, 3, A, True, False, 128),
        (128, 32, 4, 4, A, True), (128, 32, 4, 4, J, True), (128, 32, 4, 6, A, True),
        (128, 32, 4, 4, A, True, False, 64), (256, 32, 8, 4, A, True), (256, 32, 8, 4, J, True),
        (256, 32, 4, 4, A, True), (256, 32, 8, 5, A, True), (256, 32, 8, 4, A, True, False, 64),
        (256, 16, 8, 6, A, True), (256, 64, 8, 3, A, True), (64, 64, 4, 4, D), (64, 64, 4, 5, D), (128, 64, 4, 3, D),
        (128, 64, 4, 4, D), (128, 32, 4, 5, D), (256, 32, 8, 4, D),
    ],
    [
        (128, 64, 4, 4), (128, 64, 4, 4, A, True), (128, 64, 4, 4, A, True, False, 64),
        (128, 64, 4, 4, A, True, False, 256), (128, 64, 4, 3, A, True), (128, 64, 4, 5, A, True),
        (256, 64, 4, 3, A, True), (256, 32, 8, 4, A, True), (256, 64, 8, 4, A, True),
        (256, 64, 4, 3, A, True, False, 64), (256, 64, 4, 3, A, True, False, 256), (64, 64, 4, 5, A, True),
        (128, 128, 4, 3, A, True), (128, 64, 4, 4, D), (256, 64, 8, 3, D),
    ],
)  # fmt: skip
THIRTY_TWO = (
    [
        (64, 64, 4, 4), (64, 64, 4, 4, A, True), (128, 64, 4, 3), (128, 64, 4, 3, A, True), (128, 64, 4, 3, J, True),
        (128, 64, 4, 3, A, False, True), (128, 64, 8, 3, J), (128, 32, 4, 4, A, False), (256, 32, 8, 4, A),
        (128, 64, 4, 3, D),
    ],
    [
        (128, 64, 4, 4), (128, 64, 4, 4, A, True), (128, 64, 4, 4, A, False, True), (256, 64, 4, 3), (256, 64, 8, 3),
        (128, 64, 4, 4, D),
    ],
)  # fmt: skip
SIXTY_FOUR = (
    [
        (64, 64, 4, 4), (64, 64, 4, 4, J), (64, 64, 4, 4, J, True), (64, 64, 4, 3, J), (64, 128, 4, 3, J),
        (128, 64, 8, 3, J), (128, 64, 4, 3, J), (128, 32, 4, 4, J), (128, 32, 4, 6, J), (128, 64, 8, 3, A),
        (128, 64, 8, 4, J), (256, 32, 8, 4, J), (64, 64, 4, 4, A, False, False, 64), (64, 64, 4, 4, D),
        (128, 64, 8, 3, D), (128, 64, 4, 3, D),
    ],
    [
        (128, 64, 4, 4), (128, 64, 4, 4, A, True), (128, 64, 4, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 4, 3),
        (256, 32, 4, 5), (128, 64, 4, 4, A, False, False, 64), (128, 128, 4, 3), (128, 64, 4, 4, D),
        (256, 64, 8, 3, D),
    ],
)  # fmt: skip
FULL = (
    [
        (128, 64, 8, 3), (128, 64, 8, 3, J), (128, 64, 8, 3, J, False, True), (128, 64, 8, 3, A, False, True),
        (128, 64, 8, 4, J), (128, 64, 8, 4, J, False, True), (128, 32, 8, 5, J), (128, 32, 8, 6, J, False, True),
        (128, 128, 8, 2, J), (64, 64, 4, 3, J), (64, 64, 4, 3, J, False, True), (64, 64, 4, 3, A), (64, 64, 4, 4, J),
        (64, 64, 8, 3, J), (64, 128, 8, 3, J), (128, 64, 8, 3, D), (128, 64, 8, 4, D, False, True), (64, 64, 4, 3, D),
    ],
    [
        (256, 64, 8, 3), (256, 64, 8, 3, A, False, True), (256, 64, 8, 4), (256, 64, 8, 4, A, False, True),
        (256, 32, 8, 6), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 3, A, False, True), (128, 64, 4, 4),
        (128, 128, 8, 3), (128, 128, 8, 2), (256, 64, 8, 3, D), (256, 64, 8, 4, D), (128, 64, 4, 3, D),
        (256, 64, 8, 3, D, False, True),
    ],
)  # fmt: skip
CUTS = {
    1: FEW,
    8: [(16, FEW[0][1] + BY_MEMORY[0], FEW[0][2] + BY_MEMORY[1])],
    64: [(16, *BY_MEMORY)],
    256: [(16, *BY_MEMORY), (32, *THIRTY_TWO)],
    830: [(64, *SIXTY_FOUR), (128, *FULL), (32, *THIRTY_TWO)],
    8192: [(128, *FULL), (64, *SIXTY_FOUR)],
}
