"""Token ids to text as they come: a pure fold over ids, and the stream of one request with its stop strings.

The whole fold equals `Tokenizer.decode` of all ids, which is what the decoder of the `tokenizers` library gives:

- byte-level vocabularies: bytes of all tokens in a row, invalid UTF-8 replaced. Half a character waits for its rest;
- sentencepiece vocabularies: pieces, and runs of byte tokens. A run that is not valid UTF-8 *as a whole* is replaced as
  a whole, so its text waits until the run ends. One space at the very start of the text is dropped;
- words joined by spaces (no decoder), WordPiece, Metaspace.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .pieces import NOTHING, Pieces

if TYPE_CHECKING:
    from .sampling_params import SamplingParams
    from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class State(NamedTuple):
    """What a fold remembers between two ids."""

    pending: bytes = b""  # not text yet
    foreign: int = 0  # how many of the pending bytes are the prompt's
    first: bool = True  # no token was shown yet
    at_start: bool = False  # no text was shown yet, and the decoder strips the first
    after_added: bool = False  # the token before is an added one


@dataclass(frozen=True)
class Detokenizer:
    """The fold of one tokenizer. `hidden` ids have no text; between two `tight` ids the decoder's space is left out."""

    pieces: Pieces
    hidden: frozenset[int] = frozenset()
    tight: frozenset[int] = frozenset()

    def start(self, prompt_ids: Sequence[int] = ()) -> State:
        """Returns the state behind a prompt, of which no text will be shown. Looks at the tail of it only.

        A character that begins in the prompt and ends in the output is shown, as it was not text before.
        """
        tail = len(prompt_ids)
        state = State(at_start=bool(self.pieces.strip))
        while tail and state.first:
            tail -= 1
            piece = self.pieces[prompt_ids[tail]]
            if piece.text and prompt_ids[tail] not in self.hidden:
                state = State(first=False, after_added=prompt_ids[tail] in self.tight)
                tail += 1
        for i in prompt_ids[tail:]:
            state, _ = self.step(state, i)
        return state._replace(foreign=len(state.pending))

    def step(self, state: State, token_id: int) -> tuple[State, str]:
        """Returns the next state and the text that `token_id` makes certain."""
        piece = self.pieces[token_id]
        if token_id in self.hidden or piece is NOTHING:
            return state, ""
        added = token_id in self.tight
        if piece.text is None:
            if not self.pieces.runs:
                pending, foreign, text = _complete(state.pending + piece.data, state.foreign)
            else:
                pending, foreign, text = state.pending + piece.data, state.foreign, ""
        else:
            own = piece.first if state.first or (added and state.after_added) else piece.text
            pending, foreign, text = b"", 0, self._flush(state) + own
        return self._shown(State(pending, foreign, False, state.at_start, added), text)

    def finish(self, state: State) -> str:
        """Returns the text of what is still pending: a character that never got its end is U+FFFD."""
        return self._shown(state, self._flush(state))[1]

    def peek(self, state: State) -> str:
        """Returns the text that would be certain if the stream ended here, whole characters only."""
        if not self.pieces.runs:
            return ""
        text = self.finish(state)
        return "" if REPLACEMENT in text else text

    def _flush(self, state: State) -> str:
        if not state.pending:
            return ""
        if self.pieces.runs:
            return _run_text(state.pending, state.foreign)
        # incomplete as it is, it is one replacement; the prompt's text has it if it began there
        return "" if state.foreign else REPLACEMENT

    def _shown(self, state: State, text: str) -> tuple[State, str]:
        if not (text and state.at_start):
            return state, text
        return state._replace(at_start=False), text.removeprefix(self.pieces.strip)


def _decode(data: bytes) -> tuple[str, int]:
    """The text of bytes up to an incomplete last character, and how many bytes that is."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    if data[used : used + 1] == b"\xed" and data[used + 1 : used + 2] >= b"\xa0":
        # half of a surrogate: the codec waits for the rest of it, and no character begins so
        return text + REPLACEMENT * 2, used + 2
    return text, used


def _complete(data: bytes, foreign: int) -> tuple[bytes, int, str]:
    """Splits bytes into those of an incomplete last character, how many of them are the prompt's, and text."""
    text, used = _decode(data)
    if not used:
        return data, foreign, ""
    if foreign and text[0] == REPLACEMENT and not data.startswith(REPLACEMENT.encode()):
        # the output does not go on with the prompt's character
        text = text[1:]
    return data[used:], 0, text


