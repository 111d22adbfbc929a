"""What laboratory runs are made on if nobody says: short texts, two of which begin alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..build import open_checkpoint
from ..config import engine_config
from ..json_file import read_text

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
    lines = {number: line for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()}
    if path.suffix != ".jsonl":
        return list(lines.values())
    return [_prompt_of(line, f"{path}: line {number}") for number, line in lines.items()]


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no valid JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where} has no prompt: {line[:80]}")
    return prompt
