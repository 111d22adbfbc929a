"""Reads files of text and of JSON; what is wrong with one is told with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """What a file of UTF-8 holds. Raises ValueError naming it if it is not there, or holds something else."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ValueError naming it if it is not there, or is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
