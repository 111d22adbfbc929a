"""A model changed so that it splits over so many devices, at some cost in memory, without any other output.

With fewer kv heads than devices, each is stored on several of them, which share out its query heads. A vocabulary, or a
number of experts, that does not divide is padded with zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .interface import Array, ArraySpec, Fuse, ModelSpec, Part, map_tree

# axes that may be longer than what a checkpoint fills
PADDED = ("vocab", "experts")


def fit(model: ModelSpec, divisors: Mapping[str, int], round_robin: bool = False) -> ModelSpec:
    """The model for so many devices a logical axis. What does not divide even so is left for others to refuse.

    With `round_robin`, expert i lies on device i % n instead of beside its neighbours.
    """
    copies = kv_copies(model, divisors.get("kv_heads", 1))
    if copies > 1:
        model = with_kv_copies(model, copies)
    if model.vocab_size % divisors.get("vocab", 1):
        cut = partial(cut_unembed, unembed=model.unembed, size=model.vocab_size)
        model = replace(padded(model, "vocab", divisors["vocab"]), unembed=cut)
    n = divisors.get("experts", 1)
    if model.mixture is not None and n > 1:
        model = placed(padded(model, "experts", n), n if round_robin else 1)
    return model


def cut_unembed(w: dict, x_RE: Array, ops: Any, *, unembed: Callable[..., Array], size: int) -> Array:
    """unembed without the padding of the vocabulary."""
    return ops.trim(unembed(w, x_RE, ops), "vocab", size)


def kv_copies(model: ModelSpec, num_devices: int) -> int:
    """On how many devices each kv head must lie; 1 too where that does not divide its query heads."""
    copies = {num_devices // math.gcd(a.num_kv_heads, num_devices) for a in model.attention}
    divides = all(a.group_size % n == 0 for a in model.attention for n in copies)
    return copies.pop() if len(copies) == 1 and divides else 1


def with_kv_copies(model: ModelSpec, copies: int) -> ModelSpec:
    """The model with each kv head `copies` times, each with a part of its query heads."""
    sizes = dict(model.pattern_sizes)
    heads, group = sizes["k"], sizes["g"]
    sizes |= {"k": heads * copies, "g": group // copies, "h": heads, "r": copies}

    def source(spec: ArraySpec, source: Any) -> Any:
        if "kv_heads" not in spec.axes:
            return source
        return replace(source, parts=tuple(p if "g" in letters(p) else repeated(p) for p in source.parts))

    def shape(spec: ArraySpec, source: Any) -> ArraySpec:
        if "kv_heads" not in spec.axes:
            return spec
        new = [heads * copies if axis == "kv_heads" else n for n, axis in zip(spec.shape, spec.axes, strict=True)]
        for i, n in enumerate(new):
            # what has a g there has fewer of them
            lost = sum(letters(part)[i] == "g" for part in source.parts) * (group - group // copies)
            new[i] = n - lost
        return replace(spec, shape=tuple(new))

    attention = (
        replace(a, num_kv_heads=a.num_kv_heads * copies, group_size=a.group_size // copies) for a in model.attention
    )
    return replace(
        model,
        weights=map_tree(shape, model.weights, model.checkpoint),
        checkpoint=map_tree(source, model.weights, model.checkpoint),
        pattern_sizes=sizes,
        attention=tuple(attention),
    )


def letters(part: Part) -> list[str]:
    """The axes that a part's pattern makes, in order."""
    return part.pattern.split("->")[1].split()


def repeated(part: Part) -> Part:
    """The part with each of its k heads r times."""
    left, right = part.pattern.split("->")
    return replace(part, pattern=re.sub(r"\bk\b", "h", left) + "->" + re.sub(r"\bk\b", "(h r)", right))


def padded(model: ModelSpec, axis: str, num_devices: int) -> ModelSpec:
    """The model with that axis as long as divides."""

    def longer(spec: ArraySpec) -> ArraySpec:
        shape = (
            -(-n // num_devices) * num_devices if name == axis else n
            for n, name in zip(spec.shape, spec.axes, strict=True)
        )
        return replace(spec, shape=tuple(shape))

    return replace(model, weights=map_tree(longer, model.weights))


def placed(model: ModelSpec, num_devices: int) -> ModelSpec:
    """The model whose experts, padded ones among them (None), lie in the order in which `deal` deals them."""

    def source(spec: ArraySpec, source: Any) -> Any:
        if "experts" not in spec.axes:
            return source
        places = deal(spec.shape[spec.axes.index("experts")], num_devices)
        parts = source.parts
        return Fuse(tuple(parts[i] if i < len(parts) else None for i in places), source.axis)

    return replace(model, checkpoint=map_tree(source, model.weights, model.checkpoint))


def deal(num_experts: int, num_devices: int) -> list[int]:
    """Which expert lies at each place, where devices get one after the other in turn."""
    return [i for first in range(num_devices) for i in range(first, num_experts, num_devices)]
