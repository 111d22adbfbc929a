"""Text as it comes against the decode of all ids, and stop strings against a search of the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from octavo.engine.detokenizer import Detokenizer, TextStream, find_stop, num_held, token_text
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_gguf import byte_alphabet, spell_bytes

CHARACTERS = ["a", "the", "\n", " ", "é", "ß", "你", "好", "か", "😀", "👍🏽", "👨‍👩‍👧", "\ufffd", "\u0301", "ﬁ"]
WORDS = ["ab", "bc", " word", ".", " .", "n't", "s", "STOP", "ST"]
SPECIAL = ["<s>", "</s>", "<think>"]  # the last one is added, and not special


def _finish(vocab: list[str], decoder: Any, **model: Any) -> Tokenizer:
    vocab = list(dict.fromkeys(vocab))
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[], **model))
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(SPECIAL[:2])
    made.add_tokens(SPECIAL[2:])
    return Tokenizer(made, {"bos_token": "<s>", "eos_token": "</s>"})


def _byte_level() -> Tokenizer:
    """All single bytes, parts of characters, whole ones and words."""
    parts = [char.encode() for char in CHARACTERS]
    pieces = [part[i:j] for part in parts for i in range(len(part)) for j in range(i + 1, len(part) + 1)]
    vocab = [*byte_alphabet(), *map(spell_bytes, pieces), *(spell_bytes(word.encode()) for word in WORDS)]
    made = _finish(vocab, decoders.ByteLevel())
    made.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def _sentencepiece() -> Tokenizer:
    vocab = ["▁", "▁▁", *(w.replace(" ", "▁") for w in WORDS), *CHARACTERS, *(f"<0x{i:02X}>" for i in range(256))]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _finish(vocab, decoders.Sequence(steps), byte_fallback=True)


def _others() -> dict[str, Tokenizer]:
    words = [*WORDS, *CHARACTERS, "##ab", "##!", "▁x", "▁", "do", " do not"]
    return {
        "joined": _finish(words, None),
        "wordpiece": _finish(words, decoders.WordPiece("##", cleanup=True)),
        "wordpiece-raw": _finish(words, decoders.WordPiece("##", cleanup=False)),
        "metaspace": _finish(words, decoders.Metaspace("▁", "always")),
        "metaspace-never": _finish(words, decoders.Metaspace("▁", "never")),
        "fused": _finish(words, decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])),
    }


BYTE_LEVEL, SENTENCEPIECE = _byte_level(), _sentencepiece()
ALL = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, **_others()}
TOKENIZERS = pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())


def _fold(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer.pieces, tokenizer.special_ids if skip else frozenset())
    state, deltas = detokenizer.start(prompt), []
    for i in ids:
        state, text = detokenizer.step(state, i)
        deltas.append(text)
    return [*deltas, detokenizer.finish(state)]


def _random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, ids outside the vocabulary, special ones, and the bytes of characters, whole or torn."""
    partial = [i for i in range(tokenizer.vocab_size) if tokenizer.pieces[i].text is None]
    pools = [range(tokenizer.vocab_size + 3), list(range(tokenizer.vocab_size - 3, tokenizer.vocab_size)), partial]
    single = {tokenizer.token_bytes(i): i for i in partial if len(tokenizer.token_bytes(i)) == 1}
    ids: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        pool = rng.choice(pools)
        if pool and rng.random() < 0.6:
            ids += rng.choices(pool, k=rng.randrange(1, 5))
        else:
            data = rng.choice(CHARACTERS[4:]).encode()[: rng.choice((1, 2, 3, 99))]
            ids += [single[bytes([b])] for b in data if bytes([b]) in single]
    return ids


@TOKENIZERS
def test_deltas_together_are_the_decode_of_all_ids(tokenizer):
    rng, num_ids = random.Random(0), 0
    for _ in range(2500):
        ids = _random_ids(tokenizer, rng)
        num_ids += len(ids)
        for skip in (True, False):
            assert "".join(_fold(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip), ids
    assert num_ids > 10_000


@TOKENIZERS
def test_deltas_go_on_where_the_decoded_prompt_ends(tokenizer):
    rng = random.Random(1)
    for _ in range(1000):
        prompt, ids = _random_ids(tokenizer, rng), _random_ids(tokenizer, rng)
        for skip in (True, False):
            before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
            shown = "".join(_fold(tokenizer, ids, prompt, skip))
            hidden = tokenizer.special_ids if skip else frozenset()
            if not Detokenizer(tokenizer.pieces, hidden).start(prompt).pending:
                assert before + shown == whole
            elif tokenizer is BYTE_LEVEL:
                # a character that began in the prompt: the output ends it, or does not
                assert whole in (before.removesuffix("\ufffd") + shown, before + shown)
            else:
                assert whole.endswith(shown)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@example(data=None)
def test_no_delta_holds_a_replacement_before_the_end_of_valid_text(data):
    text = "你好😀👨‍👩‍👧é" if data is None else data.draw(st.text(max_size=20).filter(lambda t: "\ufffd" not in t))
    single = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size) if len(BYTE_LEVEL.token_bytes(i)) == 1}
    deltas = _fold(BYTE_LEVEL, [single[bytes([b])] for b in text.encode()])
    assert "".join(deltas) == text
    # a character comes whole with its last byte
    assert [d for d in deltas if d] == list(text)


