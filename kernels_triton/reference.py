"""Attention the obvious way: cut the ragged queries into tiles of one sequence each, and give each tile its keys.

Letters beyond models/interface.py: W tiles, Q queries of a tile, M keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange

Tensor = torch.Tensor

QUERIES = 16  # of a tile
MEMORY = 1 << 23  # elements of gathered keys at a time
HIDDEN = -1e30  # score of a key that is not seen: finite, so that a query which sees none stays a number


@dataclass(frozen=True)
class Tiles:
    """A step's queries, cut: the sequence and first token of every tile, and each token's tile and place in it."""

    seq_W: Tensor
    start_W: Tensor
    tile_T: Tensor
    place_T: Tensor
    queries: int


def plan(step: Any, spec: Any, block_size: int) -> Tiles:
    """Tiles of at most QUERIES tokens (decode: 1) of one sequence; their number follows from shapes alone."""
    starts, seq_T = step.query_starts_S1, step.seq_ids_T
    num_seqs, num_tokens, device = starts.shape[0] - 1, seq_T.shape[0], starts.device
    queries = 1 if step.decode else QUERIES
    ends_S = torch.cumsum(-(-(starts[1:] - starts[:-1]) // queries), 0)
    first_S = torch.cat([ends_S.new_zeros(1), ends_S[:-1]])
    tile_W = torch.arange(num_seqs if step.decode else -(-num_tokens // queries) + num_seqs, device=device)
    seq_W = torch.searchsorted(ends_S, tile_W, right=True).clamp_max(num_seqs - 1)
    start_W = starts[seq_W] + (tile_W - first_S[seq_W]) * queries
    within_T = torch.arange(num_tokens, device=device) - starts[seq_T]
    # a padding token belongs to no tile: any place will do
    tile_T = (first_S[seq_T] + within_T // queries).clamp_max(len(tile_W) - 1)
    return Tiles(seq_W, start_W, tile_T, within_T % queries, queries)


def keys_of(x: Tensor, scale: Tensor | None, order: str, table_SB: Tensor) -> Tensor:
    """The keys, or values, of block tables [..., B] as fp32 [..., M, K, D]; of a quantised cache times its scales.

    `order` is that of x, and of `scale` without d.
    """
    found = rearrange(x[table_SB], f"... {order} -> ... (n p) k d").float()
    return found if scale is None else found * rearrange(scale[table_SB], f"... {order[:-2]} -> ... (n p) k 1")


def masked_scores(scores: Tensor, visible: Tensor, softcap: float | None) -> Tensor:
    """Scores after softcap (Gemma 2, arXiv 2408.00118 section 2), invisible keys far below all others."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.where(visible, scores, HIDDEN)


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
    """softmax(mask(cap(scale q k))) v, fp32 inside. What is masked may hold anything, NaN too.

    `scales`: of k and of v, in their order without d; what lies in the cache is times them.
    """

    def some_tiles(seq_W: Tensor, start_W: Tensor) -> Tensor:
        table_WB = step.block_tables_SB[seq_W]
        k_WMKD, v_WMKD = (keys_of(x, scale, order, table_WB) for x, scale in zip((k, v), scales or (None, None)))
        token_WQ = start_W[:, None] + torch.arange(tiles.queries, device=q_TKGD.device)
        own_WQ = token_WQ < step.query_starts_S1[1:][seq_W][:, None]
        token_WQ = token_WQ.clamp_max(len(q_TKGD) - 1)
        keys_M = torch.arange(k_WMKD.shape[1], device=q_TKGD.device)
        behind_WQM = step.positions_T[token_WQ][..., None] - keys_M
        visible_WQM = (behind_WQM >= 0) & (behind_WQM < (spec.window or 1 << 30)) & own_WQ[..., None]
        scores = torch.einsum("wqkgd,wmkd->wkgqm", q_TKGD[token_WQ].float(), k_WMKD) * spec.scale
        probs = softmax(masked_scores(scores, visible_WQM[:, None, None], spec.softcap), sinks_KG)
        seen_WM11 = visible_WQM.any(1)[..., None, None]
        return torch.einsum("wkgqm,wmkd->wqkgd", probs, torch.where(seen_WM11, v_WMKD, 0.0))

    keys = step.block_tables_SB.shape[1] * k[0].numel()
    at_once = max(1, min(len(tiles.seq_W), MEMORY // keys))
    pieces = zip(tiles.seq_W.split(at_once), tiles.start_W.split(at_once), strict=True)
    out = torch.cat([some_tiles(seq_W, start_W) for seq_W, start_W in pieces])
    return out[tiles.tile_T, tiles.place_T].to(q_TKGD.dtype)


def softmax(scores: Tensor, sinks_KG: Tensor | None) -> Tensor:
    """Over the last axis; a sink is one more score of its head, which attends to nothing."""
    if sinks_KG is None:
        return torch.softmax(scores, -1)
    sink = sinks_KG.float()[:, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
