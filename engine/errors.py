"""Errors that more than one file raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


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
