"""Products by cublasLt with the algorithm that was measured to be the best, where torch would take another.

torch takes the first that the library's heuristic names. Of what the library knows, some are faster by up to a tenth:
cublas_table.py says which, by device, version and shape (benchmarks/products_lt.py finds them). Whatever is not
there is torch's.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from .cublas_table import TABLE

Tensor = torch.Tensor

BF16, FP32, COMPUTE_FP32 = 14, 0, 68
TRANSPOSE_A = 3  # attribute of a description
# attributes of an algorithm, and their bytes
ATTRIBUTES = {
    "tile": (1, 4),
    "splits": (2, 4),
    "reduction": (3, 4),
    "custom": (5, 4),
    "stages": (6, 4),
    "cluster": (8, 2),
}
ALIGNMENT = 16  # bytes, that the library takes for granted


class Config(NamedTuple):
    """An algorithm of the library, in its numbers: they mean the same in the same version."""

    algorithm: int
    tile: int
    splits: int
    reduction: int
    custom: int
    stages: int
    cluster: int


class Found(Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)
    ]  # fmt: skip


@cache
def library() -> CDLL:
    """The one that torch has loaded."""
    lib = CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
    lib.cublasLtGetVersion.restype = c_size_t
    return lib


def call(name: str, *args: Any, about: str = "") -> None:
    """Calls the library. Raises RuntimeError, `about` what, unless it returns CUBLAS_STATUS_SUCCESS, which is 0."""
    status = getattr(library(), "cublasLt" + name)(*args)
    if status:
        raise RuntimeError(f"cublasLt{name}{about} returned status {status} (cublasStatus_t), not 0")


@cache
def handle(device: torch.device) -> c_void_p:
    made = c_void_p()
    with torch.cuda.device(device):
        call("Create", byref(made))
    return made


class Plan:
    """x [rows, depth], rows x_r numbers apart, times a weight, as the library is told; `first`: it is [depth, width].

    The library's matrices are columns first: it is given w', x' and out'.
    """

    def __init__(self, rows: int, depth: int, width: int, x_r: int, first: bool, device: torch.device):
        self.handle, self.desc, self.parts = handle(device), c_void_p(), [c_void_p() for _ in range(3)]
        self.about = f" of {rows} rows and a weight {[depth, width] if first else [width, depth]} on {device}"
        call("MatmulDescCreate", byref(self.desc), COMPUTE_FP32, FP32)
        if not first:
            call("MatmulDescSetAttribute", self.desc, TRANSPOSE_A, byref(c_int(1)), c_size_t(4))
        w = (width, depth, width) if first else (depth, width, depth)
        for part, (a, b, apart) in zip(self.parts, (w, (depth, rows, x_r), (width, rows, width)), strict=True):
            call("MatrixLayoutCreate", byref(part), BF16, c_uint64(a), c_uint64(b), c_int64(apart))

    def found(self, config: Config) -> Found | None:
        """That algorithm, if it is one for this product."""
        lib, found, algo, (w, x, out) = library(), Found(), (c_uint64 * 8)(), self.parts
        kinds = (COMPUTE_FP32, FP32, BF16, BF16, BF16, BF16)
        wrong = lib.cublasLtMatmulAlgoInit(self.handle, *kinds, config.algorithm, byref(algo))
        for name, (attribute, size) in ATTRIBUTES.items():
            value = c_uint32(getattr(config, name))
            wrong |= lib.cublasLtMatmulAlgoConfigSetAttribute(byref(algo), attribute, byref(value), c_size_t(size))
        wrong |= lib.cublasLtMatmulAlgoCheck(self.handle, self.desc, w, x, out, out, byref(algo), byref(found))
        if wrong or found.state:
            return None
        found.algo[:] = algo[:]
        return found

    def launch(self, found: Found, x: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
        """out (+)= x w."""
        space = torch.empty(found.workspace, dtype=torch.uint8, device=x.device) if found.workspace else x
        one, beta, (a, b, c), to = c_float(1), c_float(float(add)), self.parts, c_void_p(out.data_ptr())
        call(
            "Matmul", self.handle, self.desc, byref(one), c_void_p(w.data_ptr()), a, c_void_p(x.data_ptr()), b,
            byref(beta), to, c, to, c, byref(found.algo), c_void_p(space.data_ptr()), c_size_t(found.workspace),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream), about=self.about,
        )  # fmt: skip


@cache
def device_table(device: torch.device) -> dict:
    if device.type != "cuda" or torch.version.cuda is None:
        return {}
    name = torch.cuda.get_device_name(device)
    versions = {version: rules for (place, version), rules in TABLE.items() if place == name}
    if not versions:
        return {}
    try:
        return versions.get(library().cublasLtGetVersion(), {})
    except OSError:
        # a build of torch that carries the library within itself
        return {}


@cache
def plan_of(
    rows: int, depth: int, width: int, x_r: int, first: bool, add: bool, device: torch.device
) -> tuple[Plan, Found] | None:
    """What is launched for such a product; None: torch's is as good."""
    rules = {} if x_r * 2 % ALIGNMENT else device_table(device).get((depth, width, first, add), {})
    fits = [most for most in rules if rows <= most]
    config = rules[min(fits)] if fits else None
    if config is None:
        return None
    plan = Plan(rows, depth, width, x_r, first, device)
    found = plan.found(Config(*config))
    return None if found is None else (plan, found)


def product(x: Tensor, w: Tensor, shared: int, first: bool, add: Tensor | None) -> Tensor | None:
    """x's last `shared` axes contracted with w's first or last; added to `add` in its memory, if there is one.

    None: it is not for this library.
    """
    others = (w,) if add is None else (w, add)
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1:
        return None
    if any(a.dtype != torch.bfloat16 or not a.is_contiguous() for a in others):
        return None
    free = w.ndim - shared
    tail, depth = (w.shape[shared:], w.shape[:shared]) if first else (w.shape[:free], w.shape[free:])
    plain = x.reshape(-1, depth.numel())
    known = plan_of(*plain.shape, tail.numel(), plain.stride(0), first, add is not None, x.device)
    if known is None or any(a.data_ptr() % ALIGNMENT for a in (plain, *others)):
        return None
    plan, found = known
    out = x.new_empty((*x.shape[: x.ndim - shared], *tail)) if add is None else add
    plan.launch(found, plain, w, out, add is not None)
    return out
