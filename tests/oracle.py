"""A dense float64 transformer in numpy: no cache, no batching, nothing shared with models/ but the weights and config.

It reads what a ModelSpec of the Llama family holds: the weights tree and `config`. Frequencies are worked out here
again, from the papers and in scalars, so that a slip in models/rope.py shows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.models.interface import ArraySpec, ModelSpec, map_tree


class Host:
    """Stands for a backend where weights are loaded or drawn: they stay numpy, as the oracle reads them."""

    dtype = "float32"

    def place(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return np.asarray(x)

    place_weight = place_shard = place

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        return ()

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> np.ndarray:
        return self.place_weight(np.resize(x, spec.shape), spec)


def logits(model: ModelSpec, weights: dict[str, Any], ids: list[int]) -> np.ndarray:
    """[T, V]: the logits after each token of one sequence. `weights` are numpy arrays of any float dtype."""
    w, x = as_float64(weights), hidden(model, weights, ids)[-1]
    return norm(x, w["final_norm"], model.config.norm_eps) @ w.get("unembed", w["embed"]).T


def as_float64(weights: dict[str, Any]) -> dict[str, Any]:
    return map_tree(lambda x: np.asarray(x).astype(np.float64), weights)


def hidden(model: ModelSpec, weights: dict[str, Any], ids: list[int]) -> list[np.ndarray]:
    """[T, E] as embedded, then behind each layer; none has been through the final norm."""
    c, w = model.config, as_float64(weights)
    cos, sin = rotations(c, len(ids))
    rows = [x := w["embed"][ids]]
    for layer, window in zip(w["layers"], c.windows or (None,) * c.num_layers, strict=True):
        x = x + attention(c, layer, norm(x, layer["attn_norm"], c.norm_eps), cos, sin, window)
        h = norm(x, layer["mlp_norm"], c.norm_eps)
        x = x + (experts(model.mixture, layer, h) if "router" in layer else mlp(layer, h))
        rows.append(x)
    return rows


def greedy(model: ModelSpec, weights: dict[str, Any], prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that argmax picks after the prompt, every one from a whole new pass."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(np.argmax(logits(model, weights, ids)[-1])))
    return ids[len(prompt) :]


def attention(c: Any, w: dict, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, window: int | None) -> np.ndarray:
    """One kv head at a time, and one of its query heads at a time."""
    num_tokens, group_size = len(x), c.num_heads // c.num_kv_heads
    query, key = np.arange(num_tokens)[:, None], np.arange(num_tokens)[None]
    visible = (key <= query) & (key > query - (window or num_tokens))
    out = np.zeros_like(x)
    for head in range(c.num_kv_heads):
        qkv = np.einsum("te,exd->xtd", x, w["qkv"][:, head])
        if "qkv_bias" in w:
            qkv = qkv + w["qkv_bias"][head][:, None]
        k, v = rotate(head_norm(c, w, "k_norm", qkv[group_size]), cos, sin), qkv[group_size + 1]
        for group in range(group_size):
            q = rotate(head_norm(c, w, "q_norm", qkv[group]), cos, sin)
            scores = np.where(visible, q @ k.T / math.sqrt(c.head_dim), -np.inf)
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            out += weight / weight.sum(-1, keepdims=True) @ v @ w["out"][head, group]
    return out + w.get("out_bias", 0)


def mlp(w: dict, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ w["gate_up"][:, i] for i in (0, 1))
    if "gate_up_bias" in w:
        gate, up = gate + w["gate_up_bias"][0], up + w["gate_up_bias"][1]
    return gate / (1 + np.exp(-gate)) * up @ w["down"] + w.get("down_bias", 0)


def experts(mixture: Any, w: dict, x: np.ndarray) -> np.ndarray:
    """One token at a time, through one chosen expert at a time."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        for expert, weight in chosen(mixture.routing, w["router"] @ row, w.get("router_bias", 0)):
            one = {"gate_up": w["experts_gate_up"][expert], "down": w["experts_down"][expert]}
            out[t] += weight * mlp(one, row[None])[0]
    if mixture.shared_dim:
        gate = 1 / (1 + np.exp(-x @ w["shared_gate"].T)) if mixture.shared_gate else 1
        out += gate * mlp({"gate_up": w["shared_gate_up"], "down": w["shared_down"]}, x)
    return out


def chosen(routing: Any, logits: np.ndarray, bias: Any) -> list[tuple[int, float]]:
    """(expert, weight) of each expert that a token goes through."""
    scores = 1 / (1 + np.exp(-logits)) if routing.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    groups = (scores + bias).reshape(routing.num_groups, -1)
    goodness = [sorted(group)[-routing.group_best :] for group in groups]
    best = sorted(range(routing.num_groups), key=lambda g: -sum(goodness[g]))[: routing.num_top_groups]
    open_to_all = [g * groups.shape[1] + i for g in best for i in range(groups.shape[1])]
    found = sorted(open_to_all, key=lambda i: -(scores + bias)[i])[: routing.num_chosen]
    total = sum(scores[i] for i in found) if routing.normalise else 1
    return [(i, routing.scale * scores[i] / total) for i in found]


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * scale


def head_norm(c: Any, w: dict, name: str, x: np.ndarray) -> np.ndarray:
    return norm(x, w[name], c.norm_eps) if name in w else x


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (i, i + D/2) turned by their angles, as Hugging Face lays them out."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotations(c: Any, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, D / 2], scaled by yarn's attention factor.

    Powers of theta, frequencies and angles are float32 by definition, as checkpoints are trained: at 300 radians the
    last bit alone moves these logits by 4e-4.
    """
    frequencies = np.array([frequency(c.rope, pair, c.head_dim) for pair in range(c.head_dim // 2)], np.float32)
    angle = (np.arange(num_tokens, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angle) * c.rope.attention_factor, np.sin(angle) * c.rope.attention_factor


def plain_frequency(theta: float, pair: int, head_dim: int) -> float:
    return float(np.float32(1) / np.float32(theta ** (2 * pair / head_dim)))


def frequency(rope: Any, pair: int, head_dim: int) -> float:
    """Radians a position, of one pair of dims."""
    plain = plain_frequency(rope.theta, pair, head_dim)
    slow, trained = plain / rope.factor, rope.trained_len
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return slow
    if rope.kind == "dynamic":
        # NTK-aware, for a sequence of factor x trained tokens
        longest = trained * rope.factor
        theta = rope.theta * (rope.factor * longest / trained - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
        return plain_frequency(theta, pair, head_dim)
    if rope.kind == "llama3":
        turns = trained * plain / (2 * math.pi)
        if turns < rope.low_freq_factor:
            return slow
        if turns > rope.high_freq_factor:
            return plain
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return share * plain + (1 - share) * slow
    if rope.kind == "yarn":
        # theta^(-2 pair / D) * trained = 2 pi beta, solved for the pair
        first, last = (
            head_dim / 2 * math.log(trained / (2 * math.pi * beta), rope.theta)
            for beta in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        share = min(max((pair - first) / (last - first), 0.0), 1.0)
        return share * slow + (1 - share) * plain
    raise NotImplementedError(f"the oracle knows no rope {rope.kind!r}")
