"""Attention in two parts the obvious way: a prefix that sequences share, once; then what each has of its own.

Letters beyond models/interface.py: W tiles, C members of a tile, M keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import reference
from .reference import HIDDEN, Tiles, keys_of, masked_scores

Tensor = torch.Tensor


class Part(NamedTuple):
    """A softmax over some of the keys: the highest score, the sum of weights beside it, and of weighted values."""

    peak: Tensor  # [..., K, G]
    total: Tensor
    out: Tensor  # [..., K, G, Dv]


def attend(
    q_TKGD: Tensor,
    k: Tensor,
    v: Tensor,
    order: str,
    step: Any,
    spec: Any,
    sinks_KG: Tensor | None,
    tiles: Tiles,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As reference.py's, but with the rows of those that share a prefix made in two parts; [T, K, G, Dv]."""
    whole_TKGD = reference.attend(q_TKGD, k, v, order, step, spec, sinks_KG, tiles, scales)
    shared, table_SB, num_seqs = step.shared, step.block_tables_SB, len(step.lengths_S)
    if shared is None:
        return whole_TKGD
    q_SKGD = q_TKGD[step.query_starts_S1[:-1].clamp_max(len(q_TKGD) - 1)].float()
    k_SMKD, v_SMKD = (keys_of(x, scale, order, table_SB) for x, scale in zip((k, v), scales or (None, None)))
    key_M = torch.arange(k_SMKD.shape[1], device=q_TKGD.device)
    own_SM = (key_M >= shared.lengths_S[:, None]) & (key_M < step.lengths_S[:, None])
    own = attend_keys(q_SKGD[:, None], k_SMKD, v_SMKD, own_SM, spec)
    # of a tile, the first member's blocks are everybody's
    members_WC = shared.members_WC.long()
    leader_W, prefix_WM = members_WC[:, 0].clamp_min(0), key_M < shared.lengths_W[:, None]
    q_WCKGD = q_SKGD[members_WC.clamp_min(0)]
    once = attend_keys(q_WCKGD, k_SMKD[leader_W], v_SMKD[leader_W], prefix_WM, spec)
    # back to sequences: what a tile lacks of members goes to a row too many
    at_WC = torch.where(members_WC < 0, num_seqs, members_WC)
    parts = [Part(*(x[:, 0] for x in own))]
    rows = Part(*(x.new_full((num_seqs + 1, *x.shape[2:]), fill) for x, fill in zip(once, (HIDDEN, 0, 0), strict=True)))
    parts.append(Part(*(row.index_put((at_WC,), x)[:num_seqs] for row, x in zip(rows, once, strict=True))))
    if sinks_KG is not None:
        # a key without a value
        sink = sinks_KG.float().expand_as(parts[0].peak)
        parts.append(Part(sink, torch.ones_like(sink), torch.zeros_like(parts[0].out)))
    shares_T = ((shared.lengths_S > 0)[step.seq_ids_T] & step.is_real_T)[:, None, None, None]
    return torch.where(shares_T, merge(parts)[step.seq_ids_T].to(whole_TKGD.dtype), whole_TKGD)


def attend_keys(q_WCKGD: Tensor, k_WMKD: Tensor, v_WMKD: Tensor, seen_WM: Tensor, spec: Any) -> Part:
    """All queries of a tile over the keys that it sees. What is not seen may hold anything."""
    scores = torch.einsum("wckgd,wmkd->wckgm", q_WCKGD, k_WMKD) * spec.scale
    seen = seen_WM[:, None, None, None]
    scores = masked_scores(scores, seen, spec.softcap)
    peak = scores.amax(-1)
    weights = torch.where(seen, torch.exp(scores - peak[..., None]), 0.0)
    v_WMKD = torch.where(seen_WM[..., None, None], v_WMKD, 0.0)
    return Part(peak, weights.sum(-1), torch.einsum("wckgm,wmkd->wckgd", weights, v_WMKD))


def merge(parts: list[Part]) -> Tensor:
    """The softmax over the keys of all parts."""
    peak, total, out = (torch.stack(x) for x in zip(*parts, strict=True))
    weight = torch.exp(peak - peak.amax(0))
    return (out * weight[..., None]).sum(0) / (total * weight).sum(0)[..., None]
