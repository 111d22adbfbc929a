"""Mixtures of experts (arXiv:2101.03961): for some layers, a router and experts in the place of the MLP.

Letters: X experts, C chosen ones of a token, N groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from . import llama
from .interface import Array, ArraySpec, Fuse, Mixture, ModelSpec, Routing, Step
from .layers import HIDDEN, WHOLE, Weight, fuse, split


def route(logits_TX: Array, routing: Routing, bias_X: Array | None, real_T: Array, ops: Any) -> tuple[Array, Array]:
    """(weights [T, C], float32; experts [T, C]) of each token, the best expert first; experts X for padding.

    `bias_X` helps an expert to be chosen and does not enter its weight (DeepSeek-V3, arXiv:2412.19437, 2.1.2).
    """
    xp = ops.xp
    logits_TX = xp.astype(logits_TX, xp.float32)
    if routing.scoring == "sigmoid":
        scores_TX = 1 / (1 + xp.exp(-logits_TX))
    else:
        shifted_TX = xp.exp(logits_TX - xp.max(logits_TX, axis=-1, keepdims=True))
        scores_TX = shifted_TX / xp.sum(shifted_TX, axis=-1, keepdims=True)
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if routing.num_top_groups < routing.num_groups:
        choice_TX = of_best_groups(choice_TX, routing, ops)
    _, ids_TC = ops.top_k(choice_TX, routing.num_chosen)
    weights_TC = scores_TX[ops.arange(ids_TC.shape[0], like=ids_TC)[:, None], ids_TC]
    if routing.normalise:
        weights_TC = weights_TC / (xp.sum(weights_TC, axis=-1, keepdims=True) + 1e-20)
    return weights_TC * routing.scale, xp.where(real_T[:, None], ids_TC, logits_TX.shape[-1])


def choose(
    x_TE: Array, norm: tuple[Array, float] | None, router_XE: Array, routing: Routing, bias_X: Array | None,
    real_T: Array, ops: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The norm of x, of all tokens, and what `route` makes of it."""
    xp = ops.xp
    h_TE = ops.constrain(ops.rms_norm(x_TE, *norm), HIDDEN, WHOLE) if norm else x_TE
    rows_TE = xp.astype(h_TE, xp.float32) if routing.float32 else h_TE
    logits_TX = ops.einsum("te,xe->tx", rows_TE, router_XE, out=(None, None))
    return h_TE, *ops.route(route, logits_TX, routing, bias_X, real_T)


def of_best_groups(choice_TX: Array, routing: Routing, ops: Any) -> Array:
    """The scores of the experts in each token's best groups; -inf elsewhere (DeepSeek-V2, arXiv:2405.04434, 2.2.2)."""
    choice_TNX = choice_TX.reshape(choice_TX.shape[0], routing.num_groups, -1)
    best_TN = ops.xp.sum(ops.top_k(choice_TNX, routing.group_best)[0], axis=-1)
    _, top_TN = ops.top_k(best_TN, routing.num_top_groups)
    group_N = ops.arange(routing.num_groups, like=top_TN)
    chosen_TN = ops.xp.any(top_TN[:, :, None] == group_N, axis=1)
    return ops.xp.where(chosen_TN[:, :, None], choice_TNX, -float("inf")).reshape(choice_TX.shape)


def mlp(w: dict, x_TE: Array, step: Step, ops: Any, eps: float, *, routing: Routing) -> Array:
    """x_TE, and added to it what a layer's experts make of its norm; or what its MLP does, where it has no experts."""
    if "router" not in w:
        return llama.mlp(w, x_TE, step, ops, eps)
    return add_experts(w, x_TE, x_TE, (w["mlp_norm"], eps), step, ops, routing)


def add_experts(
    w: dict, x_TE: Array, rows_TE: Array, norm: tuple[Array, float] | None, step: Step, ops: Any, routing: Routing
) -> Array:
    """x_TE plus the weighted sum of the experts of the norm (scale, eps) of rows_TE. Padding goes to no expert."""
    real_T, bias_X = step.is_real_T, w.get("router_bias")
    h_TE, weights_TC, ids_TC = ops.router(choose, rows_TE, norm, w["router"], routing, bias_X, real_T)
    x_TE = ops.moe(h_TE, weights_TC, ids_TC, w["experts_gate_up"], w["experts_down"], add=x_TE)
    return add_shared(w, x_TE, h_TE, ops) if "shared_gate_up" in w else x_TE


