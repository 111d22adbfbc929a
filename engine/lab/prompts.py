"""What laboratory runs are made on if nobody says: short texts, two of which begin alike."""

from __future__ import annotations

from collections.abc import Sequence
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
