"""Text of three real tokenizers, token by token: against their whole decode, and stop strings against brute force."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from real_tokenizers import NAMES, Real, random_ids, real_tokenizer

from octavo.engine.detokenizer import Detokenizer, TextStream
from octavo.engine.sampling_params import SamplingParams

# sequences a tokenizer: the fast suite takes a part of what the slow one does
FAST, MANY = 700, 100_000
REPLACEMENT = "\ufffd"
SIZES = [pytest.param(FAST, id="fast"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _hidden(real: Real, skip: bool) -> frozenset[int]:
    return real.tokenizer.special_ids if skip else frozenset()


def _fold(real: Real, ids: list[int], skip: bool, prompt: list[int] | None = None) -> list[str]:
    """The text after each id, and then the rest."""
    detokenizer = Detokenizer(real.tokenizer.pieces, _hidden(real, skip))
    state, deltas = detokenizer.start(prompt or ()), []
    for i in ids:
        state, text = detokenizer.step(state, i)
        deltas.append(text)
    return [*deltas, detokenizer.finish(state)]


def _text(real: Real, ids: list[int], skip: bool) -> str:
    """The library's own decode; ids beyond the vocabulary have no text, and `tokenizers` says so itself."""
    return real.tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("count", SIZES)
def test_streamed_text_is_the_whole_decode_and_waits_for_whole_characters(name: str, count: int) -> None:
    real, rng = real_tokenizer(name), random.Random(1)
    for _ in range(count):
        ids = random_ids(name, rng)
        for skip in (True, False):
            deltas = _fold(real, ids, skip)
            assert "".join(deltas) == _text(real, ids, skip), ids
            if real.bytewise:
                assert deltas[:-1] == _whole_characters(real, ids, skip), ids


def _whole_characters(real: Real, ids: list[int], skip: bool) -> list[str]:
    """What is certain after each id: whole characters, and U+FFFD for bytes that can become none."""
    texts, data, before = [], b"", ""
    for i in ids:
        if i in real.special:
            # it ends the character before it, if it is shown
            data += b"" if skip else real.tokenizer.backend.id_to_token(i).encode()
        elif i < len(real.data):
            data += real.data[i]
        text = data[: len(data) - _num_open(data)].decode("utf-8", "replace")
        texts.append(text.removeprefix(before))
        before = text
    return texts


def _num_open(data: bytes) -> int:
    """How many bytes at the end begin a character that more bytes can complete."""
    return next((n for n in (3, 2, 1) if n <= len(data) and _can_go_on(data[-n:])), 0)


