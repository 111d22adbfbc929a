"""Attention by the Triton kernels: what is launched, with which tiles. Never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton

from . import attention_kernels as kernels

Tensor = torch.Tensor

MAX_SPLITS = 64
RESIDENT = 2  # decode programs that a multiprocessor holds at a time
PLACES = {order: tuple(order.split().index(a) for a in "npk") for order in ("n p k d", "n k p d")}
# without a GPU, in the interpreter: so that splits and their reduction are run there too
INTERPRETED_PROCESSORS = 4


class Tiling(NamedTuple):
    """Rows and keys of a tile, and how a program is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """A step's sequences of each tile, by the number of queries of a tile."""

    starts_S1: Tensor
    num_tokens: int
    tiles: dict[int, Tensor] = field(default_factory=dict)

    def tiles_of(self, queries: int) -> Tensor:
        """The sequence of each tile. Sequence s has those from starts[s] // queries + s on: never too few."""
        if queries not in self.tiles:
            starts_S = self.starts_S1[:-1]
            first_S = starts_S // queries + torch.arange(len(starts_S), dtype=torch.int32, device=starts_S.device)
            tile_W = torch.arange(self.num_tokens // queries + len(starts_S), dtype=torch.int32, device=starts_S.device)
            self.tiles[queries] = torch.searchsorted(first_S, tile_W, right=True, out_int32=True) - 1
        return self.tiles[queries]


def plan(step: Any, spec: Any, block_size: int) -> Plan:
    """What the layers share; tiles are cut when first asked for."""
    return Plan(step.query_starts_S1, step.seq_ids_T.shape[0])


def decode_tiling(spec: Any, dtype: torch.dtype) -> Tiling:
    """Of decode: the heads of a group are the rows."""
    rows = max(16, triton.next_power_of_2(spec.group_size))
    widest = max(spec.k_dim, spec.v_dim)
    if dtype == torch.float32:
        return Tiling(rows, 32, 4, 2)
    return Tiling(rows, 64 if widest <= 128 else 32, 4, 3)


def prefill_tiling(spec: Any, dtype: torch.dtype) -> Tiling:
    """Of prefill: several queries' heads of a group are the rows."""
    group, widest = triton.next_power_of_2(spec.group_size), max(spec.k_dim, spec.v_dim)
    if dtype == torch.float32:
        return Tiling(max(32, group), 32, 4, 1)
    if widest > 128:
        return Tiling(max(64, group), 32, 4, 2)
    return Tiling(max(128, group), 64, 8, 3)


def num_splits(programs: int, keys: int, tile: int, device: torch.device) -> int:
    """How many programs share a sequence's keys: enough to fill the device, none without a tile."""
    if device.type == "cuda":
        wanted = RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        wanted = INTERPRETED_PROCESSORS
    return max(1, min(MAX_SPLITS, wanted // programs, -(-keys // tile)))


def attend(
    q_TKGD: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any, sinks_KG: Tensor | None, plan: Plan
) -> Tensor:
    """softmax(mask(cap(scale q k))) v, fp32 inside. What is masked may hold anything, NaN too. Padding becomes zero."""
    if order not in PLACES:
        raise NotImplementedError(f"triton attention over a cache of order {order!r}; it knows {', '.join(PLACES)}")
    if q_TKGD.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise NotImplementedError("triton attention wants the numbers of a head to lie together")
    out_TKGV = torch.empty((*q_TKGD.shape[:3], spec.v_dim), dtype=q_TKGD.dtype, device=q_TKGD.device)
    launch_decode(out_TKGV, q_TKGD, k, v, order, step, spec, sinks_KG)
    if not step.decode:
        launch_prefill(out_TKGV, q_TKGD, k, v, order, step, spec, sinks_KG, plan)
    return out_TKGV


def common(q: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any) -> tuple[list[int], dict[str, Any]]:
    """Strides and constants that both kernels take."""
    places = PLACES[order]
    strides = [*q.stride()[:3], *(k.stride(i) for i in places), *(v.stride(i) for i in places)]
    constants = {
        "K": spec.num_kv_heads,
        "G": spec.group_size,
        "D": spec.k_dim,
        "V": spec.v_dim,
        "P": k.shape[places[1]],
        "WINDOW": spec.window or 0,
        "CAP": float(spec.softcap or 0.0),
        "DP": max(16, triton.next_power_of_2(spec.k_dim)),
        "VP": max(16, triton.next_power_of_2(spec.v_dim)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    # a number of heads that the specs and a shard do not share is read off the arrays
    constants |= {"K": q.shape[1], "G": q.shape[2]}
    return [*strides, step.block_tables_SB.stride(0)], constants


def log2_scale(spec: Any) -> float:
    return spec.scale * (1.0 if spec.softcap else kernels.LOG2E.value)


def launch_decode(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any, sinks: Tensor | None
) -> None:
    """The rows of one token, and the padding of a step that has no others."""
    strides, constants = common(q, k, v, order, step, spec)
    tables, tiling = step.block_tables_SB, decode_tiling(spec, q.dtype)
    num_seqs, (heads, group) = tables.shape[0], q.shape[1:3]
    keys = min(tables.shape[1] * constants["P"], (spec.window or 1 << 30) + tiling.keys)
    splits = num_splits(num_seqs * heads, keys, tiling.keys, q.device)
    parts, peaks, sums = q, q, q
    if splits > 1:
        rows = num_seqs * heads * group * splits
        parts = torch.empty((rows, constants["VP"]), dtype=torch.float32, device=q.device)
        peaks, sums = torch.empty((2, rows), dtype=torch.float32, device=q.device)
    kernels.decode[(heads, num_seqs, splits)](
        q, k, v, tables, step.lengths_S, step.query_starts_S1, q if sinks is None else sinks, out, parts, peaks, sums,
        log2_scale(spec), *strides, num_seqs,
        **constants, SINKS=sinks is not None, SPLIT=splits > 1, ONLY=step.decode,
        M=tiling.rows, N=tiling.keys, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if splits > 1:
        kernels.reduce[(heads * group, num_seqs)](
            parts, peaks, sums, step.query_starts_S1, out, splits,
            HEADS=heads * group, V=spec.v_dim, VP=constants["VP"], Z=MAX_SPLITS, num_warps=4,
        )  # fmt: skip


def launch_prefill(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any, sinks: Tensor | None, plan: Plan
) -> None:
    """The rows of several tokens, and the padding."""
    strides, constants = common(q, k, v, order, step, spec)
    tiling, group = prefill_tiling(spec, q.dtype), triton.next_power_of_2(q.shape[2])
    tiles = plan.tiles_of(tiling.rows // group)
    kernels.prefill[(q.shape[1], len(tiles))](
        q, k, v, step.block_tables_SB, step.lengths_S, step.query_starts_S1, tiles, q if sinks is None else sinks, out,
        log2_scale(spec), *strides, step.block_tables_SB.shape[0], q.shape[0],
        **constants, SINKS=sinks is not None,
        GP=group, M=tiling.rows, N=tiling.keys, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return type(kernels.decode).__name__ == "InterpretedFunction"


def supports(spec: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """None, or why not."""
    if max(spec.k_dim, spec.v_dim) > 256:
        return f"a head of {max(spec.k_dim, spec.v_dim)} dims is more than the 256 that its tiles hold"
    if interpreted():
        return None if dtype != torch.bfloat16 else "Triton's interpreter multiplies bfloat16 wrongly"
    return None if device.type == "cuda" else "it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