def _ids(tokenizer: Tokenizer, *data: bytes | str) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - len(SPECIAL))}
    return [by_bytes[d if isinstance(d, bytes) else d.encode()] for d in data]


def _specials(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.get_vocab()[token] for token in SPECIAL]


def test_text_of_the_prompt_never_leaks():
    half, rest = "你".encode()[:2], "你".encode()[2:]
    prompt = _ids(BYTE_LEVEL, "ab", half)
    assert _fold(BYTE_LEVEL, _ids(BYTE_LEVEL, rest, "bc"), prompt) == ["你", "bc", ""]
    assert _fold(BYTE_LEVEL, _ids(BYTE_LEVEL, "bc"), prompt) == ["bc", ""]
    assert _fold(BYTE_LEVEL, [], prompt) == [""]
    assert _fold(BYTE_LEVEL, _ids(BYTE_LEVEL, half), _ids(BYTE_LEVEL, half)) == ["", "\ufffd"]
    replacement = "\ufffd".encode()
    split = _ids(BYTE_LEVEL, replacement[:2]), _ids(BYTE_LEVEL, replacement[2:])
    assert _fold(BYTE_LEVEL, split[1], split[0]) == ["\ufffd", ""]


def test_text_of_a_prompt_s_run_of_bytes_never_leaks():
    one, two = "é".encode(), "你".encode()
    singles = [bytes([b]) for b in one + two]
    prompt, ids = _ids(SENTENCEPIECE, *singles[:3]), _ids(SENTENCEPIECE, *singles[3:], "ab")
    assert _fold(SENTENCEPIECE, ids, prompt) == ["", "", "你ab", ""]
    assert _fold(SENTENCEPIECE, _ids(SENTENCEPIECE, b"\xff", "ab"), prompt) == ["", "\ufffdab", ""]


def test_leading_space_goes_at_the_start_of_all_text_only():
    word = _ids(SENTENCEPIECE, " word")
    bos, _, think = _specials(SENTENCEPIECE)
    assert _fold(SENTENCEPIECE, word + word) == ["word", " word", ""]
    assert _fold(SENTENCEPIECE, word, [bos]) == ["word", ""]
    assert _fold(SENTENCEPIECE, word, [think]) == [" word", ""]
    assert _fold(SENTENCEPIECE, word, _ids(SENTENCEPIECE, "ab")) == [" word", ""]


def test_spaces_between_added_tokens_are_left_out_when_asked_for():
    joined = ALL["joined"]
    _, eos, think = _specials(joined)
    ids = [*_ids_of(joined, "ab"), eos, think, *_ids_of(joined, "bc")]
    for spaces, text in ((True, "ab </s> <think> bc"), (False, "ab </s><think> bc")):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        stream = TextStream(joined, [], params)
        stream.push(ids)
        stream.finish()
        assert stream.text == text
        # where the decoder puts none, there is none to leave out
        stream = TextStream(BYTE_LEVEL, [], params)
        stream.push(_specials(BYTE_LEVEL))
        stream.finish()
        assert stream.text == "<s></s><think>"


def _ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.get_vocab()[token] for token in tokens]


def test_decoders_that_look_ahead_are_refused():
    made = _finish(["a</w>"], decoders.BPEDecoder("</w>"))
    with pytest.raises(NotImplementedError, match="BPEDecoder"):
        made.token_bytes(0)
    with pytest.raises(NotImplementedError, match="sequence"):
        _finish(["a"], decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])).token_bytes(0)


@TOKENIZERS
def test_start_equals_a_fold_over_the_whole_prompt(tokenizer):
    rng = random.Random(2)
    detokenizer = Detokenizer(tokenizer.pieces, tokenizer.special_ids)
    for _ in range(500):
        prompt = _random_ids(tokenizer, rng)
        state = detokenizer.start()
        for i in prompt:
            state, _ = detokenizer.step(state, i)
        assert detokenizer.start(prompt) == state._replace(foreign=len(state.pending))


