"""Prefill attention on a Hopper GPU: whom it serves, and how it is launched. The kernel: hopper_kernels.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .sizes import next_power_of_2

Tensor = torch.Tensor

ROWS, KEYS, STAGES = 128, 128, 2  # of a tile of queries, of a tile of keys, and how many of those are held at a time
DIMS = (64, 128)
ATOM = 64  # numbers of a row that are copied at a time


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def queries(group: int) -> int:
    """Of a tile, each with its group's heads."""
    return ROWS // next_power_of_2(group)


def serves(q_TKGD: Tensor, k: Tensor, v: Tensor, block_size: int, spec: Any, scaled: bool) -> bool:
    """Whether the kernel knows such arrays; all others are attention_kernels.prefill's."""
    return (
        is_hopper(q_TKGD.device)
        and q_TKGD.dtype in (torch.bfloat16, torch.float16)
        and k.dtype == v.dtype == q_TKGD.dtype
        and not scaled
        and spec.window is None
        and spec.softcap is None
        and spec.k_dim == spec.v_dim
        and spec.k_dim in DIMS
        and 8 <= block_size <= KEYS
        and KEYS % block_size == 0
        and q_TKGD.shape[2] <= ROWS // 2
        and all(map(copied_at_once, (q_TKGD, k, v)))
    )


def copied_at_once(x: Tensor) -> bool:
    """Whether the hardware copies boxes of an array: all that it skips are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(n * x.itemsize % 16 == 0 for n in x.stride()[:-1])


def launch(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, order: str, step: Any, tiles: Any, sinks: Tensor | None,
    factor: float, programs: int,
) -> None:  # fmt: skip
    """The rows of several tokens; `tiles` are of queries(group), which `programs` share."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import hopper_kernels

    heads, group, dim = q.shape[1:]
    wide, block_size = next_power_of_2(group), k.shape[order.split().index("p")]
    layout = NVMMASharedLayout(128, 16, 4)

    def boxes(x: Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)

    block = [{"n": 1, "p": block_size, "k": 1, "d": ATOM}[a] for a in order.split()]
    hopper_kernels.prefill[(programs,)](
        boxes(q, [queries(group) // 2, 1, wide, dim]), boxes(k, block), boxes(v, block),
        step.block_tables_SB, step.lengths_S, step.query_starts_S1, *tiles, q if sinks is None else sinks, out,
        factor, step.block_tables_SB.stride(0),
        K=heads, G=group, GP=wide, P=block_size, N=KEYS, D=dim, STAGES=STAGES, SINKS=sinks is not None,
        HEAD_MAJOR=order == "n k p d", num_warps=4,
    )  # fmt: skip
