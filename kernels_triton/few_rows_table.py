"""Tiles of few_rows.py as measured (benchmarks/few_rows.py), by device.

A device's entry: the most rows that a rule is for, then (depth, width, gate), then a Tiling. None, or nothing: cuBLAS.
"""

from __future__ import annotations

TABLE: dict = {
    "NVIDIA H200": {
        4: {
            (4096, 6144, False): None,
            (4096, 4096, False): None,
            (4096, 28672, True): None,
            (14336, 4096, False): None,
            (1024, 4096, False): None,
            (2048, 1024, False): (16, 64, 128, 8, 4, 4, 256),
            (1024, 6144, True): None,
            (3072, 1024, False): (16, 64, 128, 8, 4, 4, 256),
        },
        16: {
            (4096, 6144, False): None,
            (4096, 4096, False): None,
            (4096, 28672, True): None,
            (14336, 4096, False): None,  # cublas_table.py has faster
            (1024, 4096, False): None,
            (2048, 1024, False): (16, 64, 128, 8, 4, 4, 256),
            (1024, 6144, True): None,
            (3072, 1024, False): (16, 64, 128, 8, 4, 4, 256),
        },
    },
}
