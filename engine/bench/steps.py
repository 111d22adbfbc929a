"""A step as models derive it, made by hand: for measuring an op alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.interface import ArraySpec, Step
from ..backend import Backend


def make_step(
    backend: Backend, tables: np.ndarray, computed: Sequence[int], counts: Sequence[int], block_size: int
) -> Step:
    """Of sequences with so many tokens in the cache, and so many more in this step; tables [S, B] are their blocks'."""
    starts, seq = np.concatenate([[0], np.cumsum(counts)]), np.repeat(np.arange(len(counts)), counts)
    positions = np.array(computed)[seq] + np.arange(len(seq)) - starts[seq]

    def place(x: np.ndarray) -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim, "int32"))

    return Step(
        token_ids_T=place(0 * seq), positions_T=place(positions), seq_ids_T=place(seq), is_real_T=place(seq >= 0),
        blocks_T=place(tables[seq, positions // block_size]), offsets_T=place(positions % block_size),
        lengths_S=place(np.add(computed, counts)), query_starts_S1=place(starts), block_tables_SB=place(tables),
        decode=max(counts) == 1, ropes={}, extra={},
    )  # fmt: skip