@cache
def _can_go_on(data: bytes) -> bool:
    return any(_is_character(data + bytes(more)) for n in (1, 2, 3) for more in product((0x80, 0x90, 0xA0), repeat=n))


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("count", [FAST, pytest.param(MANY // 4, marks=pytest.mark.slow)])
def test_nothing_of_the_prompt_is_shown(name: str, count: int) -> None:
    real, rng = real_tokenizer(name), random.Random(2)
    for k in range(count):
        prompt, ids, skip = random_ids(name, rng), random_ids(name, rng), bool(k % 2)
        shown = "".join(_fold(real, ids, skip, prompt))
        before, whole = _text(real, prompt, skip), _text(real, prompt + ids, skip)
        if not Detokenizer(real.tokenizer.pieces, _hidden(real, skip)).start(prompt).pending:
            assert before + shown == whole, (prompt, ids)
        elif real.bytewise:
            # a character that begins in the prompt: the output ends it, or does not
            assert whole in (before.removesuffix(REPLACEMENT) + shown, before + shown), (prompt, ids)
        else:
            assert whole.endswith(shown), (prompt, ids)


def test_text_of_valid_utf8_has_no_replacement_before_its_end(name: str) -> None:
    """However the characters are cut into tokens, and wherever it ends."""
    real, rng = real_tokenizer(name), random.Random(3)
    for _ in range(FAST):
        ids = random_ids(name, rng)
        if REPLACEMENT in _text(real, ids, True):
            continue
        cut = ids[: rng.randrange(len(ids) + 1)]
        assert REPLACEMENT not in "".join(_fold(real, cut, True)[:-1]), cut


def test_sentencepiece_itself_decodes_the_same() -> None:
    """It replaces byte by byte what is no text, where `tokenizers` replaces a whole run: so valid text only.

    And of a text that begins with the byte of a space it drops none, where `tokenizers` does.
    """
    real, rng, compared = real_tokenizer("mistral"), random.Random(4), 0
    for _ in range(FAST):
        ids = [i for i in random_ids("mistral", rng) if i < len(real.data) and i != 0]
        text = "".join(_fold(real, ids, True))
        first = next((i for i in ids if i not in real.special), 0)
        if REPLACEMENT not in text and real.processor.id_to_piece(first) != "<0x20>":
            compared += 1
            assert text == real.processor.decode(ids), ids
    assert compared > FAST // 3


def test_ids_that_no_token_has_are_no_exception(name: str) -> None:
    real = real_tokenizer(name)
    for bad in (len(real.data), 2**31 - 1, 2**40, -1):
        assert _fold(real, [bad, bad], False) == ["", "", ""]


@dataclass
class Expected:
    """What a stream shows after some tokens."""

    texts: list[str]
    stop: str | None
    num_tokens: int


def _stops(rng: random.Random, text: str) -> list[str]:
    """Pieces of the text itself, and some that are not in it."""
    stops = []
    for _ in range(rng.randrange(1, 4)):
        at, size = rng.randrange(len(text) + 1), rng.choice((1, 2, 3, 5, 9))
        stops.append(text[at : at + size] + rng.choice(("", "", "", "z", "é")) or "STOP")
    return list(dict.fromkeys(stops))


def _brute_force(real: Real, ids: list[int], stops: list[str], min_tokens: int, include: bool, skip: bool) -> Expected:
    """Looks at the whole text after every token, at every end that is new, for every stop string, in their order."""
    texts, certain = [], ""
    for k in range(1, len(ids) + 1):
        old, certain = certain, _certain(real, ids[:k], skip)
        seen = certain + _pending_characters(real, ids[:k], skip)
        for end in range(len(old) + 1, len(seen) + 1):
            for stop in stops:
                if k >= min_tokens and seen[:end].endswith(stop):
                    return Expected([*texts, seen[: end if include else end - len(stop)]], stop, k)
        texts.append(certain if include else certain[: len(certain) - _held(certain, stops)])
    whole = _text(real, ids, skip)
    for end in range(len(certain) + 1, len(whole) + 1):
        for stop in stops:
            if len(ids) >= min_tokens and whole[:end].endswith(stop):
                return Expected([*texts, whole[: end if include else end - len(stop)]], stop, len(ids))
    return Expected([*texts, whole], None, len(ids))


def _certain(real: Real, ids: list[int], skip: bool) -> str:
    """The text that no later token can change."""
    if real.bytewise:
        return "".join(_whole_characters(real, ids, skip))
    start = _run_start(real, ids, skip)
    return _text(real, ids[:start], skip)


def _run_start(real: Real, ids: list[int], skip: bool) -> int:
    """Where the run of bytes at the end begins; ids without text do not end it."""
    start = at = len(ids)
    while at:
        at -= 1
        i = ids[at]
        if i >= len(real.data) or (i in real.special and skip):
            continue
        if i in real.special or not real.processor.is_byte(i):
            break
        start = at
    return start


def _pending_characters(real: Real, ids: list[int], skip: bool) -> str:
    """The text of the run of bytes at the end, if it is characters as it stands."""
    if real.bytewise:
        return ""
    certain, whole = _certain(real, ids, skip), _text(real, ids, skip)
    run = whole[len(certain) :]
    return "" if REPLACEMENT in run else run


def _held(text: str, stops: list[str]) -> int:
    """How long the longest end of the text is that begins a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="fast"), pytest.param(4_000, id="many", marks=pytest.mark.slow)]
)
def test_stop_strings_equal_brute_force(name: str, count: int) -> None:
    real, rng, found = real_tokenizer(name), random.Random(5), 0
    for _ in range(count):
        ids, skip, include = random_ids(name, rng), rng.random() < 0.7, rng.random() < 0.3
        stops = _stops(rng, _text(real, ids, skip))
        min_tokens = rng.choice((0, 0, 0, rng.randrange(6))) if real.bytewise else 0
        params = SamplingParams(
            max_tokens=10_000, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include,
            skip_special_tokens=skip,
        )  # fmt: skip
        want = _brute_force(real, ids, list(params.stop), min_tokens, include, skip)
        stream = TextStream(real.tokenizer, (), params)
        texts, taken, deltas = [], 0, ""
        while taken < len(ids) and stream.stop is None:
            taken += stream.push([ids[taken]])
            texts.append(stream.text)
            deltas += stream.delta()
        stream.finish()
        texts = [*texts[: len(want.texts) - 1], stream.text]
        assert (texts, stream.stop, taken) == (want.texts, want.stop, want.num_tokens), (ids, stops, skip)
        assert deltas + stream.delta() == stream.text
        found += want.stop is not None
    assert found > count // 3


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_change_no_tokenizer_that_puts_none(name: str, spaces: bool) -> None:
    real, rng = real_tokenizer(name), random.Random(6)
    params = SamplingParams(max_tokens=10_000, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    for _ in range(200):
        ids = random_ids(name, rng)
        stream = TextStream(real.tokenizer, (), params)
        stream.push(ids)
        stream.finish()
        assert stream.text == _text(real, ids, False)
