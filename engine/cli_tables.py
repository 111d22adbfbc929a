"""Values as tables for a terminal: dicts become rows, lists of dicts become columns, bytes become readable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table


def tables(value: Any, title: str) -> Iterator[Table]:
    """A table for the scalars of a dict, then one for each dict or list of dicts in it; or one for a list of dicts."""
    if isinstance(value, dict):
        nested = {name: v for name, v in value.items() if _is_nested(v)}
        if flat := {name: v for name, v in value.items() if name not in nested}:
            yield _of_scalars(flat, title)
        for name, v in nested.items():
            yield from tables(v, f"{title}: {_words(name)}")
    else:
        yield _of_rows(value, title)


def readable(name: str, value: Any) -> str:
    """The text of one cell. What is counted in bytes, by its name, also gets a unit."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return _bytes(value) if name.split("_")[-1] in ("bytes", "nbytes") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(v) for v in value)
    return str(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict))


def _of_scalars(values: dict[str, Any], title: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title), show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for name, value in values.items():
        table.add_row(_words(name), readable(name, value))
    return table


def _of_rows(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    names = list(rows[0]) if rows else []
    for name in names:
        table.add_column(_words(name), overflow="fold")
    for row in rows:
        table.add_row(*(readable(name, row[name]) for name in names))
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
