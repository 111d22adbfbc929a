"""What each token of a vocabulary stands for, read off the decoder of a `tokenizers` tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tokenizers

from .tokenizer_gguf import byte_alphabet


class Piece(NamedTuple):
    """One token."""

    data: bytes  # exactly: those of all tokens in a row are the text
    text: str | None  # None: bytes that are text only with their neighbours
    first: str = ""  # its text where it is the first token of all


NOTHING = Piece(b"", "")
Spell = Callable[[str], Piece]


class Pieces(dict[int, Piece]):
    """Token id to Piece, filled as it is asked; an id outside the vocabulary gives NOTHING.

    `runs`: bytes are text only when the run of them ends (byte fallback). `strip` is dropped from the text's start.
    Raises NotImplementedError for a decoder whose text of a token hangs on tokens behind it.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self.backend = backend
        decoder = backend.decoder
        form = {"type": "Joined"} if decoder is None else json.loads(decoder.__getstate__())
        self.spell, self.runs, self.strip = _read_decoder(form)

    def __missing__(self, token_id: int) -> Piece:
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return NOTHING
        piece = self[token_id] = self.spell(token)
        return piece


def _read_decoder(form: dict[str, Any]) -> tuple[Spell, bool, str]:
    """The function that spells a token, whether bytes come in runs, and what the start of the text loses."""
    match form:
        case {"type": "ByteLevel"}:
            return partial(_spell_bytes, byte_alphabet()), False, ""
        case {"type": "Joined"}:
            return lambda token: _piece(f" {token}", token), False, ""
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return partial(_spell_word, prefix, cleanup), False, ""
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return partial(_spell_marked, mark, scheme != "never"), False, ""
        case {"type": "Sequence", "decoders": [{"type": "ByteLevel"} as only]}:
            return _read_decoder(only)
        case {"type": "Sequence", "decoders": steps}:
            return _read_steps(steps)
    raise NotImplementedError(f"a tokenizer whose decoder is {form}")


def _read_steps(steps: list[dict[str, Any]]) -> tuple[Spell, bool, str]:
    """The steps of a sentencepiece decoder: Replace ..., ByteFallback, Fuse, Strip; each but Fuse may be missing."""
    rest = list(steps)
    replaces: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replaces.append((step["pattern"]["String"], step["content"]))
    fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    strip = ""
    match rest[fallback:]:
        case [{"type": "Fuse"}]:
            pass
        case [{"type": "Fuse"}, {"type": "Strip", "content": strip, "start": 1, "stop": 0}]:
            pass
        case _:
            raise NotImplementedError(f"a tokenizer whose decoder is the sequence {steps}")
    return partial(_spell_replaced, replaces, fallback), fallback, strip


def _piece(text: str, first: str) -> Piece:
    return Piece(text.encode(), text, first)


def _spell_bytes(alphabet: dict[str, int], token: str) -> Piece:
    # an added token may hold characters outside the alphabet; it stands for itself
    spelled = all(char in alphabet for char in token)
    data = bytes(alphabet[char] for char in token) if spelled else token.encode()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return Piece(data, None)
    return Piece(data, text, text)


def _spell_replaced(replaces: list[tuple[str, str]], fallback: bool, token: str) -> Piece:
    for old, new in replaces:
        token = token.replace(old, new)
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return Piece(bytes.fromhex(token[3:5]), None)
    return _piece(token, token)


def _spell_marked(mark: str, prefixed: bool, token: str) -> Piece:
    return _piece(token.replace(mark, " "), token.replace(mark, "" if prefixed else " "))


def _spell_word(prefix: str, cleanup: bool, token: str) -> Piece:
    inner = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    return _piece(_clean(inner), _clean(token)) if cleanup else _piece(inner, token)


def _clean(text: str) -> str:
    """The decoder's own clean-up of spaces, which it does token by token."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    for old, new in ((" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't"), (" 's", "'s")):
        text = text.replace(old, new)
    return text.replace(" 've", "'ve").replace(" 're", "'re")
