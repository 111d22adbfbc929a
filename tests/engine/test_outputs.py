"""Outputs: the form of logprobs, and what a reader sees."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from octavo.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, logprobs_of
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_gguf import byte_alphabet, spell_bytes

HALVES = "你".encode()[:2], "你".encode()[2:]


def _tokenizer() -> Tokenizer:
    tokens = [*byte_alphabet(), *(spell_bytes(data) for data in (HALVES[0], b" word"))]
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made)


TOKENIZER = _tokenizer()
IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}


def _entry(
    token: int, top: dict[int, float], *, logprob: float = -0.5, rank: int = 1, context: list[int] | None = None
):
    return logprobs_of(
        token, logprob, rank, list(top), list(top.values()), tokenizer=TOKENIZER, context_ids=context or []
    )


def test_sampled_token_is_first_and_counted_once():
    a, b, c = IDS[b"a"], IDS[b"b"], IDS[b"c"]
    entry = _entry(b, {a: -0.2, b: -0.5, c: -3.0}, rank=2)
    assert list(entry) == [b, a, c]
    assert entry == {b: Logprob(-0.5, 2, "b"), a: Logprob(-0.2, 1, "a"), c: Logprob(-3.0, 3, "c")}


def test_sampled_token_outside_of_the_top_makes_one_more():
    a, b, c = IDS[b"a"], IDS[b"b"], IDS[b"c"]
    entry = _entry(c, {a: -0.2, b: -0.5}, logprob=-7.0, rank=9)
    assert list(entry) == [c, a, b]
    assert entry[c] == Logprob(-7.0, 9, "c")


def test_logprobs_0_has_the_sampled_token_only():
    assert _entry(IDS[b"a"], {}) == {IDS[b"a"]: Logprob(-0.5, 1, "a")}


def test_equal_logprobs_share_the_last_rank():
    top = {IDS[b"a"]: -1.0, IDS[b"b"]: -1.0, IDS[b"c"]: -2.0, IDS[b"d"]: -2.0, IDS[b"e"]: -9.0}
    entry = _entry(IDS[b"a"], top, logprob=-1.0, rank=2)
    assert [entry[i].rank for i in top] == [2, 2, 4, 4, 5]


def test_pieces_of_a_character_are_decoded_behind_their_context():
    first, second = IDS[HALVES[0]], IDS[HALVES[1]]
    word = IDS[b" word"]
    assert _entry(first, {word: -1.0}, context=[word])[first].decoded_token == ""
    entry = _entry(second, {word: -1.0, first: -2.0}, context=[word, first])
    assert entry[second].decoded_token == "你"
    assert entry[word].decoded_token == " word"
    assert b"".join(map(TOKENIZER.token_bytes, (word, first, second))).decode() == " word你"


def test_without_a_tokenizer_there_is_no_text():
    entry = logprobs_of(5, -1.0, 1, [5, 6], [-1.0, -2.0], tokenizer=None, context_ids=[])
    assert entry == {5: Logprob(-1.0, 1, None), 6: Logprob(-2.0, 2, None)}


def _output(**changes) -> CompletionOutput:
    return CompletionOutput(index=0, text=" Paris", token_ids=[1, 2], **changes)


def test_reprs_show_what_matters_in_one_line():
    assert repr(_output()) == "CompletionOutput(index=0, text=' Paris', token_ids=[1, 2], finish_reason=None)"
    ended = _output(finish_reason="stop", stop_reason=7, cumulative_logprob=-1.25, logprobs=[{}])
    assert repr(ended) == (
        "CompletionOutput(index=0, text=' Paris', token_ids=[1, 2], finish_reason='stop', stop_reason=7, "
        "cumulative_logprob=-1.2500)"
    )
    output = RequestOutput("3", None, list(range(100)), [ended], True, num_cached_tokens=16)
    assert repr(output) == (
        "RequestOutput(request_id='3', prompt=[0, 1, 2, 3, 4, 5, 6, 7, ... 84 more ..., 92, 93, 94, 95, 96, 97, 98, 99]"
        f", finished=True, num_cached_tokens=16, outputs=[{ended!r}])"
    )
    assert "prompt='hi'" in repr(RequestOutput("3", "hi", [1], [], False))
    assert repr(Logprob(-0.5, 2, " a")) == "Logprob(-0.5000, rank=2, ' a')"


def test_finished_is_having_a_reason():
    assert not _output().finished
    assert _output(finish_reason="length").finished


def test_metrics_know_durations_once_both_ends_are_known():
    assert RequestMetrics(arrival_time=1.0).time_to_first_token is None
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finished_time=3.0)
    assert (metrics.time_to_first_token, metrics.latency) == (0.5, 2.0)
