"""Experts under one set of names, however a checkpoint holds them.

A model's map asks for `mlp.experts.3.gate_proj.weight`, as Qwen's checkpoints say. Mixtral's say
`block_sparse_moe.experts.3.w1.weight`, and transformers 5 may write all experts of a layer as two tensors:
`mlp.experts.gate_up_proj` [X, 2 F, E] and `mlp.experts.down_proj` [X, E, F].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .source import Stored, TensorSource

MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXTRAL_NAME = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.\d+\.(w[123]))\.weight")
STACKED_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertSource:
    """A source whose experts have one tensor each, named as Qwen names them; `get` returns views of stacked ones."""

    source: TensorSource

    @property
    def identity(self) -> str | None:
        return self.source.identity

    @cached_property
    def _where(self) -> dict[str, tuple[str, tuple[int | slice, ...]]]:
        """Name -> the source's name, and which part of that tensor."""
        found: dict[str, tuple[str, tuple[int | slice, ...]]] = {}
        for name in self.source.names():
            if match := MIXTRAL_NAME.fullmatch(name):
                layer, what, part = match.groups()
                what = what.replace(part, MIXTRAL[part]) if part else what
                found[f"{layer}.mlp.{what}.weight"] = name, ()
            elif match := STACKED_NAME.fullmatch(name):
                found |= self._parts(name, *match.groups())
            else:
                found[name] = name, ()
        return found

    def _parts(self, name: str, at: str, what: str) -> dict[str, tuple[str, tuple[int | slice, ...]]]:
        num_experts, rows, _ = self.source.stored(name).shape
        if what == "down_proj":
            return {f"{at}.{i}.down_proj.weight": (name, (i,)) for i in range(num_experts)}
        sides = {"gate_proj": slice(rows // 2), "up_proj": slice(rows // 2, rows)}
        return {f"{at}.{i}.{side}.weight": (name, (i, at_)) for i in range(num_experts) for side, at_ in sides.items()}

    def names(self) -> list[str]:
        return list(self._where)

    def get(self, name: str) -> np.ndarray:
        stored, part = self._where[name]
        return self.source.get(stored)[part]

    def nbytes(self, name: str) -> int:
        stored, part = self._where[name]
        return self.get(name).nbytes if part else self.source.nbytes(stored)

    def stored(self, name: str) -> Stored:
        return replace(self.source.stored(self._where[name][0]), name=name)


def with_expert_names(source: TensorSource) -> TensorSource:
    """The source, its experts renamed if they have other names than a model's map."""
    other = any(MIXTRAL_NAME.fullmatch(name) or STACKED_NAME.fullmatch(name) for name in source.names())
    return ExpertSource(source) if other else source
