"""Three real tokenizers, and what each of their tokens stands for, read off their own files.

SmolLM2's is in the embedded model; Mistral's sentencepiece model (bytes for what it lacks, a space before the text) and
its byte-level successor "tekken" lie in the package mistral-common. Nothing here fetches anything.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mistral_common
import sentencepiece
import tokenizers
from embedded import embedded_model
from tokenizers import decoders, models

from octavo.engine.loading.gguf import read_gguf
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.engine.tokenizer_gguf import byte_alphabet

NAMES = ("smollm2", "mistral", "tekken")
SCRIPTS = (
    'the of and STOP stop\n\n```json {"a": 1}  \t',
    "éßñÅﬁœ\u0301\u0308 naïve",
    "你好世界漢字仮名かなカナ한국어 。、",
    "😀👍🏽👨‍👩‍👧🏳️‍🌈🇫🇷❤️\u200d\ufe0f",
    "עברית العربية हिन्दी ไทย",
    "\ufffd\ufeff\u00a0\u2028\x00\x7f𝔘𐍈",
)


@dataclass(frozen=True)
class Real:
    """A tokenizer beside its file: `data[i]` is what token i stands for, b"" if it is special or does not exist."""

    tokenizer: Tokenizer
    data: tuple[bytes, ...]
    special: tuple[int, ...]
    bytewise: bool  # text is the bytes of all tokens in a row
    processor: Any = None  # the sentencepiece library's own


def _smollm2() -> Real:
    metadata = read_gguf(embedded_model()).metadata
    special = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    alphabet = byte_alphabet()
    data = [bytes(alphabet[c] for c in token) for token in metadata["tokenizer.ggml.tokens"]]
    return _real(load_tokenizer(metadata), data, special, True)


def _mistral() -> Real:
    path = files(mistral_common) / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    sp = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    ids = range(sp.get_piece_size())
    tokens = [sp.id_to_piece(i) for i in ids]
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    tokenizer = load_tokenizer({
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    })  # fmt: skip
    data = [bytes.fromhex(t[3:5]) if kind == 6 else t.replace("▁", " ").encode() for t, kind in zip(tokens, kinds)]
    return _real(tokenizer, data, [i for i in ids if kinds[i] in (2, 3)], False, sp)


def _tekken() -> Real:
    file = json.loads((files(mistral_common) / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    num_special = file["config"]["default_num_special_tokens"]
    words = file["vocab"][: file["config"]["default_vocab_size"] - num_special]
    data = [b""] * num_special + [base64.b64decode(word["token_bytes"]) for word in words]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, num_special))]
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    spelled = ["".join(spelling[b] for b in x) for x in data[num_special:]]
    vocab = {name: i for i, name in enumerate([*names, *spelled])}
    # without its merges it reads bytes one by one, and writes as it always does
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
    return _real(tokenizer, data, range(num_special), True)


def _real(tokenizer: Tokenizer, data: list[bytes], special: Sequence[int], bytewise: bool, sp: Any = None) -> Real:
    hidden = set(special)
    plain = tuple(b"" if i in hidden else x for i, x in enumerate(data))
    return Real(tokenizer, plain, tuple(special), bytewise, sp)


@cache
def real_tokenizer(name: str) -> Real:
    return {"smollm2": _smollm2, "mistral": _mistral, "tekken": _tekken}[name]()


@cache
def ids_by_data(name: str) -> dict[bytes, list[int]]:
    """The tokens that stand for some bytes; pieces and single bytes of sentencepiece may coincide."""
    found: dict[bytes, list[int]] = {}
    for i, x in enumerate(real_tokenizer(name).data):
        if x:
            found.setdefault(x, []).append(i)
    return found


def spell(name: str, data: bytes, rng: random.Random) -> list[int]:
    """Some tokens, not the best ones, whose bytes are `data`: cut anywhere, also inside of characters."""
    by_data, ids, at = ids_by_data(name), [], 0
    while at < len(data):
        size = rng.choice((1, 2, 3, 4, 8, 16))
        while size and data[at : at + size] not in by_data:
            size -= 1
        if size:
            ids.append(rng.choice(by_data[data[at : at + size]]))
        # SmolLM2 has no token for some bytes that UTF-8 never uses
        at += size or 1
    return ids


def random_ids(name: str, rng: random.Random) -> list[int]:
    """Words of many scripts, emoji, torn characters, any bytes, any tokens, special ones, and ids beyond them all."""
    real, ids = real_tokenizer(name), []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.4:
            text = "".join(rng.choices(rng.choice(SCRIPTS), k=rng.randrange(1, 8)))
            ids += spell(name, text.encode(), rng)
        elif kind < 0.6:
            character = rng.choice(rng.choice(SCRIPTS)).encode()
            ids += spell(name, character[rng.choice((0, 0, 1)) :][: rng.randrange(1, 5)], rng)
        elif kind < 0.7:
            ids += spell(name, rng.randbytes(rng.randrange(1, 5)), rng)
        elif kind < 0.85:
            ids += [rng.randrange(len(real.data)) for _ in range(rng.randrange(1, 5))]
        elif kind < 0.97:
            ids += rng.choices(real.special, k=rng.randrange(1, 3))
        else:
            ids.append(rng.choice((len(real.data), len(real.data) + 7, 2**31 - 1)))
    return ids
