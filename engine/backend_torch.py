"""Runs the programs in torch, eagerly. The consumed argument is written in place and voided, or copied in pure mode."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..kernels_triton.ops import TorchOps
from ..kernels_triton.products import Packed
from ..models.interface import ArraySpec

Tensor = torch.Tensor
# tuples: a union would be made anew at each of the hundreds of calls a step
ARRAYS, SEQUENCES = (Tensor, np.ndarray, Packed), (list, tuple)
DTYPES = ("float32", "bfloat16", "float16")


class Void(Tensor):
    """What is left of a consumed array: touching it raises, as with a donated one in JAX."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("this array was consumed by a later step")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("this array was consumed by a later step")


def consume(x: Tensor) -> Tensor:
    """The same memory as a new value; the old one is void."""
    new = x.detach()
    x.__class__ = Void
    return new


def map_arrays(f: Callable[[Any], Any], tree: Any) -> Any:
    """f over the arrays in dicts, tuples, lists and dataclasses."""
    if isinstance(tree, ARRAYS):
        return f(tree)
    if isinstance(tree, dict):
        return {k: map_arrays(f, v) for k, v in tree.items()}
    if isinstance(tree, SEQUENCES):
        return type(tree)(map_arrays(f, v) for v in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{k: map_arrays(f, v) for k, v in vars(tree).items()})
    return tree


def from_numpy(x: np.ndarray) -> Tensor:
    """x as a tensor over the same memory."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    return len(cores)


def find_platform(device: str) -> str:
    """Where torch runs when asked for `device`: "cpu" or "cuda". "auto" takes a GPU if there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU here; use device='cpu', or a CUDA build of torch")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


class StaticInputs:
    """One set of buffers a shape: an input of a shape seen before lands where that one lay (CUDA graphs need it)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[tuple, list[Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        """The tree with its arrays copied into the buffers of its shape."""
        found: list[Any] = []
        map_arrays(found.append, tree)
        arrays = [from_numpy(x) if isinstance(x, np.ndarray) else x for x in found]
        key = tuple((x.shape, x.dtype) for x in arrays)
        if (buffers := self.buffers.get(key)) is None:
            buffers = self.buffers[key] = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in arrays]
        for buffer, x in zip(buffers, arrays, strict=True):
            buffer.copy_(x)
        each = iter(buffers)
        return map_arrays(lambda _: next(each), tree)


class TorchBackend:
    """torch on one device. `dtype` is that of weights and cache whose spec leaves it open."""

    name = "torch"
    eager = True

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        pure: bool = False,
        attention: str = "auto",
        threads: int | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads {threads} is not positive")
        self.device, self.dtype, self.pure = torch.device(device), dtype, pure
        self.ops = TorchOps(pure, attention)
        self.threads = threads or physical_cores()
        torch.set_num_threads(self.threads)
        # fp32 means fp32: no TF32, no bf16 passes
        torch.set_float32_matmul_precision("highest")

    def place(self, x: np.ndarray, spec: ArraySpec) -> Tensor:
        """A copy of x on the device, in the spec's dtype."""
        # copied by numpy: x may be a read-only file map, which torch does not take
        return from_numpy(np.array(x, order="C")).to(self.device, self._dtype(spec))

    def place_weight(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """A weight on the device, packed for its product."""
        return self.ops.prepare(self.place(x, spec), spec)

    def zeros(self, spec: ArraySpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=self._dtype(spec), device=self.device)

    def declare(self, name: str, specs: Any) -> None:
        """Nothing: one device holds all of every argument."""

    def compile(
        self, fn: Callable[..., Any], args: tuple[str, ...], outs: tuple[str, ...], consumes: str
    ) -> Callable[..., Any]:
        """fn run eagerly: inputs land in static buffers, the consumed argument is voided (copied in pure mode)."""
        at, weights = args.index(consumes), args.index("weights") if "weights" in args else -1
        static = {i: StaticInputs(self.device) for i in range(len(args)) if i not in (at, weights)}

        @torch.inference_mode()
        def run(*xs: Any) -> Any:
            ready = [static[i](x) if i in static else x for i, x in enumerate(xs)]
            ready[at] = self.consume(ready[at])
            return fn(*ready, ops=self.ops)

        return run

    def precompile(self, calls: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
        """Nothing: eager programs are not compiled."""

    def consume(self, tree: Any) -> Any:
        """The tree's arrays as new values: the same memory, the old ones void; in pure mode copies."""
        return map_arrays(Tensor.clone if self.pure else consume, tree)

    def own(self, tree: Any) -> Any:
        """The tree with tensors on the device for numpy arrays."""
        return map_arrays(lambda x: from_numpy(x.copy()).to(self.device) if isinstance(x, np.ndarray) else x, tree)

    def scope(self) -> AbstractContextManager[Any]:
        """What code outside `compile` runs in."""
        return torch.inference_mode()

    def prefetch(self, x: Tensor) -> None:
        """Nothing: on a CPU an eager step is done when it returns, and on a GPU `read` waits and copies."""

    def read(self, x: Tensor | Packed) -> np.ndarray:
        """A copy on the host; of a packed weight, as it was before."""
        host = (x.dense() if isinstance(x, Packed) else x).detach().cpu()
        if host.dtype == torch.bfloat16:
            return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return host.numpy().copy()

    def read_tree(self, tree: Any) -> Any:
        """The tree with host copies for arrays."""
        return map_arrays(self.read, tree)

    def num_compiles(self) -> int:
        return 0

    def free_memory(self) -> int | None:
        """Bytes free on the GPU; None on a CPU."""
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else None

    def _dtype(self, spec: ArraySpec) -> torch.dtype:
        return getattr(torch, spec.dtype or self.dtype)
