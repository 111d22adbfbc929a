"""What runs on a GPU under JAX."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def events(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of all that runs on the GPU meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        # the lines of a GPU that are no streams tell the same kernels again, by module and operation
        lines = [x for p in planes if p.name.startswith("/device:GPU") for x in p.lines if x.name.startswith("Stream")]
        return [(e.name, e.duration_ns / 1000) for line in lines for e in line.events]


def peak_memory() -> int | None:
    """Bytes that this process had at most of the GPU; None where JAX does not count them."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None
