"""A small byte-level vocabulary, tiny random models that speak it, and what to ask of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tiny
import tokenizers

from octavo.engine import LLM, SamplingParams
from octavo.engine.tokenizer_gguf import byte_alphabet

SPECIAL = ("<pad>", "<call>", "<eos>")
# tokens of several characters, many of which end what is open: a random model would talk for ever
WORDS = (
    ['"', '",', '":', '"}', '"]', '"},', '"],', '",\n', "}", "]", ",", ":", "{", "[", '{"', '["', '""', "}}", "]]"] * 6
    + ["true", "false", "null", "name", "tags", "yes", "no", "maybe", "ab", "cd", "abc", "12", "345", "00", "-1", ".5"]
    + ["é", "日本", "日", "😀", " the", " of", "\n", "  ", "ing", "er", "a", "b", "0", "1", "2", "3"]
)  # fmt: skip
PROMPT = {"prompt_token_ids": [70, 80, 90, 100, 110]}


def save_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of every byte and WORDS; some of these are there several times, under other ids."""
    of_byte = {b: char for char, b in byte_alphabet().items()}
    spelled = [of_byte[b] for b in range(256)]
    more = []
    for i, word in enumerate(WORDS):
        text = "".join(of_byte[b] for b in word.encode())
        # a vocabulary has each spelling once: repeated words get a space or two in front
        text = of_byte[32] * (WORDS[:i].count(word) if word in WORDS[:i] else 0) + text
        if text not in spelled and text not in more:
            more.append(text)
    vocab = {text: i for i, text in enumerate([*SPECIAL, *spelled, *more])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True) for s in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    return folder


def vocab_size(folder: Path) -> int:
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])


def engine(folder: Path, backend: str, **arguments: Any) -> LLM:
    """An engine on a tiny random model with the tokenizer of a folder."""
    config = dataclasses.replace(tiny.TINY, vocab_size=vocab_size(folder), max_model_len=512)
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_num_seqs": 4}
    return tiny.engine(config, tokenizer=str(folder), backend=backend, **(defaults | arguments))


def formed(form: dict[str, Any], **params: Any) -> SamplingParams:
    """Random sampling at temperature 1 with structured_outputs `form`."""
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 24, "structured_outputs": form, **params})