# token_text


def test_token_text_joins_to_the_text_and_is_empty_inside_of_a_character():
    data = [bytes([b]) for b in "é你😀".encode()]
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = [*_ids(tokenizer, "ab"), *_ids(tokenizer, *data), *_ids(tokenizer, " word")]
        texts = [token_text(tokenizer.pieces, ids[:i], token) for i, token in enumerate(ids)]
        assert texts == ["ab", "", "é", "", "", "你", "", "", "", "😀", " word"]


def test_token_text_that_does_not_go_on_with_the_context_is_its_own():
    context = _ids(BYTE_LEVEL, "你".encode()[:1])
    assert token_text(BYTE_LEVEL.pieces, context, *_ids(BYTE_LEVEL, "ab")) == "ab"
    assert token_text(BYTE_LEVEL.pieces, context, *_ids(BYTE_LEVEL, b"\xff")) == "\ufffd"
    assert token_text(BYTE_LEVEL.pieces, [], *_ids(BYTE_LEVEL, b"\xbd")) == "\ufffd"
    assert token_text(BYTE_LEVEL.pieces, [], _specials(BYTE_LEVEL)[1]) == "</s>"
    assert token_text(BYTE_LEVEL.pieces, [], 10**6) == ""


# stop strings


@pytest.mark.parametrize(
    ("text", "new", "stops", "found"),
    [
        ("hello", 0, ["lo"], ("lo", 3, 5)),
        ("hello", 4, ["lo"], ("lo", 3, 5)),
        ("hello", 5, ["lo"], None),
        ("hello!", 5, ["lo"], None),
        ("a stop b", 0, ["b", "stop"], ("stop", 2, 6)),
        ("xab", 0, ["b", "ab"], ("b", 2, 3)),
        ("xab", 0, ["ab", "b"], ("ab", 1, 3)),
        ("xabc", 0, ["abc", "ab"], ("ab", 1, 3)),
        ("aaa", 2, ["aa"], ("aa", 1, 3)),
        ("abab", 2, ["ab"], ("ab", 2, 4)),
        ("", 0, ["a"], None),
    ],
)
def test_the_match_that_ends_first_wins_and_ties_go_by_order(text, new, stops, found):
    assert find_stop(text, new, stops) == found


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("abST", ["STOP"], 2),
        ("abSTO", ["STOP", "O!"], 3),
        ("abO", ["STOP", "O!"], 1),
        ("STOP", ["STOP"], 0),
        ("ab", [], 0),
        ("aab", ["aabx", "bc"], 3),
        ("\n", ["\n\n"], 1),
        ("S", ["STOP"], 1),
        ("x", ["STOP"], 0),
    ],
)
def test_held_is_the_longest_proper_prefix(text, stops, held):
    assert num_held(text, stops) == held


def _stream(tokenizer: Tokenizer = BYTE_LEVEL, prompt: Sequence[int] = (), **params: Any) -> TextStream:
    return TextStream(tokenizer, prompt, SamplingParams(max_tokens=100, **params))


def test_a_stop_over_token_borders_is_cut_and_nothing_of_it_was_shown():
    stream = _stream(stop=["STOP"])
    shown = []
    for token in _ids(BYTE_LEVEL, "ab", "ST", "ST", "O", "P", "bc"):
        stream.push([token])
        shown.append(stream.delta())
    assert shown == ["ab", "", "ST", "", "", ""]
    assert (stream.text, stream.stop) == ("abST", "STOP")
    assert stream.finish() == "STOP"
    assert (stream.text, stream.delta()) == ("abST", "")


def test_text_that_turns_out_to_be_no_stop_is_shown_at_once():
    stream = _stream(stop=["STOP", "T!"])
    shown = []
    for token in _ids(BYTE_LEVEL, "ST", "O", "a"):
        stream.push([token])
        shown.append(stream.delta())
    assert shown == ["", "", "STOa"]


def test_held_text_is_shown_at_the_end():
    stream = _stream(stop=["STOP"])
    stream.push(_ids(BYTE_LEVEL, "ab", "ST"))
    assert stream.text == "ab"
    assert stream.finish() is None
    assert stream.text == stream.delta() == "abST"


