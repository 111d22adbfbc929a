"""Attention in two parts the obvious way: a prefix that sequences share, once; then what each has of its own.

Letters beyond models/interface.py: W tiles, C members of a tile, M keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import reference
from .reference import HIDDEN, Tiles, keys_of, masked_scores


class Part(NamedTuple):
    """A softmax over some of the keys: the highest score, the sum of weights beside it, and of weighted values."""

    peak: jax.Array  # [..., K, G]
    total: jax.Array
    out: jax.Array  # [..., K, G, Dv]


def attend(
    q_TKGD: jax.Array,
    k: jax.Array,
    v: jax.Array,
    order: str,
    step: Any,
    spec: Any,
    sinks_KG: jax.Array | None,
    tiles: Tiles,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """As reference.py's, but with the rows of those that share a prefix made in two parts; [T, K, G, Dv]."""
    whole_TKGD = reference.attend(q_TKGD, k, v, order, step, spec, sinks_KG, tiles, scales)
    shared, table_SB = step.shared, step.block_tables_SB
    if shared is None:
        return whole_TKGD
    q_SKGD = q_TKGD[jnp.minimum(step.query_starts_S1[:-1], q_TKGD.shape[0] - 1)].astype(jnp.float32)
    k_SMKD, v_SMKD = (keys_of(x, scale, order, table_SB) for x, scale in zip((k, v), scales or (None, None)))
    key_M = jnp.arange(k_SMKD.shape[1])
    own_SM = (key_M >= shared.lengths_S[:, None]) & (key_M < step.lengths_S[:, None])
    own = attend_keys(q_SKGD[:, None], k_SMKD, v_SMKD, own_SM, spec)
    parts = [Part(*(x[:, 0] for x in own))]
    # of a tile, the first member's blocks are everybody's
    leader_W, prefix_WM = jnp.maximum(shared.members_WC[:, 0], 0), key_M < shared.lengths_W[:, None]
    q_WCKGD = q_SKGD[jnp.maximum(shared.members_WC, 0)]
    once = attend_keys(q_WCKGD, k_SMKD[leader_W], v_SMKD[leader_W], prefix_WM, spec)
    # back to sequences: what a tile lacks of members is dropped, being out of bounds
    at_WC = jnp.where(shared.members_WC < 0, q_SKGD.shape[0], shared.members_WC)
    rows = Part(jnp.full_like(parts[0].peak, HIDDEN), jnp.zeros_like(parts[0].total), jnp.zeros_like(parts[0].out))
    parts.append(Part(*(row.at[at_WC].set(x, mode="drop") for row, x in zip(rows, once, strict=True))))
    if sinks_KG is not None:
        # a key without a value
        sink = jnp.broadcast_to(sinks_KG.astype(jnp.float32), parts[0].peak.shape)
        parts.append(Part(sink, jnp.ones_like(sink), jnp.zeros_like(parts[0].out)))
    shares_T = ((shared.lengths_S > 0)[step.seq_ids_T] & step.is_real_T)[:, None, None, None]
    return jnp.where(shares_T, merge(parts)[step.seq_ids_T].astype(whole_TKGD.dtype), whole_TKGD)


def attend_keys(q_WCKGD: jax.Array, k_WMKD: jax.Array, v_WMKD: jax.Array, seen_WM: jax.Array, spec: Any) -> Part:
    """All queries of a tile over the keys that it sees. What is not seen may hold anything."""
    scores = jnp.einsum("wckgd,wmkd->wckgm", q_WCKGD, k_WMKD, precision="highest") * spec.scale
    seen = seen_WM[:, None, None, None]
    scores = masked_scores(scores, seen, spec.softcap)
    peak = scores.max(-1)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0)
    v_WMKD = jnp.where(seen_WM[..., None, None], v_WMKD, 0)
    return Part(peak, weights.sum(-1), jnp.einsum("wckgm,wmkd->wckgd", weights, v_WMKD, precision="highest"))


def merge(parts: list[Part]) -> jax.Array:
    """The softmax over the keys of all parts."""
    peak, total, out = (jnp.stack(x) for x in zip(*parts, strict=True))
    weight = jnp.exp(peak - peak.max(0))
    return (out * weight[..., None]).sum(0) / (total * weight).sum(0)[..., None]
