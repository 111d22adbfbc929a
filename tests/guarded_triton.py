"""Triton's interpreter with each argument in an address space of its own: what leaves an argument raises.

The interpreter itself reads and writes wherever a pointer leads, and beside one small array there is mostly another. A
GPU then reports an illegal access, some launches later, or nothing at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

WINDOW = 44  # bits of an address within the space of one argument
HOME = 1 << 40  # where in it the argument begins: there is room before it too


class Spaces:
    """The arguments of the kernel that runs: where they seem to lie, and where they do."""

    def __init__(self) -> None:
        self.kernel, self.names, self.seen = "", {}, set[str]()
        self.arguments: list[tuple[str, torch.Tensor]] = []

    def enter(self, kernel: str, names: dict[int, str]) -> None:
        self.kernel, self.names, self.arguments = kernel, names, []
        self.seen.add(kernel)

    def add(self, x: torch.Tensor) -> int:
        """The address where x seems to lie, as well aligned as its own."""
        self.arguments.append((self.names.get(id(x), f"argument {len(self.arguments)}"), x))
        return (len(self.arguments) << WINDOW) + HOME + x.data_ptr() % 256

    def real(self, at: np.ndarray, mask: np.ndarray, size: int, what: str) -> np.ndarray:
        """The real addresses of accesses of `size` bytes. Raises IndexError for one outside that is not masked."""
        at, mask = np.asarray(at, np.uint64), np.broadcast_to(np.asarray(mask, bool), np.shape(at))
        space, out = (at >> np.uint64(WINDOW)).astype(np.int64), np.zeros_like(at)
        for n in np.unique(space[mask]):
            if not 1 <= n <= len(self.arguments):
                raise IndexError(f"{self.kernel} {what} {at[mask & (space == n)][0]:#x}, which is near no argument")
            name, x = self.arguments[n - 1]
            here, start = mask & (space == n), (int(n) << WINDOW) + HOME + x.data_ptr() % 256
            offset, extent = at[here].astype(np.int64) - start, extent_of(x)
            beyond = (offset < 0) | (offset + size > extent)
            if beyond.any():
                raise IndexError(
                    f"{self.kernel} {what} byte {offset[beyond][0]} of {name}, {tuple(x.shape)} {x.dtype} of {extent}"
                )
            out[here] = (offset + x.data_ptr()).astype(np.uint64)
        return out


def extent_of(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if not x.numel():
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


class Memory:
    """triton._C.libtriton.interpreter, every access checked first."""

    def __init__(self, spaces: Spaces, plain: Any):
        self.spaces, self.plain = spaces, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self.plain.load(self.spaces.real(at, mask, np.dtype(dtype).itemsize, "reads"), mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        return self.plain.store(self.spaces.real(at, mask, value.dtype.itemsize, "writes"), value, mask)

    def atomic_rmw(self, op: Any, at: Any, value: Any, mask: Any, order: Any) -> Any:
        return self.plain.atomic_rmw(
            op, self.spaces.real(at, mask, value.dtype.itemsize, "adds to"), value, mask, order
        )

    def atomic_cas(self, at: Any, old: Any, new: Any, order: Any) -> Any:
        return self.plain.atomic_cas(self.spaces.real(at, np.True_, new.dtype.itemsize, "swaps"), old, new, order)


def hostile(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.empty, full of nan, or of numbers that are no index: of both signs, and all different."""
    out = torch.zeros(*args, **kwargs)
    if out.is_floating_point():
        return out.fill_(float("nan"))
    if out.dtype == torch.bool:
        return out.fill_(True)
    # a first and an end that are equal bound nothing, and would hide what is read between them
    limits = torch.iinfo(out.dtype)
    generator = torch.Generator(out.device).manual_seed(out.numel())
    return out.random_(limits.min // 2, limits.max // 2, generator=generator)


@contextmanager
def guarded() -> Iterator[Spaces]:
    """Kernels run so inside, and what torch.empty returns is hostile. Yields what says which kernels ran."""
    spaces, start, convert = Spaces(), interpreter.GridExecutor._init_args_hst, interpreter._implicit_cvt

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        host = start(self, args, kwargs)
        named = inspect.getcallargs(self.fn, *host[0], **host[1])
        spaces.enter(self.fn.__name__, {id(x): name for name, x in named.items()})
        return host

    def convert_to(x: Any) -> Any:
        return convert(Placed(x, spaces.add(x)) if isinstance(x, torch.Tensor) else x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", init)
        patch.setattr(interpreter, "_implicit_cvt", convert_to)
        patch.setattr(interpreter, "_interpreter", Memory(spaces, interpreter._interpreter))
        patch.setattr(torch, "empty", hostile)
        yield spaces


class Placed:
    """A tensor that seems to lie at another address."""

    def __init__(self, x: torch.Tensor, at: int):
        self.dtype, self.at = x.dtype, at

    def data_ptr(self) -> int:
        return self.at
