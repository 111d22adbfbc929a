"""The whole sampler for one token of one request, in float64 numpy and plain loops: semantics 3.2 and 3.3 as written.

It knows nothing of rows, batches, padding or packed bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GOLDEN, WORD = 0x9E3779B9, 0xFFFFFFFF


@dataclass(frozen=True)
class Asked:
    """What a request asks of its tokens, in ids."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    grammar: frozenset[int] | None = None
    processors: tuple[Callable[[np.ndarray, list[int], list[int]], np.ndarray], ...] = ()  # (logits, prompt, output)


def shaped(logits: np.ndarray, asked: Asked, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The logits as all that comes before the temperature leaves them."""
    x = np.array(logits, np.float64)
    prompt, output = list(prompt), list(output)
    if asked.grammar is not None:
        for i in range(len(x)):
            if i not in asked.grammar:
                x[i] = -math.inf
    if asked.allowed:
        _forbid(x, set(range(len(x))) - set(asked.allowed))
    _forbid(x, {word[-1] for word in asked.bad_words if _ends_with(output, word[:-1])})
    for i, value in asked.bias.items():
        x[i] += value
    if len(output) < asked.min_tokens:
        _forbid(x, set(asked.stop_ids))
    # an id below 0 stands for a prompt embedding
    for i in {i for i in prompt if i >= 0} | set(output):
        x[i] = x[i] / asked.repetition_penalty if x[i] > 0 else x[i] * asked.repetition_penalty
    for i in set(output):
        x[i] -= asked.frequency_penalty * output.count(i) + asked.presence_penalty
    for processor in asked.processors:
        x = processor(x, prompt, output)
    return x


def _ends_with(output: list[int], tail: Sequence[int]) -> bool:
    return len(tail) <= len(output) and output[len(output) - len(tail) :] == list(tail)


def _forbid(x: np.ndarray, ids: set[int]) -> None:
    """Puts ids at -inf, in place, if that leaves any other."""
    if any(x[i] > -math.inf for i in range(len(x)) if i not in ids):
        x[sorted(ids)] = -math.inf


def kept(x: np.ndarray, asked: Asked) -> np.ndarray:
    """bool: what min_p, top_k and top_p leave of logits that are through the temperature, by sorting; ties stay."""
    p = np.exp(x - x.max())
    p[p < asked.min_p] = 0
    if 0 < asked.top_k < len(p):
        p[x < np.sort(x)[::-1][asked.top_k - 1]] = 0
    if asked.top_p < 1:
        order, total, mass = np.argsort(-p, kind="stable"), p.sum(), 0.0
        edge = 0.0  # the least that is kept
        for i in order:
            if mass >= asked.top_p * total and p[i] < edge:
                p[i] = 0
            else:
                mass, edge = mass + p[i], p[i]
    return p > 0


def scaled(logits: np.ndarray, asked: Asked, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Logits over temperature, -inf where truncation leaves none: what a token is drawn from."""
    x = shaped(logits, asked, prompt, output) / asked.temperature
    return np.where(kept(x, asked), x, -math.inf)


def probabilities(logits: np.ndarray, asked: Asked, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The distribution of the next token."""
    if not asked.temperature:
        return np.eye(len(logits))[shaped(logits, asked, prompt, output).argmax()]
    x = scaled(logits, asked, prompt, output)
    p = np.exp(x - x.max())
    return p / p.sum()


def token(
    logits: np.ndarray, asked: Asked, prompt: Sequence[int], output: Sequence[int], seed: int = 0
) -> tuple[int, float]:
    """The next token of a request with that seed, and by how much it is ahead of the second."""
    if asked.temperature:
        x = scaled(logits, asked, prompt, output) + gumbel(seed, len(output), len(logits))
    else:
        x = shaped(logits, asked, prompt, output)
    best = int(x.argmax())
    others = np.delete(x, best)
    return best, float(x[best] - others.max()) if len(others) else math.inf


def gumbel(seed: int, index: int, size: int) -> np.ndarray:
    """The noise of the index-th output token: murmur3 of the seed's key, the index and the token id."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    k0 = _murmur(first ^ index * GOLDEN & WORD)
    k1 = _murmur(second ^ k0)
    words = [_murmur(_murmur(i * GOLDEN & WORD ^ k0) ^ k1) for i in range(size)]
    # as float32 knows these numbers: near 1 it matters
    u = (np.array(words, np.uint32).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log(-np.log1p(-np.minimum(u, np.float32(1 - 2**-24)).astype(np.float64)))


def _murmur(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def asked_of(params: Any, **ids: Any) -> Asked:
    """What SamplingParams (of any object with such fields) ask; what they say in words comes in ids: bad_words, ..."""
    numbers = ("temperature", "top_k", "top_p", "min_p", "min_tokens")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    known = {name: getattr(params, name) for name in numbers + penalties}
    known |= {"allowed": params.allowed_token_ids or (), "bias": params.logit_bias or {}}
    return Asked(**(known | {"stop_ids": tuple(params.stop_token_ids)} | ids))
