"""Layouts that forget, simulated: float64, one token at a time, lists instead of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle import as_float64, head_norm, mlp, norm, rotate, rotations

from octavo.models.interface import ModelSpec


@dataclass
class Entry:
    """A token that a kv head still has: key before rope."""

    position: int
    k: np.ndarray
    v: np.ndarray
    weight: float = 0.0


@dataclass
class Rule:
    """What a head forgets before and after a token at `position` of a prompt of so many tokens; and who is counted."""

    before: Callable[[list[Entry], int, int], list[Entry]] = lambda held, position, prompt: held
    after: Callable[[list[Entry], int, int], list[Entry]] = lambda held, position, prompt: held
    counts: Callable[[int, int], bool] = lambda position, prompt: False
    places: bool = False  # positions are those within the cache


def everything() -> Rule:
    return Rule()


def streaming(window: int, sinks: int) -> Rule:
    """The new token is one of the window: before it comes, one place less is kept."""

    def before(held: list[Entry], position: int, prompt: int) -> list[Entry]:
        return [e for e in held if e.position < sinks or e.position > position - window]

    return Rule(before=before, places=True)


def h2o(budget: int, recent: int, section: int | None) -> Rule:
    def keep(held: list[Entry], size: int, position: int) -> list[Entry]:
        """The last `recent` up to `position`, and the heaviest others."""
        late = [e for e in held if e.position > position - recent]
        others = sorted((e for e in held if e.position <= position - recent), key=lambda e: -e.weight)
        return late + others[: max(0, size - len(late))]

    def before(held: list[Entry], position: int, prompt: int) -> list[Entry]:
        full = position >= prompt and len(held) == budget
        return keep(held, budget - 1, position) if full else held

    def after(held: list[Entry], position: int, prompt: int) -> list[Entry]:
        if position + 1 == prompt:
            return keep(held, budget, position) if len(held) > budget else held
        ends = section is not None and position + 1 < prompt and (position + 1) % section == 0
        return keep(held, budget - section, position) if ends and len(held) > budget - section else held

    return Rule(before, after, lambda position, prompt: True)


def snapkv(budget: int, recent: int, pool: int) -> Rule:
    def after(held: list[Entry], position: int, prompt: int) -> list[Entry]:
        if position + 1 != prompt or prompt <= budget:
            return held
        assert [e.position for e in held] == list(range(prompt))
        early = np.array([e.weight for e in held[: prompt - recent]])
        pooled = [early[max(0, i - pool // 2) : i + pool // 2 + 1].sum() for i in range(len(early))]
        kept = sorted(np.argsort(-np.array(pooled), kind="stable")[: budget - recent].tolist())
        return [held[i] for i in kept] + held[prompt - recent :]

    return Rule(after=after, counts=lambda position, prompt: prompt - recent <= position < prompt)


@dataclass
class Simulation:
    """One sequence. `most` is the greatest number of tokens that a head has had."""

    model: ModelSpec
    weights: dict[str, Any]
    rule: Rule
    prompt: int
    heads: list[list[list[Entry]]] = field(default_factory=list)
    length: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.weights = as_float64(self.weights)
        c = self.model.config
        self.heads = [[[] for _ in range(c.num_kv_heads)] for _ in self.weights["layers"]]

    def step(self, token: int) -> np.ndarray:
        """The logits behind one more token."""
        c, w = self.model.config, self.weights
        x = w["embed"][token]
        windows = c.windows or (None,) * c.num_layers
        for n, (layer, window) in enumerate(zip(w["layers"], windows, strict=True)):
            x = x + self._attention(n, layer, norm(x, layer["attn_norm"], c.norm_eps), window)
            x = x + mlp(layer, norm(x, layer["mlp_norm"], c.norm_eps)[None])[0]
        self.length += 1
        return norm(x, w["final_norm"], c.norm_eps) @ w.get("unembed", w["embed"]).T

    def _attention(self, n: int, w: dict, x: np.ndarray, window: int | None) -> np.ndarray:
        c, out, at = self.model.config, np.zeros_like(x), self.length
        rule = self.rule if window is None else Rule(lambda h, p, _: [e for e in h if e.position > p - window])
        group_size = c.num_heads // c.num_kv_heads
        for head in range(c.num_kv_heads):
            qkv = np.einsum("e,exd->xd", x, w["qkv"][:, head])
            held = rule.before(self.heads[n][head], at, self.prompt)
            held = [*held, Entry(at, head_norm(c, w, "k_norm", qkv[group_size]), qkv[group_size + 1])]
            self.most = max(self.most, len(held)) if window is None else self.most
            held.sort(key=lambda e: e.position)
            places = list(range(len(held))) if rule.places else [e.position for e in held]
            k, v = turned(c, np.stack([e.k for e in held]), places), np.stack([e.v for e in held])
            for group in range(group_size):
                q = turned(c, head_norm(c, w, "q_norm", qkv[group])[None], places[-1:])[0]
                scores = k @ q / math.sqrt(c.head_dim)
                weight = np.exp(scores - scores.max())
                weight /= weight.sum()
                out += weight @ v @ w["out"][head, group]
                if rule.counts(at, self.prompt):
                    for e, share in zip(held, weight, strict=True):
                        e.weight += float(share)
            self.heads[n][head] = rule.after(held, at, self.prompt)
        return out


def turned(c: Any, x: np.ndarray, places: list[int]) -> np.ndarray:
    """Rows of x rotated, each by its place."""
    cos, sin = rotations(c, max(places) + 1)
    return rotate(x, cos[places], sin[places])


def greedy(
    model: ModelSpec, weights: dict[str, Any], rule: Rule, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float], int]:
    """The tokens that argmax picks, their logprobs, and the most tokens that a head had at a time."""
    simulation = Simulation(model, weights, rule, len(prompt))
    logits = [simulation.step(t) for t in prompt][-1]
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        tokens.append(int(np.argmax(logits)))
        logprobs.append(float(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()))
        if len(tokens) == num_tokens:
            return tokens, logprobs, simulation.most
        logits = simulation.step(tokens[-1])
