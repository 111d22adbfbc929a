"""By which another process makes the same programs as a Runner here: with weights and a cache of no content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..models.interface import CacheLayout, ModelSpec


@dataclass(frozen=True)
class Recipe:
    """What Runner is made with, beside its backend and weights."""

    model: ModelSpec
    layout: CacheLayout
    arguments: dict[str, Any]
