"""What several benchmarks need: where they run, and a step as models derive it."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from octavo.engine.backend import Backend
from octavo.models.interface import ArraySpec, Step


def software(*packages: str) -> dict[str, Any]:
    """The day, and the versions of Python and of these packages."""
    versions = {name: version(name) for name in packages}
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "versions": versions}


def gpu(*fields: str) -> str:
    """What nvidia-smi says of the GPU: these fields, with commas between them."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


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
