"""What an engine argument is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import checks


@dataclass(frozen=True)
class Argument:
    """One that works. `check(name, value)` normalises a value; `kind` is what the documentation calls its type."""

    name: str
    kind: str
    default: Any
    doc: str
    check: Callable[[str, Any], Any]


@dataclass(frozen=True)
class Later:
    """One that is known and not built yet. Its default and `harmless` values ask for nothing, and are accepted."""

    name: str
    default: Any
    feature: str
    harmless: tuple[Any, ...] = ()


def integers(low: float, high: float = float("inf")) -> Callable[[str, Any], int]:
    return partial(checks.integer, low=low, high=high)


def choices(*known: str) -> Callable[[str, Any], str]:
    return partial(checks.choice, known=known)


def sizes(low: int) -> Callable[[str, Any], int]:
    return partial(checks.size, low=low)
