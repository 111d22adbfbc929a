"""A mesh of processes for torch, one device each: who shares what with whom, and the collectives between them.

Not torch's DeviceMesh: that stands on the one default process group of a process, and here an engine is a value among
others, several of which may live in one process (decision 025).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
TIMEOUT = 120.0  # seconds that a collective waits for a rank that is alive and does not come


class TorchMesh:
    """This process's place in a mesh whose axes are named and sized by `shape`; rank = row-major position.

    `store` is where the processes meet. `counts` says how often which collective ran, with how many bytes: keys are
    (collective, mesh axes, bytes of its result).
    """

    def __init__(
        self,
        shape: Mapping[str, int],
        rank: int,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        device: torch.device | str = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        if not 0 <= rank < math.prod(shape.values()):
            raise ValueError(f"rank {rank} is none of a mesh of {dict(shape)}")
        self.shape, self.rank, self.store, self.device = dict(shape), rank, store, torch.device(device)
        self.timeout, self.counts = timeout, Counter[tuple[str, tuple[str, ...], int]]()
        self.groups: dict[tuple[str, ...], Any] = {}
        self.place: dict[str, int] = {}
        for name, size in reversed(self.shape.items()):
            rank, self.place[name] = divmod(rank, size)

    def size(self, names: tuple[str, ...]) -> int:
        """How many processes these axes have together."""
        return math.prod(self.shape[name] for name in names)

    def index(self, names: tuple[str, ...]) -> int:
        """This process's place along these axes, the first of them the slowest."""
        at = 0
        for name in names:
            at = at * self.shape[name] + self.place[name]
        return at

    def all_reduce(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """The sum of x over these axes. Consumes x."""
        x = x.contiguous()
        if self.size(names) > 1:
            self._note("all-reduce", names, x)
            self._group(names).allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, names: tuple[str, ...], dim: int) -> Tensor:
        """The x of all processes along these axes, side by side along a dimension."""
        if self.size(names) == 1:
            return x
        x = x.contiguous()
        stacked = x.new_empty((self.size(names) * x.shape[0], *x.shape[1:]))
        self._group(names)._allgather_base(stacked, x).wait()
        whole = torch.cat(stacked.split(x.shape[0]), dim)
        self._note("all-gather", names, whole)
        return whole

    def reduce_scatter(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """This process's rows of the sum of x over these axes. x has as many rows for each process."""
        if self.size(names) == 1:
            return x
        own = x.new_empty((x.shape[0] // self.size(names), *x.shape[1:]))
        self._group(names)._reduce_scatter_base(own, x.contiguous()).wait()
        self._note("reduce-scatter", names, own)
        return own

    def abort(self) -> None:
        """Ends what is under way, so that nobody waits for a process that is gone. The mesh is of no use afterwards."""
        for group in self.groups.values():
            group.abort()

    def _note(self, what: str, names: tuple[str, ...], result: Tensor) -> None:
        self.counts[what, names, result.numel() * result.element_size()] += 1

    def _group(self, names: tuple[str, ...]) -> Any:
        """The processes that differ from this one along these axes alone. All of them must ask for it."""
        if names not in self.groups:
            others = "/".join(f"{name}{at}" for name, at in self.place.items() if name not in names)
            name = f"mesh/{'.'.join(names)}/{others}"
            store = dist.PrefixStore(name, self.store)  # pyright: ignore[reportPrivateImportUsage]
            place, timeout = (self.index(names), self.size(names)), timedelta(seconds=self.timeout)
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.groups[names] = dist.ProcessGroupNCCL(store, *place, options)
            else:
                self.groups[names] = dist.ProcessGroupGloo(store, *place, timeout)
        return self.groups[names]
