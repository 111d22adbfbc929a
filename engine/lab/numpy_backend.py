"""The oracle as a backend: float64 numpy on the host, a program being the function itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ...models.interface import ArraySpec, AttentionSpec, map_tree
from ..recipe import Recipe
from .numpy_ops import NumpyOps


class NumpyBackend:
    """Holds floats as float64, but those whose spec says that they are narrow, and integers, as they are."""

    name, dtype, eager, threads, graph_tokens, joined_seqs = "numpy", "float64", True, 1, None, 0
    replicas = None

    def __init__(self) -> None:
        self.ops = NumpyOps()

    def place(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return np.array(x, self._dtype(spec))

    place_weight = place_shard = place

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        """All of it."""
        return ()

    def zeros(self, spec: ArraySpec) -> np.ndarray:
        return np.zeros(spec.shape, self._dtype(spec))

    def declare(self, name: str, specs: Any) -> None:
        """Nothing: there is one device."""

    def compile(
        self, fn: Callable[..., Any], args: tuple[str, ...], outs: tuple[str, ...], consumes: str
    ) -> Callable[..., Any]:
        """fn itself. What it consumes is not touched: scatter copies."""
        return partial(fn, ops=self.ops)

    def rehearse(self, calls: Iterable[tuple[Any, tuple]], recipe: Recipe | None = None) -> None:
        """Nothing: there are no kernels."""

    def precompile(self, calls: Iterable[tuple[Any, tuple[Any, ...]]], recipe: Recipe | None = None) -> None:
        """Nothing: nothing is compiled."""

    def consume(self, tree: Any) -> Any:
        return tree

    def own(self, tree: Any) -> Any:
        return tree

    def scope(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    binds_addresses = loads_late = False

    def offload(self, tree: Any) -> Any:
        """The tree: it is on the host."""
        return tree

    def restore(self, stored: Any) -> Any:
        return stored

    def free(self, tree: Any) -> None:
        """Nothing: what nobody holds is free."""

    def prefetch(self, x: np.ndarray) -> None:
        """Nothing: it is on the host."""

    def is_ready(self, x: np.ndarray) -> bool:
        """Whether there is something to wait for: never."""
        return True

    def read(self, x: np.ndarray) -> np.ndarray:
        return np.array(x)

    def read_tree(self, tree: Any) -> Any:
        return map_tree(self.read, tree)

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return np.resize(x, spec.shape).astype(self._dtype(spec))

    def free_memory(self) -> int | None:
        return None

    def total_memory(self) -> int | None:
        return None

    def bytes_beside(self, spec: ArraySpec, shape: Sequence[int]) -> int:
        return 0

    def shares_prefixes(self, specs: Iterable[AttentionSpec], cache: str | None = None, scaled: bool = False) -> bool:
        """No: it reads every sequence's own."""
        return False

    def any_width(self, specs: Iterable[AttentionSpec], cache: str | None = None, scaled: bool = False) -> bool:
        return True

    def num_compiles(self) -> int:
        return 0

    def _dtype(self, spec: ArraySpec) -> np.dtype:
        if spec.dtype in (None, "float32"):
            return np.dtype("float64")
        return np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
