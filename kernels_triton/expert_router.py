"""Which experts a token goes through, in Triton: from logits, or for few tokens from hidden rows in one launch.

Letters: X experts, C chosen ones of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .arrivals import counters, is_last
from .early import early, take_turn
from .sizes import cdiv, next_power_of_2

Tensor = torch.Tensor

FEW_TOKENS = 16  # whose norm, logits and choice are one launch
MOST_EXPERTS = 256  # whose ranks are found by comparing all with all
TILE = 8192  # numbers of a router's weight that a program holds


@triton.jit
def scores_of(logit, bias, x, X: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr):
    """(score, choice): what makes weights, and what is compared: logits, where scores would be in the same order.

    Places from X on are never chosen.
    """
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    choice = logit
    if BIASED:
        choice = score + tl.load(bias + x, mask=x < X, other=0.0)
    return score, tl.where(x < X, choice, -float("inf"))


@triton.jit
def route_kernel(
    logits, bias, real, weights, ids, scale, logits_t,
    X: tl.constexpr, XP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Scores, the C best experts, the weights of these. A program a token."""
    take_turn(EARLY)
    t, x, c = tl.program_id(0).to(tl.int64), tl.arange(0, XP), tl.arange(0, CP)
    logit = tl.load(logits + t * logits_t + x, mask=x < X, other=-float("inf")).to(tl.float32)
    score, choice = scores_of(logit, bias, x, X, SIGMOID, BIASED)
    weight, chosen = tl.zeros((CP,), tl.float32), tl.zeros((CP,), tl.int32)
    for i in tl.static_range(C):
        best = tl.min(tl.where(choice == tl.max(choice, 0), x, XP), 0)
        weight = tl.where(c == i, tl.sum(tl.where(x == best, score, 0.0), 0), weight)
        chosen = tl.where(c == i, best, chosen)
        choice = tl.where(x == best, -float("inf"), choice)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + t * C + c, weight * scale, mask=c < C)
    tl.store(ids + t * C + c, tl.where(tl.load(real + t), chosen, X), mask=c < C)


