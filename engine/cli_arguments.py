"""Engine arguments on the command line: `--max-model-len 2048` is `LLM(..., max_model_len=2048)`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def free_word(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without the first that belongs to no option, and that one: a model named as `octavo plan --tp 4 M`."""
    for i, word in enumerate(words):
        if not word.startswith("--") and not (i and _takes(words[i - 1], word)):
            return [*words[:i], *words[i + 1 :]], word
    return list(words), None


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