def test_included_stop_is_shown_and_what_is_behind_is_not():
    stream = _stream(stop=["b."], include_stop_str_in_output=True)
    assert stream.push(_ids(BYTE_LEVEL, "ab", ".", "bc")) == 2
    assert (stream.text, stream.stop) == ("ab.", "b.")
    assert stream.finish() == "b."
    assert stream.text == "ab."
    stream = _stream(stop=["STOP"], include_stop_str_in_output=True)
    stream.push(_ids(BYTE_LEVEL, "ST"))
    # whether it goes on or not, it is shown: nothing to wait for
    assert stream.delta() == "ST"
    stream.finish()
    assert stream.text == "ST"


def test_min_tokens_holds_stop_strings_back():
    stream = _stream(stop=["ab"], min_tokens=3)
    ids = _ids(BYTE_LEVEL, "ab", "ab", "a", "b", "s")
    assert stream.push(ids) == 4
    assert (stream.text, stream.stop) == ("abab", "ab")
    exact = _stream(stop=["ab"], min_tokens=3)
    assert exact.push(_ids(BYTE_LEVEL, "s", "s", "ab", "s")) == 3


def test_a_stop_token_is_not_shown_unless_asked_for():
    word, stop = _ids(BYTE_LEVEL, "ab", "bc")
    for include, text in ((False, "ab"), (True, "abbc")):
        stream = _stream(include_stop_str_in_output=include)
        assert stream.push([word, stop], ended=True) == 2
        stream.finish()
        assert stream.text == text
    eos = _specials(BYTE_LEVEL)[1]
    for skip, text in ((True, "ab"), (False, "ab</s>")):
        stream = _stream(include_stop_str_in_output=True, skip_special_tokens=skip)
        stream.push([word, eos], ended=True)
        stream.finish()
        assert stream.text == text


def test_a_stop_in_pending_bytes_is_found_at_once():
    newline, *word = [SENTENCEPIECE.get_vocab()[token] for token in ("<0x0A>", "ab", "bc")]
    stream = _stream(SENTENCEPIECE, stop=["\n"])
    assert stream.push([word[0], newline, word[1]]) == 2
    assert (stream.text, stream.stop) == ("ab", "\n")
    # and no more is taken
    assert stream.push(word) == 0
    assert stream.finish() == "\n"
    assert stream.text == "ab"


def test_a_stop_that_the_last_pending_text_completes_is_found_at_the_end():
    stream = _stream(stop=["b\ufffd"])
    stream.push(_ids(BYTE_LEVEL, "ab", b"\xe4"))
    assert stream.stop is None
    assert stream.finish() == "b\ufffd"
    assert stream.text == "a"


def test_a_stop_may_not_begin_in_the_prompt():
    stream = _stream(prompt=_ids(BYTE_LEVEL, "ST"), stop=["STOP"])
    stream.push(_ids(BYTE_LEVEL, "O", "P"))
    stream.finish()
    assert (stream.text, stream.stop) == ("OP", None)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "ab", "s", ".", " .", "ST", "O"]), max_size=12),
    stops=st.lists(st.text("ab.sSTO ", min_size=1, max_size=4), max_size=3, unique=True),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    sizes=st.randoms(use_true_random=False),
)
def test_streams_equal_a_search_of_every_whole_text(pieces, stops, min_tokens, include, sizes):
    stream = _stream(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    ids, deltas, kept = _ids(BYTE_LEVEL, *pieces), [], 0
    while kept < len(ids) and stream.stop is None:
        size = sizes.randrange(1, 4)
        kept += stream.push(ids[kept : kept + size])
        deltas.append(stream.delta())
    stream.finish()
    deltas.append(stream.delta())
    text, stop, num_kept = _searched(pieces, stops, min_tokens, include)
    assert (stream.text, stream.stop, kept) == (text, stop, num_kept)
    assert "".join(deltas) == text


def _searched(pieces: list[str], stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None, int]:
    """Looks, after each token, at every end that is new, for every stop string."""
    text = ""
    for i, piece in enumerate(pieces):
        old, text = len(text), text + piece
        for end in range(old + 1, len(text) + 1):
            for stop in stops:
                if i + 1 >= min_tokens and text[:end].endswith(stop):
                    return text[: end if include else end - len(stop)], stop, i + 1
    return text, None, len(pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_streams_of_random_ids_equal_decode(tokenizer):
    rng = random.Random(3)
    for _ in range(500):
        ids = _random_ids(tokenizer, rng)
        stream = _stream(tokenizer, stop=["never seen"])
        deltas = []
        for i in ids:
            stream.push([i])
            deltas.append(stream.delta())
        stream.finish()
        assert "".join([*deltas, stream.delta()]) == stream.text == tokenizer.decode(ids)
