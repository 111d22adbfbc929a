"""Checks of what a user passes: each returns the value in its own type, or raises an error that says what is right."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


class UnknownArgumentError(TypeError, ValueError):
    """A keyword that nobody knows.

    A TypeError, as Python raises for one, and a ValueError, as for all else that a user passes wrong.
    """


def check_names(what: str, names: Iterable[str], known: Iterable[str], hints: Mapping[str, str] | None = None) -> None:
    """Raises UnknownArgumentError for the first name that is not known, and says which was meant.

    `hints` says what to write instead of names that other engines, or older versions, use.
    """
    known, hints = set(known), hints or {}
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=3)
        advice = hints.get(name) or ("did you mean " + " or ".join(near) + "?" if near else "")
        raise UnknownArgumentError(f"unknown {what} {name!r}" + (f": {advice}" if advice else ""))


def integer(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> int:
    """A whole number between low and high."""
    if type(value) is int and low <= value <= high:
        # nearly always: an abstract class takes its time to know its instances
        return value
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        bounds = f"from {low} to {high}" if high < math.inf else f"of at least {low}" if low > -math.inf else "at all"
        raise ValueError(f"{name} {value!r} is not a whole number {bounds}")
    return int(value)


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> float:
    """A number between low and high; open ends are not included. NaN never is."""
    if type(value) in (int, float) and low < value < high:
        return float(value)
    fits = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
    if not fits or (open_low and value == low) or (open_high and value == high):
        bounds = f"{'more than' if open_low else 'at least'} {low} and {'less than' if open_high else 'at most'} {high}"
        raise ValueError(f"{name} {value!r} is not a number of {bounds}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} {value!r} is not True or False")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} {value!r} is not a dict")
    return dict(value)


def sequence(name: str, value: Any) -> tuple[Any, ...]:
    """A list or other iterable as a tuple; None is empty. Not a string."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} {value!r} is not a list")
    return tuple(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    if value not in (known := tuple(known)):
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    return value


def size(name: str, value: Any, low: int) -> int:
    """A whole number, or a string of one with a unit: k, m, g, t count by 1000; K, M, G, T (also Ki, KiB) by 1024."""
    if isinstance(text := value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([kKmMgGtT])(?:iB|i|B)?)?", text.strip())
        if not match:
            raise ValueError(f"{name} {value!r} is not a number such as 4096, '4k' (4000) or '4K' (4096)")
        digits, unit = float(match[1]), match[2] or ""
        value = digits * (1000 if unit.islower() else 1024) ** ("kmgt".index(unit.lower()) + 1 if unit else 0)
        if value != int(value):
            raise ValueError(f"{name} {text!r} is not whole: it is {value}")
        value = int(value)
    return integer(name, value, low)
