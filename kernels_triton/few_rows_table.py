"""Tiles of few_rows.py as measured (benchmarks/few_rows.py), by device.

A device's entry: the most rows that a rule is for, then (depth, width, gate) or "any", then a Tiling; None: cuBLAS.
"""

from __future__ import annotations

TABLE: dict = {"any": {}}
