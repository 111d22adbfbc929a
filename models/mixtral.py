"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer, the weights of the chosen summing to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import mistral
from .interface import ModelSpec
from .moe import mixture_from_hf, with_experts


def from_hf(hf: Mapping[str, Any]) -> ModelSpec:
    mixture = mixture_from_hf(hf, "intermediate_size", tuple(range(hf["num_hidden_layers"])), normalise=True)
    return with_experts(mistral.from_hf(hf), "mixtral", mixture)
