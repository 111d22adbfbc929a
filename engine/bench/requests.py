"""What a benchmark asks of an engine: prompts as token ids, random ones or a file's, and how many tokens to make."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checks import integer, number
from ..json_file import read_text
from ..tokenizer import Tokenizer
from .workloads import Workload

SHORTEST = 4  # tokens of a dataset's prompt, as in vLLM


def random_requests(
    count: int,
    vocab: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> Workload:
    """So many prompts of random ids, the same for the same seed.

    Lengths are whole numbers, all equally likely, from floor(len * (1 - range_ratio)) to ceil(len * (1 + range_ratio)),
    at least 1. The prompts begin with the same prefix_len ids, which come on top of input_len.
    """
    integer("num_prompts", count, 1)
    integer("input_len", input_len, 1)
    integer("output_len", output_len, 1)
    integer("prefix_len", prefix_len, 0)
    number("random_range_ratio", range_ratio, 0, 1, open_high=True)
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab) for _ in range(prefix_len)]

    def length(middle: int) -> int:
        return rng.randint(max(1, math.floor(middle * (1 - range_ratio))), math.ceil(middle * (1 + range_ratio)))

    lengths = [(length(input_len), length(output_len)) for _ in range(count)]
    return [(prefix + [rng.randrange(vocab) for _ in range(n)], out) for n, out in lengths]


def dataset_requests(
    path: Path, tokenizer: Tokenizer, count: int | None, *, output_len: int | None, longest: int, seed: int = 0
) -> Workload:
    """A file's prompts in an order shuffled by the seed; `count` of them, None: all.

    A .jsonl file has one item a line, any other is a JSON list of them. An item is a string; an object with "prompt",
    and maybe "output_tokens"; or ShareGPT's {"conversations": [{"value": ...}, ...]}, whose first value is the prompt
    and whose second says how many tokens to make. `output_len` overrules both, and stands where neither is there (128
    if it is None). Left out are prompts of under 4 tokens, those of which nothing is to be made, and what together is
    longer than `longest` tokens.
    Raises ValueError for an item of another form, and if there are fewer than count.
    """
    pairs = list(_pairs(path))
    random.Random(seed).shuffle(pairs)
    found: Workload = []
    for prompt, answer in pairs:
        if len(found) == count:
            break
        ids = list(tokenizer.encode(prompt))
        said = len(tokenizer.encode(answer, add_special_tokens=False)) if isinstance(answer, str) else answer
        out = output_len or (128 if said is None else said)
        if out and len(ids) >= SHORTEST and len(ids) + out <= longest:
            found.append((ids, out))
    if len(found) < (count or 1):
        raise ValueError(
            f"{path} has {len(found)} prompts of at least {SHORTEST} tokens that fit, with what is to be made, in "
            f"{longest} tokens: expected {count or 'at least one'} (--num-prompts)"
        )
    return found


def _pairs(path: Path) -> Iterator[tuple[str, str | int | None]]:
    """Prompts, and their answer as text, or how many tokens to make."""
    text = read_text(path)
    if path.suffix == ".jsonl":
        # not splitlines, which ends lines within strings too, at U+2028
        items = [_parsed(line, f"{path}: line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        items = _parsed(text, str(path))
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ValueError(f"{path} is no list of prompts: expected [...], or a .jsonl file with an item a line")
    for i, item in enumerate(items, 1):
        # a conversation of less than two turns has no answer, and is left out, as in vLLM
        turns = item.get("conversations") if isinstance(item, dict) and "prompt" not in item else None
        if isinstance(turns, list) and len(turns) < 2:
            continue
        yield _pair(item, f"{path}: item {i}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no valid JSON: {error}") from error


def _pair(item: Any, where: str) -> tuple[str, str | int | None]:
    if isinstance(item, str):
        return item, None
    if isinstance(item, dict) and isinstance(item.get("prompt"), str):
        out = item.get("output_tokens")
        return item["prompt"], None if out is None else integer(f"{where}: output_tokens", out, 1)
    turns = item.get("conversations") if isinstance(item, dict) else None
    if isinstance(turns, list) and all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns[:2]):
        return turns[0]["value"], turns[1]["value"]
    raise ValueError(
        f'{where} has no prompt: expected a string, {{"prompt": ...}} or {{"conversations": [{{"value": ...}}, ...]}}'
    )
