"""Products of a few rows in Triton: bound by reading the weight, which cuBLAS does slower at one row.

Reference: the plain product. Sums are in fp32, in one order whatever the number of rows: the depth is not split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

ROWS = 4  # more are left to cuBLAS
TILE = 16  # rows of a tile: the least that the matrix units take
USUAL = (32, 128, 5)  # columns and depth of a tile, and its stages
# the same by depth and columns of the weight, where an H200 was faster so than with cuBLAS
TUNED: dict[tuple[int, int], tuple[int, int, int]] = {
}


@triton.jit
def gemv_kernel(
    x, w, out, num_rows, E: tl.constexpr, F: tl.constexpr, X_R: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out[rows, F] = x[rows, E] @ w[E, F]. A program makes N columns of all rows."""
    f, m, b = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, B)
    own_M, acc_MN = m < num_rows, tl.zeros([M, N], tl.float32)
    for j in range(0, E, B):
        e = j + b
        x_MB = tl.load(x + m[:, None] * X_R + e[None, :], mask=own_M[:, None] & (e < E)[None, :], other=0.0)
        w_BN = tl.load(
            w + e.to(tl.int64)[:, None] * F + f[None, :], mask=(e < E)[:, None] & (f < F)[None, :], other=0.0
        )
        acc_MN = tl.dot(x_MB, w_BN, acc_MN)
    at_MN = m.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(out + at_MN, acc_MN.to(out.dtype.element_ty), mask=own_M[:, None] & (f < F)[None, :])


def serves(x: Tensor, w: Tensor) -> bool:
    """Whether x [M, E] has few enough rows, the matrix units take its dtype, and this was seen to be the faster one."""
    few = x.is_cuda and len(x) <= ROWS and x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return few and tuple(w.shape) in TUNED


def gemv(x: Tensor, w: Tensor) -> Tensor:
    """x [M, E] @ w [E, F], w contiguous."""
    (depth, size), x = w.shape, x.contiguous()
    out, (width, tile, stages) = torch.empty((len(x), size), dtype=x.dtype, device=x.device), TUNED.get(w.shape, USUAL)
    gemv_kernel[(triton.cdiv(size, width),)](
        x, w, out, len(x), E=depth, F=size, X_R=depth, M=TILE, B=tile, N=width, num_warps=4, num_stages=stages
    )
    return out
