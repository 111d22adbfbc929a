"""How commands report: errors as one line, values as tables or JSON."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
# a model may be named by a word or an option, where a command is about nothing but a model: cli_arguments.one_model
Named = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="An alias, a folder, a .gguf file or a hub id; none: smollm2.")
]
ModelToo = Annotated[str | None, typer.Option("--model", "-m", help="The model, named by an option.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and what is logged.")]


@contextlib.contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Turns what a user can get wrong into one line on stderr and exit status 1; --debug lets it through."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("octavo").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        print_error(error)
        raise typer.Exit(1) from None


def print_error(error: Exception) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))


def show(value: Any, as_json: bool, title: str) -> None:
    """Prints a value that is made of dicts, lists and scalars: as JSON, or as tables."""
    if as_json:
        print(json.dumps(value, indent=2, default=str))
        return
    from rich.console import Console

    from .cli_tables import tables

    for table in tables(value, title):
        Console().print(table)