def _run_text(run: bytes, foreign: int) -> str:
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * (len(run) - foreign)
    known, _ = codecs.utf_8_decode(run[:foreign], "strict", False)
    return text[len(known) :]


def token_text(pieces: Pieces, context_ids: Sequence[int], token_id: int) -> str:
    """Returns what a token says behind up to 4 others: "" inside of a character, the character at its end."""
    piece = pieces[token_id]
    if piece.text is not None:
        return piece.text
    before = b"".join(pieces[i].data for i in context_ids[-4:])
    pending = before[_decode(before)[1] :]
    text, used = _decode(pending + piece.data)
    if used and text[0] == REPLACEMENT:
        # it does not go on with the character before
        text, _ = _decode(piece.data)
    return text


class Match(NamedTuple):
    """A stop string in a text, text[start:end]."""

    stop: str
    start: int
    end: int


def find_stop(text: str, new: int, stops: Sequence[str]) -> Match | None:
    """Returns the stop string that ends first in text[new:]; it may begin before. The first of `stops` wins a tie."""
    found: Match | None = None
    for stop in stops:
        start = text.find(stop, max(0, new - len(stop) + 1))
        if start >= 0 and (found is None or start + len(stop) < found.end):
            found = Match(stop, start, start + len(stop))
    return found


def num_held(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class TextStream:
    """The text of one request while it is generated. `text` only ever grows.

    `stop` is the stop string that was found, or None. Its text and what is behind are not in `text`, or only what is
    behind with `include_stop_str_in_output`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams):
        hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        tight = frozenset() if params.spaces_between_special_tokens else tokenizer.added_ids
        self.detokenizer = Detokenizer(tokenizer.pieces, hidden, tight)
        self.state = self.detokenizer.start(prompt_ids)
        self.stops = params.stop
        self.min_tokens = params.min_tokens
        self.include = params.include_stop_str_in_output
        self.num_tokens = 0
        self.stop: str | None = None
        # the end of the text, as far as a stop string may begin in it
        self.window = ""
        self.certain = ""
        self.fresh: list[str] = []
        self.num_sent = 0

    @property
    def text(self) -> str:
        """All text so far that no stop string can take back."""
        if self.fresh:
            self.certain += "".join(self.fresh)
            self.fresh.clear()
        return self.certain

    def push(self, ids: Sequence[int], ended: bool = False) -> int:
        """Takes new ids; `ended`: the last one is a stop token, not shown unless asked for.

        Returns how many ids belong to the output: those behind the end of a stop string do not.
        """
        if self.stop is not None:
            return 0
        for i, token_id in enumerate(ids):
            self.num_tokens += 1
            if ended and i == len(ids) - 1 and not self.include:
                break
            self.state, text = self.detokenizer.step(self.state, token_id)
            self._append(text)
            if self.stop is None and self.stops:
                self._look_ahead()
            if self.stop is not None:
                return i + 1
        return len(ids)

    def delta(self) -> str:
        """Returns the text that came since the last call. All deltas together are `text`."""
        sent, self.num_sent = self.num_sent, len(self.text)
        return self.text[sent:]

    def finish(self) -> str | None:
        """Makes all text certain. Returns the stop string, which the text that was pending may just have completed."""
        if self.stop is None:
            self._append(self.detokenizer.finish(self.state))
            self.state = State(first=False)
        if self.stop is None and not self.include:
            self.fresh.append(self.window)
        self.window = ""
        return self.stop

    def _look_ahead(self) -> None:
        """Ends the stream at a stop string which the pending text completes: there is nothing to wait for."""
        text = self.detokenizer.peek(self.state)
        if text and self._find(text):
            self._append(text)

    def _find(self, new: str) -> Match | None:
        active = self.num_tokens >= self.min_tokens
        return find_stop(self.window + new, len(self.window), self.stops) if active else None

    def _append(self, new: str) -> None:
        if not new:
            return
        text = self.window + new
        match = self._find(new)
        shown = len(self.window) if self.include else 0
        if match:
            self.stop = match.stop
            self.fresh.append(text[shown : match.end if self.include else match.start])
            self.window = ""
            return
        held = num_held(text, self.stops)
        self.fresh.append(text[shown : len(text) if self.include else len(text) - held])
        self.window = text[len(text) - held :]
