"""What laboratory runs are made on if nobody says: short texts, two of which begin alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..build import open_checkpoint
from ..config import engine_config

OPENING = (
    "The printer folded the sheet three times, so that it had eight leaves and sixteen pages, and put it on the pile "
    "with the others. It was late, and the lamp was low. "
)


def default_prompts() -> list[str]:
    return [OPENING + "Then he", OPENING + "In the morning", "def fold(sheet):", "Die Seiten eines Buches"]


def tokenized(model: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The prompts as the model's own tokenizer reads them."""
    tokenizer = open_checkpoint(engine_config(model)).tokenizer()
    return [tokenizer.encode(p) for p in prompts]


def read_prompts(path: Path) -> list[str]:
    """A prompt a line. Of a .jsonl file each line is a string, or an object with "prompt". Empty lines are left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    values = [json.loads(line) for line in lines]
    found: list[Any] = [value.get("prompt") if isinstance(value, dict) else value for value in values]
    for number, prompt in enumerate(found, 1):
        if not isinstance(prompt, str):
            raise ValueError(f"{path}: line {number} has no prompt: {lines[number - 1][:80]}")
    return found
