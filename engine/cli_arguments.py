"""Engine arguments on the command line: `--max-model-len 2048` is `LLM(..., max_model_len=2048)`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typer import Context
from typer.core import TyperCommand

from .arguments import WORKING

TEXTS = {a.name for a in WORKING if a.kind == "str"}  # a revision of digits is no number
FLAGS = {a.name for a in WORKING if a.kind == "bool"}


def engine_arguments(words: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments that these words spell; which of them exist is for the engine to say.

    `--name value` and `--name=value` set one; a value is JSON where it reads as JSON and the argument is not a string.
    `--name` alone is True, `--no-name` alone is False. Raises ValueError for a word that belongs to no option, or an
    option given twice.
    """
    arguments: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"unexpected argument {word!r}: options start with --")
        name, has_value, text = word[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, text = "=", rest.pop(0)
        key = (name if has_value else name.removeprefix("no-")).replace("-", "_")
        value = _value(key, text) if has_value else not name.startswith("no-")
        if key in arguments:
            raise ValueError(f"--{key.replace('_', '-')} is given twice: {arguments[key]!r} and {value!r}")
        arguments[key] = value
    return arguments


class TakesEngineArguments(TyperCommand):
    """A command that also takes engine arguments, wherever among its own words they stand: its context's `args`."""

    allow_extra_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {name: not getattr(p, "is_flag", False) for p in self.get_params(ctx) for name in _names(p)}
        own, others = parted(args, takes)
        super().parse_args(ctx, own)
        # a stray word in front, where no option would take it for its value
        ctx.args = [*ctx.args, *others]
        return ctx.args


def parted(words: Sequence[str], takes: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The words of a command's own options and arguments, and those of other options with their values.

    `takes` has the names of its own options, and whether each takes a value.
    """
    own: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*own, word, *rest], others
        if takes.get(word) and rest:
            own += [word, rest.pop(0)]
        elif not word.startswith("--") or word.partition("=")[0] in takes:
            own.append(word)
        else:
            others.append(word)
            if rest and not rest[0].startswith("--") and _takes(word, rest[0]):
                others.append(rest.pop(0))
    return own, others


def said(context: Context, names: Iterable[str]) -> list[str]:
    """Those of a command's options that were said, as they are spelled."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [f"--{n.replace('_', '-')}" for n, source in sources.items() if source and source.name == "COMMANDLINE"]


def one_model(word: str | None, option: str | None) -> str:
    """The model that a command names as a word or with --model; of neither smollm2. Raises ValueError for both."""
    if word is not None and option is not None:
        raise ValueError(f"two models, {word!r} and --model {option!r}: give one of them")
    return word or option or "smollm2"


def _names(parameter: Any) -> list[str]:
    """How an option is spelled; of an argument nothing."""
    return [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]


def _takes(option: str, word: str) -> bool:
    """Whether a word behind this one is its value."""
    if not option.startswith("--") or option.startswith("--no-") or "=" in option:
        return False
    return option[2:].replace("-", "_") not in FLAGS or word in ("true", "false")


def _value(key: str, text: str) -> Any:
    if key in TEXTS:
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
