"""Attention that is fast on a CPU: reads lengths on the host, copies only visible blocks, calls torch's flash kernel.

Rows with one query are taken several at a time, padded to a common width; longer chunks one sequence at a time, in
tiles of queries, each with the keys up to its own end. What is not visible is never read, or is zeroed after the copy.
Reference: reference.py; the same to a few fp32 roundings.

Letters beyond models/interface.py: W sequences of a unit, Q queries of a tile, M keys of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .native import MOST_QUERIES

Tensor = torch.Tensor
Pools = tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]  # keys and values, each with their scales

QUERIES = 128  # of a tile
MEMORY = 3 << 18  # elements of keys copied at a time: they stay in the cache until they are read
NEVER = float("-inf")
AXES = {order: {letter: axis for axis, letter in enumerate(order.split())} for order in ("n p k d", "n k p d")}

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class Tile:
    """Queries of one sequence, which see the unit's keys in a slice, as the mask says."""

    tokens: slice
    keys: slice
    mask_11QM: Tensor


@dataclass(frozen=True)
class Unit:
    """Sequences whose keys are gathered at once. `tiles` cut one long chunk; else token w is the query of sequence w.

    A single sequence sees the gathered keys in the slice `keys`; of several, what one does not see is masked.
    """

    blocks_WB: np.ndarray
    tokens_W: Tensor | None = None
    keys: slice = field(default_factory=lambda: slice(None))
    mask_W11M: Tensor | None = None
    unseen: tuple[np.ndarray, ...] | None = None  # (w, m) of gathered keys that no query sees
    tiles: tuple[Tile, ...] = ()
    ids: dict[tuple[str, int], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    units: tuple[Unit, ...]
    num_real: int  # tokens; padding follows them
    whole: bool  # one unit, whose queries are the step's tokens in order


def plan_long(step: Any, spec: Any, block_size: int) -> Plan:
    """As plan, of the sequences alone that the compiled kernel leaves out."""
    return plan(step, spec, block_size, least=MOST_QUERIES + 1)


def plan(step: Any, spec: Any, block_size: int, least: int = 1) -> Plan:
    """Cuts a step into units, on the host; sequences of fewer than `least` queries are in none."""
    starts, lengths = step.query_starts_S1.numpy(), step.lengths_S.numpy()
    tables, counts = step.block_tables_SB.numpy(), np.diff(starts)
    seen = np.maximum(lengths - counts - (spec.window or 1 << 30) + 1, 0)  # the first key that the first query sees
    first, last = seen // block_size, -(-lengths // block_size)
    singles = [int(s) for s in np.argsort(last - first, kind="stable") if counts[s] == 1 >= least]
    widths = (last - first) * block_size * spec.num_kv_heads * spec.k_dim
    units = [
        decode_unit(rows, starts, lengths, seen, first, last, tables, block_size) for rows in batches(singles, widths)
    ]
    for s in np.nonzero(counts >= max(least, 2))[0]:
        blocks_1B = tables[s : s + 1, first[s] : last[s]]
        span = (int(starts[s]), int(starts[s + 1]), int(lengths[s] - counts[s]), int(first[s]) * block_size)
        units.append(Unit(blocks_1B, tiles=tuple(query_tiles(*span, spec.window))))
    num_tokens, tokens_W = step.seq_ids_T.shape[0], units[0].tokens_W if len(units) == 1 else None
    whole = tokens_W is not None and torch.equal(tokens_W, torch.arange(num_tokens))
    return Plan(tuple(units), int(starts[-1]), whole)


def batches(rows: list[int], widths: np.ndarray) -> Iterator[list[int]]:
    """Rows of growing width, cut where a batch gets too large or its narrowest row is padded to more than 1.5 times.

    The rows of a batch come in the order of the step.
    """
    batch: list[int] = []
    for row in rows:
        if batch and (widths[row] * (len(batch) + 1) > MEMORY or widths[row] > 1.5 * widths[batch[0]]):
            yield sorted(batch)
            batch = []
        batch.append(row)
    if batch:
        yield sorted(batch)


def decode_unit(
    rows: list[int], starts: Any, lengths: Any, seen: Any, first: Any, last: Any, tables: Any, block_size: int
) -> Unit:
    """One query each of these sequences."""
    width = int((last[rows] - first[rows]).max())
    blocks_WB = np.zeros((len(rows), width), np.int64)
    for w, s in enumerate(rows):
        blocks_WB[w, : last[s] - first[s]] = tables[s, first[s] : last[s]]
    tokens_W, base_W = torch.from_numpy(starts[:-1][rows].astype(np.int64)), first[rows] * block_size
    if len(rows) == 1:
        return Unit(blocks_WB, tokens_W, slice(int(seen[rows[0]] - base_W[0]), int(lengths[rows[0]] - base_W[0])))
    keys_WM = np.arange(width * block_size) + base_W[:, None]
    hidden_WM = (keys_WM < seen[rows, None]) | (keys_WM >= lengths[rows, None])
    if not hidden_WM.any():
        return Unit(blocks_WB, tokens_W)
    return Unit(blocks_WB, tokens_W, mask_W11M=additive(hidden_WM)[:, None, None], unseen=np.nonzero(hidden_WM))


def query_tiles(start: int, end: int, computed: int, base: int, window: int | None) -> Iterator[Tile]:
    """Tiles of the chunk at tokens start .. end, whose first position is `computed`; gathered keys begin at `base`."""
    for t in range(start, end, QUERIES):
        stop = min(t + QUERIES, end)
        pos_Q1 = np.arange(computed + t - start, computed + stop - start)[:, None]
        low = max(int(pos_Q1[0, 0]) - (window or 1 << 30) + 1, 0)
        behind_QM = pos_Q1 - np.arange(low, int(pos_Q1[-1, 0]) + 1)
        hidden_QM = (behind_QM < 0) | (behind_QM >= (window or 1 << 30))
        yield Tile(slice(t, stop), slice(low - base, int(pos_Q1[-1, 0]) + 1 - base), additive(hidden_QM)[None, None])


def additive(hidden: np.ndarray) -> Tensor:
    """What is added to scores: minus infinity where hidden."""
    return torch.from_numpy(np.where(hidden, np.float32(NEVER), np.float32(0)))


def attend(
    q_TKGD: Tensor,
    k: Tensor,
    v: Tensor,
    order: str,
    step: Any,
    spec: Any,
    sinks_KG: Tensor | None,
    plan: Plan,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(mask(cap(scale q k))) v, fp32 inside. What is masked may hold anything, NaN too.

    `scales`: of k and of v, in their order without d; what lies in the cache is times them.
    """
    k_scale, v_scale = scales or (None, None)
    pools = (k, k_scale), (v, v_scale)
    if plan.whole:
        return decode(q_TKGD, pools, order, spec, sinks_KG, plan.units[0])
    out_TKGD = q_TKGD.new_empty((*q_TKGD.shape[:3], spec.v_dim))
    out_TKGD[plan.num_real :] = 0
    attend_units(out_TKGD, q_TKGD, pools, order, spec, sinks_KG, plan.units)
    return out_TKGD


def attend_units(
    out_TKGD: Tensor,
    q_TKGD: Tensor,
    pools: Pools,
    order: str,
    spec: Any,
    sinks_KG: Tensor | None,
    units: Iterable[Unit],
) -> None:
    """Attention of these units, written into out."""
    for unit in units:
        if unit.tokens_W is None:
            chunk(out_TKGD, q_TKGD, pools, order, spec, sinks_KG, unit)
        else:
            q_WKGD = q_TKGD.index_select(0, unit.tokens_W)
            out_TKGD.index_copy_(0, unit.tokens_W, decode(q_WKGD, pools, order, spec, sinks_KG, unit))


def decode(q_WKGD: Tensor, pools: Pools, order: str, spec: Any, sinks_KG: Tensor | None, unit: Unit) -> Tensor:
    """One query a sequence. The queries of a group are the rows of one product."""
    k_WKMD, v_WKMD = (gather_scaled(*pool, order, unit) for pool in pools)
    if len(q_WKGD) == 1:
        k_WKMD, v_WKMD = k_WKMD[:, :, unit.keys], v_WKMD[:, :, unit.keys]
    return dense(q_WKGD, k_WKMD, v_WKMD, unit.mask_W11M, None if sinks_KG is None else sinks_KG[None], spec)


def chunk(
    out_TKGD: Tensor, q_TKGD: Tensor, pools: Pools, order: str, spec: Any, sinks_KG: Tensor | None, unit: Unit
) -> None:
    """Many queries of one sequence, written into out. Each tile reads the keys up to its own last query."""
    size = (-1, spec.group_size, -1, -1)
    k_KGMD, v_KGMD = (gather_scaled(*pool, order, unit)[0].unsqueeze(1).expand(size) for pool in pools)
    sinks = None if sinks_KG is None else sinks_KG[..., None]
    for tile in unit.tiles:
        q_KGQD = q_TKGD[tile.tokens].permute(1, 2, 0, 3)
        out_KGQD = dense(q_KGQD, k_KGMD[:, :, tile.keys], v_KGMD[:, :, tile.keys], tile.mask_11QM, sinks, spec)
        out_TKGD[tile.tokens] = out_KGQD.permute(2, 0, 1, 3)


def gather_scaled(x: Tensor, scale: Tensor | None, order: str, unit: Unit) -> Tensor:
    """gather, and each row times its scale if there are scales; float32 then."""
    if x.dtype == torch.float8_e4m3fn:
        # torch fills and copies bytes, but no floats of 8 bits
        x_WKMD = gather(x.view(torch.uint8), order, unit).view(x.dtype)
    else:
        x_WKMD = gather(x, order, unit)
    return x_WKMD if scale is None else x_WKMD.float() * gather(scale[..., None], order, unit)


def gather(x: Tensor, order: str, unit: Unit) -> Tensor:
    """The unit's blocks as [W, K, M, D], a view where one run of blocks makes it possible. Unseen keys become zero."""
    if order not in AXES:
        raise NotImplementedError(f"cpu attention over a cache of order {order!r}; it knows {', '.join(AXES)}")
    num_seqs, heads = len(unit.blocks_WB), x.shape[AXES[order]["k"]]
    if (found := unit.ids.get((order, heads))) is None:
        found = unit.ids[order, heads] = gather_ids(unit, order, heads, x.shape[AXES[order]["p"]])
    ids, unseen = found
    if isinstance(ids, slice):
        return x[ids].view(1, -1, heads, x.shape[-1]).transpose(1, 2)
    if order == "n p k d":
        x_MKD = x.index_select(0, ids).view(-1, heads, x.shape[-1])
        if unseen is not None:
            x_MKD.index_fill_(0, unseen, 0)
        return x_MKD.view(num_seqs, -1, heads, x.shape[-1]).transpose(1, 2)
    # head-major blocks are taken head by head, so that a head's keys of all blocks lie together
    x_MD = x.view(-1, *x.shape[2:]).index_select(0, ids).view(-1, x.shape[-1])
    if unseen is not None:
        x_MD.index_fill_(0, unseen, 0)
    return x_MD.view(num_seqs, heads, -1, x.shape[-1])


def gather_ids(unit: Unit, order: str, heads: int, block_size: int) -> tuple[Tensor | slice, Tensor | None]:
    """What to select from a pool of that order, and which of the selected rows no query sees."""
    (num_seqs, width), blocks = unit.blocks_WB.shape, unit.blocks_WB.astype(np.int64)
    by_head = order == "n k p d"
    if by_head:
        blocks = blocks[:, None] * heads + np.arange(heads)[:, None]
    unseen = None
    if unit.unseen is not None:
        w, m = unit.unseen
        if by_head:
            w, m = w[:, None] * heads + np.arange(heads), m[:, None]
        unseen = torch.from_numpy((w * width * block_size + m).reshape(-1))
    elif not by_head and num_seqs == 1 and (np.diff(blocks) == 1).all():
        return slice(int(blocks[0, 0]), int(blocks[0, -1]) + 1), None
    return torch.from_numpy(blocks.reshape(-1)), unseen


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, spec: Any) -> Tensor:
    """Attention of q [A, B, Q, D] over k and v [A, B, M, D]; mask adds to the scores, sinks to their sum."""
    if spec.softcap is None and spec.k_dim == spec.v_dim:
        # the cache may be of another dtype
        k, v = k.to(q.dtype), v.to(q.dtype)
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=spec.scale)
        # a sink is one more term of the denominator
        return out if sinks is None else (out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1)).to(out.dtype)
    scores = torch.matmul(q.float() * spec.scale, k.float().transpose(-1, -2))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sinks = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    probs = torch.softmax(scores, -1)[..., : k.shape[-2]]
    return torch.matmul(probs, v.float()).to(q.dtype)


def supports(spec: Any, dtype: torch.dtype, device: torch.device, cache: torch.dtype) -> str | None:
    """None, or why not."""
    return None if device.type == "cpu" else f"it reads lengths on the host, and the cache is on {device.type}"