def add_shared(w: dict, x_TE: Array, h_TE: Array, ops: Any) -> Array:
    """x_TE plus the expert that every token goes through, behind its gate if it has one."""
    h_TF = ops.einsum("te,exf->txf", h_TE, w["shared_gate_up"], out=(None, None, "mlp"), gate=True)
    down: dict[str, Any] = {"out": HIDDEN, "reduce": "mlp"}
    if "shared_gate" not in w:
        return ops.einsum("tf,fe->te", h_TF, w["shared_down"], **down, add=x_TE)
    y_TE = ops.einsum("tf,fe->te", h_TF, w["shared_down"], **down)
    gate_T1 = ops.constrain(ops.einsum("te,xe->tx", h_TE, w["shared_gate"], out=WHOLE), WHOLE, HIDDEN)
    gate_T1 = ops.xp.astype(gate_T1, ops.xp.float32)
    return x_TE + ops.xp.astype(y_TE / (1 + ops.xp.exp(-gate_T1)), y_TE.dtype)


def with_experts(model: ModelSpec, name: str, mixture: Mixture) -> ModelSpec:
    """A model of the Llama family with experts in the layers that the mixture names. ValueError if it lacks one."""
    if (last := max(mixture.layers)) >= (count := len(model.attention)):
        raise ValueError(f"layer {last} of the mixture: the model has {count} layers, 0 to {count - 1}")
    embed_dim = model.weights["embed"].shape[1]
    weights, names = list(model.weights["layers"]), list(model.checkpoint["layers"])
    for n in mixture.layers:
        specs, sources = split(weights_of(embed_dim, mixture, f"model.layers.{n}.mlp."))
        weights[n] = {k: v for k, v in weights[n].items() if k not in DENSE} | specs
        names[n] = {k: v for k, v in names[n].items() if k not in DENSE} | sources
    return replace(
        model,
        name=name,
        weights=model.weights | {"layers": weights},
        checkpoint=model.checkpoint | {"layers": names},
        layer=partial(model.layer, mlp=partial(mlp, routing=mixture.routing)),
        mixture=mixture,
    )


DENSE = ("gate_up", "gate_up_bias", "down", "down_bias")


def weights_of(e: int, mixture: Mixture, at: str) -> dict[str, Weight]:
    """The router and the experts of one layer. Older checkpoints' names: `loading/experts.py` translates."""
    x, f, shared_dim = mixture.num_experts, mixture.expert_dim, mixture.shared_dim
    experts = [f"{at}experts.{i}." for i in range(x)]
    dtype = "float32" if mixture.routing.float32 else None
    tree = {
        "router": Weight(
            ArraySpec((x, e), (None, None), dtype, product="te,xe->tx"), fuse(0, (f"{at}gate.weight", "x e -> x e"))
        ),
        "experts_gate_up": Weight(
            ArraySpec((x, e, 2, f), ("experts", None, None, "expert_mlp")),
            Fuse(tuple(gate_up(name, "f e -> 1 e 1 f", 2) for name in experts)),
        ),
        "experts_down": Weight(
            ArraySpec((x, f, e), ("experts", "expert_mlp", None)),
            Fuse(tuple(fuse(0, (f"{name}down_proj.weight", "e f -> 1 f e")) for name in experts)),
        ),
    }
    if mixture.routing.scoring == "sigmoid":
        bias = fuse(0, (f"{at}gate.e_score_correction_bias", "x -> x"))
        tree["router_bias"] = Weight(ArraySpec((x,), (None,), "float32"), bias)
    if shared_dim:
        name = f"{at}shared_expert." if mixture.shared_gate else f"{at}shared_experts."
        tree["shared_gate_up"] = Weight(
            ArraySpec((e, 2, shared_dim), (None, None, "mlp"), product="te,exf->txf"), gate_up(name, "f e -> e 1 f", 1)
        )
        tree["shared_down"] = Weight(
            ArraySpec((shared_dim, e), ("mlp", None), product="tf,fe->te"),
            fuse(0, (f"{name}down_proj.weight", "e f -> f e")),
        )
    if mixture.shared_gate:
        gate = fuse(0, (f"{at}shared_expert_gate.weight", "x e -> x e"))
        tree["shared_gate"] = Weight(ArraySpec((1, e), (None, None), product="te,xe->tx"), gate)
    return tree


def gate_up(name: str, pattern: str, axis: int) -> Fuse:
    return fuse(axis, (f"{name}gate_proj.weight", pattern), (f"{name}up_proj.weight", pattern))


def mixture_from_hf(hf: Mapping[str, Any], expert_dim: str, layers: tuple[int, ...], **routing: Any) -> Mixture:
    """The mixture of a config.json of transformers, of which `expert_dim` names an expert's size."""
    experts = "num_local_experts" if hf.get("num_experts") is None else "num_experts"
    for name in (experts, "num_experts_per_tok", expert_dim):
        if not isinstance(hf.get(name), int) or hf[name] < 1:
            raise ValueError(f"the model's config has {name} {hf.get(name)!r}: it must be a whole number of at least 1")
    return Mixture(hf[experts], hf[expert_dim], layers, Routing(hf["num_experts_per_tok"], **routing))


def sparse_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Which layers of a Qwen config have experts: every `decoder_sparse_step`-th that is not in `mlp_only_layers`."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"decoder_sparse_step {step!r} must be a whole number of at least 1")
    return tuple(n for n in range(hf["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)
