"""Replicas that step together in torch: each rank runs its own replica's part, and experts are where they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ...sharding.mesh_torch import TorchMesh

AXES = ("dp",)


class TorchReplicas:
    """All of a mesh, of which this process is in one. Names as in JaxReplicas."""

    def __init__(self, mesh: TorchMesh, read: Callable[[Any], np.ndarray]):
        self.mesh, self.num, self.at = mesh, mesh.size(AXES), mesh.index(AXES)
        self.read_all = read

    def specs(self, tree: Any) -> Any:
        """Specs of what each has of its own: a process sees its own alone."""
        return tree

    def stack(self, trees: Sequence[Any]) -> Any:
        """Of each replica's tree this one's."""
        return trees[self.at]

    def same(self, tree: Any) -> Any:
        return tree

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """What programs returned in all replicas, side by side along a new axis."""
        with torch.inference_mode():
            return self.mesh.all_gather(x[None], AXES, 0)

    def read(self, x: torch.Tensor, at: int) -> np.ndarray:
        """A replica's part of what was gathered, on the host."""
        return self.read_all(x)[at]
