"""Taps: what ops return inside the compiled step, kept by name for whoever compares. Nothing is kept unasked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .interface import Array

TAPPED = ("embed", "einsum", "rms_norm", "add_rms_norm", "rope", "attention", "gated_mlp_act")


class Taps:
    """The arrays that the patterns ask for ("layer.7.*", "*.attention"), in the order in which they were made."""

    def __init__(self, patterns: Sequence[str]):
        self.patterns = tuple(patterns)
        self.found: dict[str, Array] = {}

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def keep(self, name: str, value: Array) -> None:
        """Keeps a wanted array. A second one of the same name is "name.1", and so on."""
        if self.wants(name):
            count = sum(known == name or known.startswith(f"{name}.#") for known in self.found)
            self.found[f"{name}.#{count}" if count else name] = value


class TappedOps:
    """ops that show Taps what they return, as "prefix.name".

    An op on a weight has the weight's name ("layer.7.qkv"), another its own ("layer.7.rope", then "layer.7.rope.#1").
    add_rms_norm makes two: its sum is "residual".
    """

    def __init__(self, ops: Any, taps: Taps, prefix: str, weights: Mapping[str, Any]):
        self.ops, self.taps, self.prefix = ops, taps, prefix
        self.names = {id(w): name for name, w in weights.items()}

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name not in TAPPED:
            return op

        def tapped(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            whose = next((self.names[id(x)] for x in args if id(x) in self.names), name)
            if name == "add_rms_norm":
                self.taps.keep(f"{self.prefix}.residual", out[0])
            self.taps.keep(f"{self.prefix}.{whose}", out[1] if name == "add_rms_norm" else out)
            return out

        return tapped
