"""Text to token ids and back, from a directory of Hugging Face files or from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers
from tokenizers import AddedToken

from .json_file import read_json
from .pieces import Pieces
from .tokenizer_gguf import backend_from_metadata

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ChatTemplate = str | dict[str, str] | None


class Tokenizer:
    """A `tokenizers` tokenizer with named special tokens and a chat template. Nothing changes after construction,
    so that threads may share it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate = None,
    ):
        # a tokenizer.json may ask for both; octavo truncates nothing that it was not asked to, and never pads
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.all_special_tokens = [added[i].content for i in sorted(self.special_ids)]
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.unk_token_id = self._named_id("unk_token")

    @property
    def parts(self) -> tuple[tokenizers.Tokenizer, dict[str, str], ChatTemplate]:
        """What another one like it is made of. Can be pickled."""
        return self.backend, self.special_tokens, self.chat_template

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special_tokens={self.special_tokens})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. Raises ValueError for what is no valid Unicode text."""
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids outside the vocabulary have none."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def pieces(self) -> Pieces:
        """What each token stands for; the detokeniser's table."""
        return Pieces(self.backend)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns exactly what a token stands for; those of all tokens in a row are the bytes of the text."""
        return self.pieces[token_id].data

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Returns the vocabulary's spelling of each id, None for one outside of it."""
        return [self.backend.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.backend.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Returns a fresh dict of all tokens, added ones included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @overload
    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: Literal[True] = True, **arguments: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: Literal[False], **arguments: Any) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Returns the prompt of a chat, as ids or as text. More arguments are variables of the template.

        `chat_template` is a template or the name of one of ours. `continue_final_message` leaves the last message open,
        and needs `add_generation_prompt=False`.
        """
        # with jinja2, which who has no chats need not wait for
        from .chat_template import render

        text = render(
            _choose_template(self.chat_template, chat_template, tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(source: str | Path | Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a directory (tokenizer.json and its companions) or of a GGUF file's metadata."""
    if isinstance(source, Mapping):
        backend, special = backend_from_metadata(source)
        return Tokenizer(backend, special, _gguf_templates(source))
    return _from_directory(Path(source))


def _from_directory(directory: Path) -> Tokenizer:
    """tokenizer.json as it is: add_bos_token and add_eos_token of tokenizer_config.json are of use without it only."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"missing tokenizer: {directory} has no tokenizer.json (tokenizer_config.json, special_tokens_map.json and "
            "chat_template.jinja are read beside it); pass tokenizer= a directory that has one"
        )
    backend = _from_file(path)
    config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    named = {name: _added_token(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    _add_missing(backend, config, list(named.values()))
    special = {name: token.content for name, token in named.items()}
    return Tokenizer(backend, special, _directory_templates(directory, config))


def _from_file(path: Path) -> tokenizers.Tokenizer:
    if not isinstance(read_json(path).get("model"), dict):
        raise ValueError(f"{path} describes no tokenizer: it has no model")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        # the library raises a bare Exception, which does not say what it was reading
        error.add_note(f"while reading {path}")
        raise


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: list[AddedToken]) -> None:
    """Adds what only tokenizer_config.json knows of, in the order of their ids; changes `backend`."""
    have = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    backend.add_tokens([_added_token(token) for _, token in declared if token["content"] not in have])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [_added_token(token) for token in (more.values() if isinstance(more, Mapping) else more)]
    have = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = [token for token in named + extra if token.content not in have or not have[token.content].special]
    backend.add_special_tokens(special)


def _added_token(token: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    if not isinstance(token, Mapping):
        raise ValueError(f"tokenizer_config.json: {token!r} is neither a token's text nor an object that describes one")
    return AddedToken(**{key: value for key, value in token.items() if key != "__type"})


def _directory_templates(directory: Path, config: Mapping[str, Any]) -> ChatTemplate:
    """The chat template, or several by name; files win over tokenizer_config.json."""
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {entry["name"]: entry["template"] for entry in named}
    main = directory / "chat_template.jinja"
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if not more:
        return main.read_text(encoding="utf-8") if main.is_file() else named
    files = {path.stem: path.read_text(encoding="utf-8") for path in more}
    return ({"default": main.read_text(encoding="utf-8")} if main.is_file() else {}) | files


def _gguf_templates(metadata: Mapping[str, Any]) -> ChatTemplate:
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    if not names:
        return default
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
    return named if default is None else {"default": default, **named}


def _choose_template(own: ChatTemplate, asked: str | None, has_tools: bool) -> str:
    if isinstance(own, dict):
        name = asked or ("tool_use" if has_tools and "tool_use" in own else "default")
        if name in own:
            return own[name]
        if asked is None:
            raise ValueError(f"the tokenizer has several chat templates and no default; pass one of {sorted(own)}")
    template = own if asked is None else asked
    if not isinstance(template, str):
        raise ValueError("the tokenizer has no chat template; pass chat_template=")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _check_text(text: str) -> None:
    """Raises ValueError for a lone surrogate, which JSON can carry and UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate {text[error.start]!r} at position {error.start}; it is no valid Unicode"
        ) from None
