"""Mixtures of experts in torch: each expert's MLP on the tokens that chose it, summed by weight.

Experts are this shard's: a token's expert that is none of them is `num_experts`, and adds nothing here.
Letters: X experts, C chosen ones of a token.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F

if find_spec("triton"):
    from . import expert_kernels as kernels
else:
    kernels = None

Tensor = torch.Tensor


def reference(x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_XEXF: Tensor, down_XFE: Tensor) -> Tensor:
    """Every expert on every token, in float32: what kernels are held to."""
    y_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    for i, (gate_up_EXF, down_FE) in enumerate(zip(gate_up_XEXF.float(), down_XFE.float(), strict=True)):
        both_TXF = torch.einsum("te,exf->txf", x_TE.float(), gate_up_EXF)
        share_T1 = torch.where(ids_TC == i, weights_TC, 0).sum(1, keepdim=True)
        y_TE += share_T1 * ((F.silu(both_TXF[:, 0]) * both_TXF[:, 1]) @ down_FE)
    return y_TE


def by_expert(x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_XEXF: Tensor, down_XFE: Tensor) -> Tensor:
    """A loop over the experts that some token chose. The host reads how many did: a CPU's way."""
    num_experts, embed_dim, _, size = gate_up_XEXF.shape
    chosen, ids_P = ids_TC.shape[1], ids_TC.reshape(-1).long()
    order_P = torch.argsort(ids_P, stable=True)
    weights_P1 = weights_TC.reshape(-1)[order_P][:, None]
    tokens_P = order_P // chosen
    sorted_PE = x_TE.index_select(0, tokens_P).to(gate_up_XEXF.dtype)
    y_TE, start = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device), 0
    for i, count in enumerate(torch.bincount(ids_P, minlength=num_experts + 1)[:num_experts].tolist()):
        if count:
            rows = slice(start, start + count)
            both_MF = sorted_PE[rows] @ gate_up_XEXF[i].view(embed_dim, 2 * size)
            act_MF = F.silu(both_MF[:, :size].float()).mul_(both_MF[:, size:])
            y_ME = (act_MF.to(down_XFE.dtype) @ down_XFE[i]).float()
            y_TE.index_add_(0, tokens_P[rows], y_ME.mul_(weights_P1[rows]))
            start += count
    return y_TE


def experts(
    x_TE: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_XEXF: Tensor,
    down_XFE: Tensor,
    add_TE: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, E] of `dtype`: the weighted sum of each token's experts that are here, and `add_TE`."""
    if kernels and x_TE.is_cuda:
        return kernels.experts(x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE, add_TE, dtype)
    y_TE = by_expert(x_TE, weights_TC, ids_TC, gate_up_XEXF, down_XFE)
    return (y_TE if add_TE is None else y_TE.add_(add_TE)).to(dtype)
