"""What the engine asks of an array library. Two files implement it: backend_jax.py and backend_torch.py."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ..models.interface import Array, ArraySpec, AttentionSpec
from .begin_torch import begin
from .collector import Paused
from .recipe import Recipe

BACKENDS = ("torch", "jax")  # in the order in which "auto" takes what is installed
SPINS = "5000"  # of an OpenMP thread of torch's that waits, before it sleeps (docs/LOG.md)


class Backend(Protocol):
    """Places arrays, compiles programs, reads back. Programs consume the argument that `compile` names."""

    name: str
    ops: Any
    dtype: str  # of weights and caches whose spec names none
    eager: bool  # programs are not compiled: a shape costs nothing, so padding can be exact

    @property
    def graph_tokens(self) -> int | None:
        """Tokens of the largest step that is run from a graph, larger ones being run op by op; None: no graphs."""
        ...

    # of a decode step that is one program with its head: two calls of the host would cost more than both compute
    joined_seqs: int
    loads_late: bool  # what is compiled is loaded, and recorded, only when it is first run
    threads: int  # of the CPU, that products use: other numbers may give other last bits
    replicas: Any  # those that step together (JaxReplicas, TorchReplicas); None: there is one, or each steps alone

    def place(self, x: np.ndarray, spec: ArraySpec) -> Array:
        """x on the device(s), in the dtype and sharding that spec says."""
        ...

    def place_weight(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place, then ops.prepare: what einsum and embed accept."""
        ...

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        """The part of an array that this process places; () is all of it."""
        ...

    def place_shard(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight of that part, alone."""
        ...

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight of x's numbers, repeated to fill the spec's shape (np.resize)."""
        ...

    def zeros(self, spec: ArraySpec) -> Array:
        """An array of zeros made on the device."""
        ...

    def declare(self, name: str, specs: Any) -> None:
        """Says how the argument of that name is sharded in every program. What is not declared is replicated."""
        ...

    def compile(
        self, fn: Callable[..., Any], args: tuple[str, ...], outs: tuple[str, ...], consumes: str
    ) -> Callable[..., Any]:
        """fn, called with ops, as a program. The argument named by `consumes` is not to be touched after a call."""
        ...

    def rehearse(self, calls: Iterable[tuple[Any, tuple[Any, ...]]], recipe: Recipe | None = None) -> None:
        """Compiles kernels that these calls will launch, if they are compiled apart from programs. Changes nothing.

        Those of a recipe may be known from an earlier start.
        """
        ...

    def precompile(self, calls: Iterable[tuple[Any, tuple[Any, ...]]], recipe: Recipe | None = None) -> None:
        """Compiles these (program, its arguments) without running them. Nothing is consumed.

        With the recipe (None: there is none) other processes may make some of them, if programs can be made elsewhere.
        """
        ...

    def consume(self, tree: Any) -> Any:
        """The tree's arrays under new names, the old ones made unusable. For code that runs outside `compile`."""
        ...

    def own(self, tree: Any) -> Any:
        """The tree with the library's own arrays for numpy arrays. Likewise."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """What such code runs in: torch's inference mode."""
        ...

    def prefetch(self, x: Array) -> None:
        """Starts copying x to the host."""
        ...

    def is_ready(self, x: Array) -> bool:
        """Whether `read` would not wait for the device, of what is prefetched."""
        ...

    def read(self, x: Array) -> np.ndarray:
        """A copy of x on the host; waits for it."""
        ...

    def read_tree(self, tree: Any) -> Any:
        """read over the leaves of a tree."""
        ...

    @property
    def binds_addresses(self) -> bool:
        """Whether programs hold on to where arrays lie: recordings, which `free` drops, are then made anew."""
        ...

    def offload(self, tree: Any) -> Any:
        """Weights copied to the host, and freed here; what `restore` takes."""
        ...

    def restore(self, stored: Any) -> Any:
        """The weights back where they were, bit by bit. `stored` is theirs then."""
        ...

    def free(self, tree: Any) -> None:
        """Frees arrays, whoever holds them, and gives the device's memory back to others."""
        ...

    def free_memory(self) -> int | None:
        """Bytes free on the device; None where that is the host's memory."""
        ...

    def total_memory(self) -> int | None:
        """Bytes of the whole device, whoever has them; None where that is the host's memory."""
        ...

    def bytes_beside(self, spec: ArraySpec, shape: Sequence[int]) -> int:
        """Bytes that are kept on a GPU, for its product, beside a weight of which a device has this shape."""
        ...

    def any_width(self, specs: Iterable[AttentionSpec], cache: str | None = None, scaled: bool = False) -> bool:
        """Whether attention of these specs costs the same with a wider block table.

        Asked of a cache of this dtype, None being the backend's own, with scales or not.
        """
        ...

    def shares_prefixes(self, specs: Iterable[AttentionSpec], cache: str | None = None, scaled: bool = False) -> bool:
        """Whether attention of these specs reads prefixes once that sequences share."""
        ...

    def num_compiles(self) -> int:
        """Programs compiled so far in this process."""
        ...


def installed_backends() -> list[str]:
    """The backends whose library can be imported, without importing it."""
    return [name for name in BACKENDS if importlib.util.find_spec(name)]


def resolve_backend(name: str) -> str:
    """The name of an installed backend; "auto" takes torch if it is installed, else jax."""
    found = installed_backends()
    if name == "auto":
        if not found:
            raise ValueError("no backend is installed: pip install 'octavo[torch]' or 'octavo[jax]'")
        return found[0]
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose one of auto, {', '.join(BACKENDS)}")
    if name not in found:
        raise ValueError(f"backend {name!r} is not installed: pip install 'octavo[{name}]'")
    return name


def find_platform(backend: str, device: str, first_gpu: bool = False) -> str:
    """Where a backend will run when asked for `device`: "cpu" or "cuda". Starts its library.

    `first_gpu`: of several GPUs the engine will use the first.
    """
    if backend == "torch" and device != "cpu" and "torch" not in sys.modules:
        begin(first_gpu)
    return _module(backend).find_platform(device)


def device_memory(backend: str, platform: str) -> int | None:
    """Bytes of the GPU that a backend will run on; None on a CPU."""
    return _module(backend).device_memory() if platform != "cpu" else None


def get_backend(name: str = "auto", options: Mapping[str, Any] | None = None) -> Backend:
    """The backend of that name, as resolve_backend reads it."""
    name = resolve_backend(name)
    kind = {"jax": "JaxBackend", "torch": "TorchBackend"}[name]
    return getattr(_module(name), kind)(**(options or {}))


def _module(name: str) -> Any:
    """The module of a backend, with its library imported."""
    if name == "torch":
        # libgomp reads it as it is loaded. By its own 300,000, threads that wait keep cores from those that have work
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        # so does torch before its first large array: weights and caches then lie in pages of 2 MB
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # importing makes much that stays: a collector would look at all of it again and again
    with Paused():
        return importlib.import_module(f".backend_{name}", __package__)