@triton.jit
def choose_kernel(
    x, norm, w, bias, real, h, logits, weights, ids, turns, eps, scale, x_t,
    X: tl.constexpr, XP: tl.constexpr, XB: tl.constexpr, C: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h = norm(x) of a token, its logits h w, and of these the choice. Program (XB experts, token).

    The last program of a token to arrive makes the choice: each expert's rank is how many others are better. `turns`
    are zeros, and are left so.
    """
    t, e = tl.program_id(1).to(tl.int64), tl.arange(0, EP)
    mine, here = tl.program_id(0) * XB + tl.arange(0, XB), e < E
    # before its turn: nobody writes weights
    part = tl.load(w + mine[:, None] * E + e[None, :], mask=(mine < X)[:, None] & here[None, :], other=0.0)
    take_turn(EARLY)
    v = tl.load(x + t * x_t + e, mask=here, other=0.0).to(tl.float32)
    if NORM:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / E + eps) * tl.load(norm + e, mask=here, other=0.0).to(tl.float32)
        rounded = v.to(h.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(h + t * E + e, rounded, mask=here)
        v = rounded.to(tl.float32)
    logit = tl.sum(part.to(tl.float32) * v[None, :], 1)
    tl.store(logits + t * X + mine, logit.to(logits.dtype.element_ty), mask=mine < X)
    if is_last(turns + t, tl.num_programs(0)):
        i = tl.arange(0, XP)
        all = tl.load(logits + t * X + i, mask=i < X, other=-float("inf"), cache_modifier=".cg").to(tl.float32)
        score, choice = scores_of(all, bias, i, X, SIGMOID, BIASED)
        # a logit that is no number has a rank too
        choice = tl.where(choice == choice, choice, -float("inf"))
        # summed along the first axis, which threads hold
        equal, first = choice[:, None] == choice[None, :], i[:, None] < i[None, :]
        better = (choice[:, None] > choice[None, :]) | (equal & first)
        rank = tl.sum(better.to(tl.int32), 0)
        if NORMALISE:
            score = score / (tl.sum(tl.where(rank < C, score, 0.0), 0) + 1e-20)
        tl.store(weights + t * C + rank, score * scale, mask=rank < C)
        tl.store(ids + t * C + rank, tl.where(tl.load(real + t), i, X), mask=rank < C)


def routes(routing: Any) -> bool:
    """Whether kernels know the routing: groups they do not."""
    return routing.num_groups == routing.num_top_groups


def flags_of(routing: Any, bias_X: Tensor | None) -> dict[str, bool]:
    return {
        "SIGMOID": routing.scoring == "sigmoid", "NORMALISE": routing.normalise, "BIASED": bias_X is not None,
    }  # fmt: skip


def route(logits_TX: Tensor, routing: Any, bias_X: Tensor | None, real_T: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [T, C], float32; experts [T, C], int32, X for padding). Reference: models/moe.py."""
    num_tokens, num_experts = logits_TX.shape
    chosen, device = routing.num_chosen, logits_TX.device
    weights_TC = torch.empty((num_tokens, chosen), dtype=torch.float32, device=device)
    ids_TC = torch.empty((num_tokens, chosen), dtype=torch.int32, device=device)
    route_kernel[(num_tokens,)](
        logits_TX, logits_TX if bias_X is None else bias_X, real_T, weights_TC, ids_TC, routing.scale,
        logits_TX.stride(0), X=num_experts, XP=next_power_of_2(num_experts), C=chosen,
        CP=next_power_of_2(chosen), **flags_of(routing, bias_X), **early(device, num_tokens), num_warps=1,
    )  # fmt: skip
    return weights_TC, ids_TC


def chooses(x_TE: Tensor, router_XE: Any, routing: Any) -> bool:
    """Whether `choose` is for these: few tokens, and a row of the weight that a program can hold."""
    return (
        len(x_TE) <= FEW_TOKENS
        and routes(routing)
        and isinstance(router_XE, Tensor)
        and router_XE.is_contiguous()
        and len(router_XE) <= MOST_EXPERTS
        and x_TE.shape[1] <= TILE
        and x_TE.stride(1) == 1
    )


def choose(
    x_TE: Tensor, norm: tuple[Tensor, float] | None, router_XE: Tensor, routing: Any, bias_X: Tensor | None,
    real_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(x's norm, weights [T, C], experts [T, C]), as `route` has these. Reference: models/moe.py."""
    (num_tokens, embed_dim), num_experts, device = x_TE.shape, len(router_XE), x_TE.device
    chosen, padded = routing.num_chosen, next_power_of_2(embed_dim)
    h_TE = torch.empty((num_tokens, embed_dim), dtype=x_TE.dtype, device=device) if norm else x_TE
    logits_dtype = torch.float32 if routing.float32 else x_TE.dtype
    logits_TX = torch.empty((num_tokens, num_experts), dtype=logits_dtype, device=device)
    weights_TC = torch.empty((num_tokens, chosen), dtype=torch.float32, device=device)
    ids_TC = torch.empty((num_tokens, chosen), dtype=torch.int32, device=device)
    each = max(1, min(TILE // padded, next_power_of_2(num_experts)))
    tiles = cdiv(num_experts, each)
    scale, eps = norm or (x_TE, 0.0)
    choose_kernel[(tiles, num_tokens)](
        x_TE, scale, router_XE, logits_TX if bias_X is None else bias_X, real_T, h_TE, logits_TX, weights_TC, ids_TC,
        counters(device), eps, routing.scale, x_TE.stride(0),
        X=num_experts, XP=next_power_of_2(num_experts), XB=each, C=chosen, E=embed_dim, EP=padded,
        NORM=norm is not None, **flags_of(routing, bias_X), **early(device, tiles * num_tokens),
    )  # fmt: skip
    return h_TE, weights_TC, ids_TC
