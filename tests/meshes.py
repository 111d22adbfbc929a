"""Several ranks of a torch mesh as threads of one process: gloo does not mind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from octavo.sharding.mesh_torch import TorchMesh


def on_every_rank(f: Callable[[TorchMesh], Any], shape: Mapping[str, int]) -> list[Any]:
    """f(mesh) of all ranks at once, in the order of ranks."""
    size = math.prod(shape.values())
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def run(rank: int) -> Any:
        with torch.inference_mode():
            return f(TorchMesh(shape, rank, store, timeout=30))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
