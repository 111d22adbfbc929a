"""Ragged cases filled with numbers, as arrays of a step, and what attention over them is in float64."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from shapes import Ragged

from octavo.engine.backend import Backend, get_backend
from octavo.engine.shared_prefixes import laid_out
from octavo.models.interface import ArraySpec, AttentionSpec, SharedPrefixes, Step

ORDERS = ("n p k d", "n k p d")


@dataclass(frozen=True)
class Batch:
    """A ragged case filled with numbers."""

    case: Ragged
    q: np.ndarray  # [T, K, G, D]
    k: np.ndarray  # [N, P, K, D]
    v: np.ndarray
    tables: np.ndarray  # [S, B]
    sinks: np.ndarray | None

    @property
    def spec(self) -> AttentionSpec:
        c = self.case
        scale = c.scale or c.k_dim**-0.5
        return AttentionSpec(c.kv_heads, c.group_size, c.k_dim, c.v_dim, scale, c.window, c.softcap)


@cache
def make_batch(case: Ragged) -> Batch:
    """Random queries, keys and values; blocks in random order, nan where nobody wrote."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    size, num_tokens = case.block_size, sum(case.counts) + case.padding
    num_tokens = len(case.counts) if case.decode else num_tokens
    widths = [-(-length // size) for length in case.lengths]
    tables = np.zeros((len(widths), max(widths) + case.spare_width), np.int32)
    free = 1 + rng.permutation(sum(widths) + 3)
    for row, width in zip(tables, widths, strict=True):
        row[:width], free = free[:width], free[width:]
    for members, blocks in case.shared or ():
        tables[list(members), :blocks] = tables[members[0], :blocks]
    k, v = (
        np.full((sum(widths) + 4, size, case.kv_heads, dim), np.nan, np.float32) for dim in (case.k_dim, case.v_dim)
    )
    for row, length in zip(tables, case.lengths, strict=True):
        at = row[np.arange(length) // size], np.arange(length) % size
        k[at], v[at] = rng.standard_normal((length, *k.shape[2:])), rng.standard_normal((length, *v.shape[2:]))
    q = rng.standard_normal((num_tokens, case.kv_heads, case.group_size, case.k_dim)).astype(np.float32)
    sinks = rng.standard_normal(q.shape[1:3]).astype(np.float32) if case.sinks else None
    return Batch(case, q, k, v, tables, sinks)


def expected(batch: Batch) -> np.ndarray:
    """[real tokens, K, G, Dv] in float64, one query of one head at a time."""
    case, out, token = batch.case, [], 0
    k_all, v_all = (x.astype(np.float64) for x in (batch.k, batch.v))
    for row, computed, count in zip(batch.tables, case.computed, case.counts, strict=True):
        for position in range(computed, computed + count):
            seen = np.arange(max(0, position + 1 - (case.window or position + 1)), position + 1)
            at = row[seen // case.block_size], seen % case.block_size
            scores = np.einsum("kgd,mkd->kgm", batch.q[token].astype(np.float64), k_all[at]) * batch.spec.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores)
            total = weights.sum(-1) + (0 if batch.sinks is None else np.exp(batch.sinks.astype(np.float64)))
            out.append(np.einsum("kgm,mkd->kgd", weights / total[..., None], v_all[at]))
            token += 1
    return np.stack(out)


def make_step(batch: Batch, backend: Backend) -> Step:
    """What `derive` would have made of it."""
    case, num_tokens = batch.case, len(batch.q)
    starts = np.concatenate([[0], np.cumsum(case.counts)])
    token = np.arange(num_tokens)
    seq = np.clip(np.searchsorted(starts[1:], token, side="right"), 0, len(case.counts) - 1)
    real = token < starts[-1]
    positions = np.where(real, np.array(case.computed)[seq] + token - starts[seq], 0)
    zeros = np.zeros(num_tokens)
    blocks = np.where(real, batch.tables[seq, positions // case.block_size], 0)

    def place(x: np.ndarray, dtype: str = "int32") -> Any:
        return backend.place(np.asarray(x), ArraySpec(x.shape, (None,) * x.ndim, dtype))

    return Step(
        token_ids_T=place(zeros),
        positions_T=place(positions),
        seq_ids_T=place(seq),
        is_real_T=place(real, "bool"),
        blocks_T=place(blocks),
        offsets_T=place(positions % case.block_size),
        lengths_S=place(np.array(case.lengths)),
        query_starts_S1=place(starts),
        block_tables_SB=place(batch.tables),
        decode=case.decode,
        ropes={},
        extra={},
        shared=shared_prefixes(case, place),
    )


def shared_prefixes(case: Ragged, place: Any) -> SharedPrefixes | None:
    """The case's groups as a step tells of them."""
    if case.shared is None:
        return None
    groups = [(np.array(members), blocks) for members, blocks in case.shared]
    found = laid_out(groups, len(case.counts), case.block_size)
    return SharedPrefixes(*(place(x) for x in vars(found).values()))


@cache
def backend_of(name: str, attention: str) -> Backend:
    return get_backend(name, {"attention": attention})
