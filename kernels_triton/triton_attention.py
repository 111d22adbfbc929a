"""Attention by the Triton kernels: what is launched, with which tiles. Never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from . import attention_kernels as kernels
from . import hopper_prefill, shared_prefix
from .arrivals import counters
from .early import early
from .fused import PLACES
from .sizes import next_power_of_2

Tensor = torch.Tensor

MAX_SPLITS = 64
# keys of a split at least: where decode puts the splits together, as long as each multiprocessor has a program at most,
# and beyond that, when splitting only evens out; where a launch of its own does
LEAST_KEYS, LEAST_WHEN_BUSY, LEAST_APART = 64, 1024, 128
AT_ONCE = 2048  # numbers of parts that are added in a step, when a program puts them together
CHUNKS = 32  # sequences of several tokens that a step is expected to have
RESIDENT = 4  # decode programs that a multiprocessor holds at a time
# without a GPU, in the interpreter: so that splits and their reduction are run there too
INTERPRETED_PROCESSORS = 8


class Tiling(NamedTuple):
    """Rows and keys of a tile, and how a program is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    apart: bool = False  # whether each of two warps has keys of its own


class Tiles(NamedTuple):
    """The tiles of queries of a step's sequences of several tokens: the first `num_1` entries are of tiles."""

    seqs_W: Tensor
    firsts_W: Tensor  # the place of a tile's first query in its sequence's tokens of this step
    num_1: Tensor


