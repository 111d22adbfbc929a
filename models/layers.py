"""What two models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .interface import Array, ArraySpec, CacheGroup, Fuse, ModelSpec, Part, map_tree

# how hidden rows lie between products, which rules may share out by tokens, and where all of them are needed
HIDDEN, WHOLE = ("tokens", None), (None, None)


@dataclass(frozen=True)
class Weight:
    """A weight: what it is here, and what it is made of in a checkpoint (or its value, for init "host")."""

    spec: ArraySpec
    source: Fuse | np.ndarray


def fuse(axis: int, *parts: tuple[str, str]) -> Fuse:
    """Checkpoint tensors, each (name, einops pattern), concatenated along an axis."""
    return Fuse(tuple(Part(name, pattern) for name, pattern in parts), axis)


def norm_scale(dim: int, name: str) -> Weight:
    return Weight(ArraySpec((dim,), (None,), init="ones"), fuse(0, (name, "a -> a")))


def host(value: np.ndarray) -> Weight:
    """A float32 array that the model itself computed."""
    return Weight(ArraySpec(value.shape, (None,) * value.ndim, "float32", "host"), value)


def split(tree: Any) -> tuple[dict, dict]:
    """A tree of Weight as the two trees that ModelSpec wants: specs and sources."""
    return map_tree(lambda w: w.spec, tree), map_tree(lambda w: w.source, tree)


def with_layer_weights(model: ModelSpec, more: Callable[[int], dict[str, Weight]]) -> ModelSpec:
    """The model with `more(n)` added to the weights of each layer n."""
    added = [split(more(n)) for n in range(len(model.attention))]
    weights = [w | specs for w, (specs, _) in zip(model.weights["layers"], added, strict=True)]
    names = [w | sources for w, (_, sources) in zip(model.checkpoint["layers"], added, strict=True)]
    return replace(model, weights=model.weights | {"layers": weights}, checkpoint=model.checkpoint | {"layers": names})


def groups_by_window(windows: tuple[int | None, ...]) -> tuple[CacheGroup, ...]:
    """Layers that forget alike share a cache group; full attention comes first."""
    kinds = sorted(set(windows), key=lambda w: (w is not None, w))
    return tuple(CacheGroup(kind, tuple(n for n, w in enumerate(windows) if w == kind)) for kind in kinds)


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer of a Qwen config: `layer_types`, or sliding from `max_window_layers` on."""
    window, num_layers = hf.get("sliding_window") if hf.get("use_sliding_window") else None, hf["num_hidden_layers"]
    first = hf.get("max_window_layers", 28) if window is not None else num_layers
    default = ["full_attention" if n < first else "sliding_attention" for n in range(num_layers)]
    kinds = hf.get("layer_types") or default
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(f"layer_types {sorted(unknown)} are not supported; full and sliding attention are")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(f"layer_types wants sliding_attention, but sliding_window is {hf.get('sliding_window')} and "
                         f"use_sliding_window {hf.get('use_sliding_window')}")  # fmt: skip
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def linear(
    ops: Any, spec: str, x: Array, w: dict[str, Array], name: str, out: tuple, reduce: str | None = None,
    *, norm: tuple[Array, float] | None = None, gate: bool = False, add: Array | None = None,
) -> Array:  # fmt: skip
    """ops.einsum with w[name], plus w[name + "_bias"] where the model has one: before the gate, and before `add`."""
    bias = w.get(name + "_bias")
    if bias is None:
        return ops.einsum(spec, x, w[name], out=out, reduce=reduce, norm=norm, gate=gate, add=add)
    y = ops.einsum(spec, x, w[name], out=out, reduce=reduce, norm=norm) + bias
    y = ops.gated_mlp_act(y) if gate else y
    return y if add is None else add + y
