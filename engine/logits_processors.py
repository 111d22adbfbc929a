"""Logits processors that a user brings: which of them a request selects, as columns of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.logit_edits import MAX_PROCESSOR_COLUMNS, LogitsProcessor
from .checks import check_names, number


def checked_processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    """A list of processors, each with a name of its own. Raises ValueError for what cannot be one, or too many."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} {value!r} is not a list of LogitsProcessor")
    names = set()
    for p in value:
        _check(name, p)
        if p.name in names:
            raise ValueError(f"{name} has two of the name {p.name!r}")
        names.add(p.name)
    if (needed := sum(1 + len(p.params) for p in value)) > MAX_PROCESSOR_COLUMNS:
        raise ValueError(
            f"{name}: {len(value)} processors with their parameters take {needed} numbers of a request's row, and "
            f"{MAX_PROCESSOR_COLUMNS} are there"
        )
    return tuple(value)


def _check(name: str, p: Any) -> None:
    if not isinstance(p, LogitsProcessor):
        raise ValueError(f"{name}: {p!r} is not a LogitsProcessor (octavo.engine.LogitsProcessor)")
    if not isinstance(p.name, str) or not p.name or not callable(p.function):
        raise ValueError(f"{name}: {p!r} needs a name and a function")
    if not isinstance(p.params, Mapping):
        raise ValueError(f"{name}: the params of {p.name!r} are no dict of names to defaults, but {p.params!r}")
    for key, default in p.params.items():
        number(f"{name}: the default of {p.name} {key}", default, -3e38, 3e38)


def columns_of(
    extra_args: Mapping[str, Mapping[str, float]], processors: Sequence[LogitsProcessor]
) -> tuple[tuple[int, float], ...]:
    """(column, value) of a request that selects processors by {name: {parameter: value}}; parameters have defaults.

    Raises UnknownArgumentError for names that are not there.
    """
    check_names("logits processor in extra_args", extra_args, (p.name for p in processors))
    columns, first = [], 0
    for p in processors:
        if (given := extra_args.get(p.name)) is not None:
            check_names(f"parameter of logits processor {p.name!r}", given, p.params)
            values = [1.0, *(float(given.get(key, default)) for key, default in p.params.items())]
            columns += [(first + i, v) for i, v in enumerate(values) if v]
        first += 1 + len(p.params)
    return tuple(columns)