@dataclass(frozen=True)
class Plan:
    """What a step's layers share: its tiles, by the number of queries of a tile, and which sequences go first."""

    starts_S1: Tensor
    lengths_S: Tensor
    num_tokens: int
    tiles: dict[int, Tiles] = field(default_factory=dict)

    def tiles_of(self, queries: int) -> Tiles:
        """Made when first asked for, on the device."""
        if queries not in self.tiles:
            starts, device = self.starts_S1, self.starts_S1.device
            counts_S = starts[1:] - starts[:-1]
            each_S = torch.where(counts_S > 1, (counts_S + (queries - 1)) // queries, 0)
            ends_S = torch.cumsum(each_S, 0, dtype=torch.int32)
            tile_W = torch.arange(self.num_tokens // queries + len(counts_S), dtype=torch.int32, device=device)
            seqs_W = torch.searchsorted(ends_S, tile_W, right=True, out_int32=True).clamp_max_(len(counts_S) - 1)
            firsts_W = (tile_W - (ends_S - each_S)[seqs_W]) * queries
            self.tiles[queries] = Tiles(seqs_W, firsts_W.to(torch.int32), ends_S[-1:])
        return self.tiles[queries]

    @cached_property
    def order_S(self) -> Tensor:
        """The sequences, the longest first: so the last programs of a large launch are short. Made likewise."""
        return torch.argsort(self.lengths_S, descending=True, stable=True).to(torch.int32)


def plan(step: Any, spec: Any, block_size: int) -> Plan:
    """Nothing yet: tiles are cut when first asked for."""
    return Plan(step.query_starts_S1, step.lengths_S, step.seq_ids_T.shape[0])


def decode_tiling(spec: Any, dtype: torch.dtype, cache: torch.dtype) -> Tiling:
    """Of decode: the heads of a group are the rows."""
    rows = max(16, next_power_of_2(spec.group_size))
    widest = max(spec.k_dim, spec.v_dim)
    if dtype == torch.float32:
        return Tiling(rows, 32, 4, 2)
    keys = 64 if widest <= 128 else 32
    if cache == dtype:
        # where registers hold the values once a warp: three tiles on their way
        return Tiling(rows, 32, 2, 7, apart=True) if rows == 16 and widest <= 128 else Tiling(rows, keys, 4, 3)
    # codes of 8 bits: half the bytes, so half the warps to a tile, and two of them on their way
    return Tiling(rows, keys, 2, 5) if rows < 64 else Tiling(rows, 32, 4, 5)


def prefill_tiling(spec: Any, dtype: torch.dtype) -> Tiling:
    """Of prefill: several queries' heads of a group are the rows."""
    group, widest = next_power_of_2(spec.group_size), max(spec.k_dim, spec.v_dim)
    if dtype == torch.float32:
        return Tiling(max(32, group), 32, 4, 1)
    if widest > 128:
        return Tiling(max(64, group), 32, 4, 2)
    return Tiling(max(128, group), 64, 4, 3)


def sums_within(programs: int, device: torch.device) -> bool:
    """Whether decode puts splits together, with so many programs when nothing is split.

    Few programs have many splits each, whose sum is better shared out by a launch of its own (docs/LOG.md).
    """
    return programs > num_processors(device) // 4


def least_keys(programs: int, within: bool, device: torch.device) -> int:
    """Of a split, with so many programs when nothing is split."""
    return LEAST_APART if not within else LEAST_KEYS if programs <= num_processors(device) else LEAST_WHEN_BUSY


def num_splits(programs: int, keys: int, least: int, device: torch.device) -> int:
    """How many programs share a sequence's keys: enough to fill the device."""
    return max(1, min(MAX_SPLITS, RESIDENT * num_processors(device) // programs, -(-keys // least)))


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q_TKGD: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any, sinks_KG: Tensor | None, plan: Plan,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """softmax(mask(cap(scale q k))) v, fp32 inside. What is masked may hold anything, NaN too. Padding becomes zero.

    `scales`: of k and of v, in their order without d; what lies in the cache is times them.
    """
    if order not in PLACES:
        raise NotImplementedError(f"triton attention over a cache of order {order!r}; it knows {', '.join(PLACES)}")
    if q_TKGD.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise NotImplementedError("triton attention wants the numbers of a head to lie together")
    out_TKGV = torch.empty((*q_TKGD.shape[:3], spec.v_dim), dtype=q_TKGD.dtype, device=q_TKGD.device)
    for x, scale in zip((k, v), scales or (), strict=scales is not None):
        if scale.stride() != tuple(n // x.shape[-1] for n in x.stride()[:-1]):
            raise NotImplementedError(
                f"triton attention wants scales as its cache lies, not with strides {scale.stride()}"
            )
    constants = common(q_TKGD, k, v, order, spec, scales)
    launch_decode(out_TKGV, q_TKGD, k, v, constants, step, spec, sinks_KG, plan)
    if step.decode:
        return out_TKGV
    if hopper_prefill.serves(q_TKGD, k, v, constants["P"], spec, scales is not None):
        each, (num_tokens, heads) = hopper_prefill.queries(q_TKGD.shape[2]), q_TKGD.shape[:2]
        programs = hopper_programs(num_tokens // each, len(step.block_tables_SB), heads, num_processors(q_TKGD.device))
        tiles = plan.tiles_of(each)
        hopper_prefill.launch(out_TKGV, q_TKGD, k, v, order, step, tiles, sinks_KG, factor_of(spec), programs)
    else:
        launch_prefill(out_TKGV, q_TKGD, k, v, constants, step, spec, sinks_KG, plan)
    return out_TKGV


def common(
    q: Tensor, k: Tensor, v: Tensor, order: str, spec: Any, scales: tuple[Tensor, Tensor] | None
) -> dict[str, Any]:
    """What all kernels take by name: constants, and scales. Of heads as many as the arrays have, maybe a shard's."""
    n, p, h = PLACES[order]
    # of both, although one may be narrower: tiles of two widths came out wrong in bfloat16 (Triton 3.6, Hopper). A
    # product is over 16 dims at least, and one over codes of 8 bits over half of them
    width = max(16 if k.dtype == q.dtype else 32, next_power_of_2(max(spec.k_dim, spec.v_dim)))
    return {
        **dict(zip(("Q_T", "Q_K", "Q_G"), q.stride(), strict=False)),
        **{f"K_{a}": k.stride(i) for a, i in (("N", n), ("P", p), ("K", h))},
        **{f"V_{a}": v.stride(i) for a, i in (("N", n), ("P", p), ("K", h))},
        "K": q.shape[1],
        "G": q.shape[2],
        "D": spec.k_dim,
        "V": spec.v_dim,
        "P": k.shape[p],
        "WINDOW": spec.window or 0,
        "CAP": float(spec.softcap or 0.0),
        "DP": width,
        "VP": width,
        "FAR": max(k.numel(), v.numel()) >= 2**31,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "SCALED": scales is not None,
        **dict(zip(("k_scale", "v_scale"), scales or (q, q), strict=True)),
    }


def launch_decode(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    constants: dict,
    step: Any,
    spec: Any,
    sinks: Tensor | None,
    plan: Plan,
) -> None:
    """The rows of one token, and the padding."""
    tables, tiling, narrow = step.block_tables_SB, decode_tiling(spec, q.dtype, k.dtype), k.dtype != q.dtype
    (num_seqs, blocks), (heads, group) = tables.shape, q.shape[1:3]
    keys = min(blocks * constants["P"], (spec.window or 1 << 30) + kernels.WHOLE.value)
    shared, wide = step.shared, next_power_of_2(group)
    within = shared is None and sums_within(num_seqs * heads, q.device)
    least = least_keys(num_seqs * heads, within, q.device)
    splits = num_splits(num_seqs * heads, keys, least, q.device)
    num_parts = splits = splits if shared is None else min(splits, shared_prefix.MAX_PARTS // 2)
    if shared is not None:
        full = num_seqs * heads // shared.members_WC.shape[1]
        num_parts += shared_prefix.num_splits(full, keys, num_processors(q.device), least)
    parts, peaks, sums, lengths, starts = q, q, q, step.lengths_S, step.query_starts_S1
    prefixes, again = q if shared is None else shared.lengths_S, {"SHARED": shared is not None, "LEAST": least}
    if num_parts > 1:
        rows = num_seqs * heads * group * num_parts
        parts = torch.empty((rows, constants["VP"]), dtype=torch.float32, device=q.device)
        peaks, sums = torch.empty((2, rows), dtype=torch.float32, device=q.device)
    within = within and splits > 1
    ordered = num_parts == 1 and num_seqs * heads > RESIDENT * num_processors(q.device)
    # programs that begin together wait for memory together: those of codes, with a tile on its way, take a fifth longer
    turn = {"EARLY": False} if narrow else early(q.device, heads * num_seqs * splits)
    kernels.decode[(heads, num_seqs, splits)](
        q, k, v, tables, lengths, starts, prefixes, q if sinks is None else sinks, out, parts, peaks, sums,
        counters(q.device) if within else q, plan.order_S if ordered else q, spec.scale, factor_of(spec),
        tables.stride(0), num_seqs, len(q), num_parts,
        **constants, **again, **turn, SINKS=sinks is not None, SPLIT=num_parts > 1, M=tiling.rows, N=tiling.keys,
        NARROW=narrow, APART=tiling.apart, ORDERED=ordered, WITHIN=within, GP=wide,
        C=min(4, max(1, AT_ONCE // (wide * constants["VP"]))),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if shared is not None:
        of_prefill = prefill_tiling(spec, q.dtype)
        rows = min(of_prefill.rows, shared.members_WC.shape[1] * next_power_of_2(group))
        shared_prefix.launch(
            q, k, v, step, parts, peaks, sums, splits, num_parts, spec.scale, factor_of(spec), constants,
            Tiling(rows, of_prefill.keys, 4, of_prefill.num_stages), least,
        )  # fmt: skip
    if num_parts > 1 and not within:
        kernels.reduce[(heads * group, num_seqs)](
            parts, peaks, sums, lengths, starts, prefixes, out, splits, num_parts,
            HEADS=heads * group, V=spec.v_dim, VP=constants["VP"],
            Z=MAX_SPLITS if shared is None else shared_prefix.MAX_PARTS,
            WINDOW=constants["WINDOW"], **again, num_warps=4,
            **early(q.device, heads * group * num_seqs),
        )  # fmt: skip


def hopper_programs(full_tiles: int, num_seqs: int, heads: int, processors: int) -> int:
    """Tiles of one sequence, each a little shorter than the last, are shared out evenly beforehand, with the next one's
    keys on their way meanwhile. Those of several are taken by whoever is free.
    """
    return processors if num_seqs == 1 else heads * (full_tiles + min(num_seqs, CHUNKS))


def launch_prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    constants: dict,
    step: Any,
    spec: Any,
    sinks: Tensor | None,
    plan: Plan,
) -> None:
    """The rows of several tokens."""
    tables, tiling, group = step.block_tables_SB, prefill_tiling(spec, q.dtype), next_power_of_2(q.shape[2])
    queries = tiling.rows // group
    tiles = plan.tiles_of(queries)
    # enough programs for the tiles of a few sequences; where more begin in one step, a program takes several tiles
    programs = len(q) // queries + min(len(tables), CHUNKS)
    kernels.prefill[(q.shape[1], programs)](
        q, k, v, tables, step.lengths_S, step.query_starts_S1, *tiles, q if sinks is None else sinks, out,
        spec.scale, factor_of(spec), tables.stride(0),
        **constants, SINKS=sinks is not None, GP=group,
        M=tiling.rows, N=tiling.keys, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def factor_of(spec: Any) -> float:
    """What a score is multiplied by to be in log2; a capped one is already."""
    return 1.0 if spec.softcap else spec.scale * kernels.LOG2E.value


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return type(kernels.decode).__name__ == "InterpretedFunction"


def supports(spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype) -> str | None:
    """None, or why not."""
    if cache not in (dtype, torch.int8, torch.float8_e4m3fn):
        return f"it wants a cache of the queries' {dtype}, of int8 or of float8_e4m3fn, not of {cache}"
    if max(spec.k_dim, spec.v_dim) > 256:
        return f"a head of {max(spec.k_dim, spec.v_dim)} dims is more than the 256 that its tiles hold"
    if spec.scale <= 0:
        return f"scale {spec.scale} is not positive"
    if cache != dtype and (spec.k_dim % 2 or spec.v_dim % 2):
        return f"codes of 8 bits are read two at a time, and heads of {spec.k_dim} and {spec.v_dim} dims are not even"
    if interpreted() and cache != dtype and dtype != torch.float32:
        return f"Triton's interpreter runs no assembly, which {dtype} over a cache of {cache} wants; float32 does not"
    if interpreted():
        return None if dtype != torch.bfloat16 else "Triton's interpreter multiplies bfloat16 wrongly"
    return None if device.type == "cuda" else "it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
