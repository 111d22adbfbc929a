"""Beam search against brute force in float64, against transformers, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from oracle import logits
from tiny import PROMPTS, TINY, VOCAB, engine, numpy_weights, spec_of
from tolerances import tolerance

from octavo.engine import LLM, BeamSearchParams, SamplingParams
from octavo.engine.beam_search import BeamSearchOutput

FULL = replace(TINY, windows=())


@dataclass
class Found:
    tokens: list[int]
    logprob: float
    score: float
    ended: bool


def next_logprobs(ids: list[int]) -> np.ndarray:
    x = logits(spec_of(TINY), numpy_weights(TINY), ids)[-1]
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def brute_force(prompt: list[int], width: int, steps: int, penalty: float, ends: frozenset[int]) -> list[Found]:
    """The definition, without a cache and without an early end: every token behind every beam, then the best ones."""
    live, done = [Found([], 0.0, 0.0, False)], []
    for length in range(1, steps + 1):
        grown = []
        for beam in live:
            row = next_logprobs(prompt + beam.tokens)
            for token in np.argsort(-row, kind="stable")[: max(2 * width, width + len(ends))].tolist():
                logprob = beam.logprob + row[token]
                ended = token in ends
                (done if ended else grown).append(
                    Found([*beam.tokens, token], logprob, logprob / length**penalty, ended)
                )
        live = sorted(grown, key=lambda beam: -beam.logprob)[:width]
    return sorted(done + live, key=lambda beam: -beam.score)[:width]


def assert_equal(output: BeamSearchOutput, want: list[Found]) -> None:
    scores = [s.score for s in output.sequences]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(scores, [w.score for w in want], atol=1e-4)
    np.testing.assert_allclose([s.cum_logprob for s in output.sequences], [w.logprob for w in want], atol=1e-4)
    got = {tuple(s.tokens[s.num_prompt_tokens :]) for s in output.sequences}
    assert got == {tuple(w.tokens) for w in want}
    for s in output.sequences:
        assert s.tokens[: s.num_prompt_tokens] == output.prompt_token_ids
        assert (s.finish_reason, s.stop_reason) in (("length", None), ("stop", s.tokens[-1]))
        made = sum(entry[token].logprob for entry, token in zip(s.logprobs, s.output_token_ids, strict=True))
        assert abs(made - s.cum_logprob) < 1e-6


# what is particular to a backend is in one of each: compiling is slow
@pytest.mark.parametrize(
    "backend, width, penalty",
    [(b, *each) for b in BACKENDS for each in ((3, 1.0), (1, 1.0), (3, 0.0), (3, -1.0))[: 1 if b == "jax" else 4]],
)
def test_beams_are_those_of_brute_force(backend: str, width: int, penalty: float) -> None:
    llm = engine(backend=backend)
    params = BeamSearchParams(beam_width=width, max_tokens=5, length_penalty=penalty, include_stop_str_in_output=True)
    plain = [brute_force(prompt, width, 5, penalty, frozenset()) for prompt in PROMPTS[:3]]
    # ends of text that would have been in the beams, and some that would not
    ends = frozenset(t for found in plain for t in found[0].tokens[1:3]) | {0, 1}
    llm.eos_ids = ends
    outputs = llm.beam_search(PROMPTS[:3], params)
    for prompt, output in zip(PROMPTS, outputs):
        assert_equal(output, brute_force(prompt, width, 5, penalty, ends))
    assert any(s.finish_reason == "stop" for o in outputs for s in o.sequences)
    ignoring = llm.beam_search(PROMPTS[:3], replace(params, ignore_eos=True))
    for output, want in zip(ignoring, plain):
        assert_equal(output, want)
    assert not llm.has_unfinished_requests()


def test_a_beam_as_wide_as_the_vocabulary_misses_nothing() -> None:
    prompt = PROMPTS[0]
    first = next_logprobs(prompt)
    second = np.stack([next_logprobs([*prompt, token]) for token in range(VOCAB)])
    total = (first[:, None] + second).reshape(-1)
    best = np.argsort(-total)[:VOCAB]
    llm = engine(max_logprobs=-1)
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=VOCAB, max_tokens=2, length_penalty=0.0))
    np.testing.assert_allclose([s.cum_logprob for s in output.sequences], total[best], atol=1e-4)
    got = [divmod_of(s.output_token_ids) for s in output.sequences]
    assert set(got[:20]) <= set(best[:22].tolist())


def divmod_of(ids: list[int]) -> int:
    return ids[0] * VOCAB + ids[1]


def test_a_width_of_one_is_greedy() -> None:
    llm = engine()
    outputs = llm.beam_search(PROMPTS[:4], BeamSearchParams(beam_width=1, max_tokens=6))
    greedy = llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert [o.sequences[0].output_token_ids for o in outputs] == [list(o.outputs[0].token_ids) for o in greedy]


def test_the_prompt_is_computed_once_and_a_beam_its_last_block() -> None:
    size, steps, width, prompt = 8, 12, 3, PROMPTS[3]
    llm = engine(FULL)
    llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True))
    lengths = range(len(prompt) + 1, len(prompt) + steps)
    want = len(prompt) + width * sum(n - (n - 1) // size * size for n in lengths)
    assert llm.scheduler.num_prompt_tokens == want <= len(prompt) + width * (steps - 1) * size


def test_prompts_are_searched_together() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    together, apart = engine(FULL), engine(FULL)
    one = together.beam_search(PROMPTS[:2], params)
    other = apart.beam_search(PROMPTS[:2], params, concurrency_limit=1)
    for a, b in zip(one, other, strict=True):
        assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
    assert together.scheduler.step < apart.scheduler.step


def test_ends_of_text_are_left_out_unless_asked_for() -> None:
    llm = engine()
    (plain,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=1, max_tokens=3))
    end = plain.sequences[0].output_token_ids[1]
    llm.eos_ids = frozenset({end})
    for keep in (False, True):
        params = BeamSearchParams(beam_width=1, max_tokens=3, include_stop_str_in_output=keep, length_penalty=0.0)
        (output,) = llm.beam_search([PROMPTS[0]], params)
        stopped = [s for s in output.sequences if s.finish_reason == "stop"]
        assert stopped and all((end in s.output_token_ids) == keep for s in stopped)
        assert all(s.stop_reason == end and len(s.logprobs) == len(s.output_token_ids) + (not keep) for s in stopped)


def test_the_length_of_the_model_ends_a_beam() -> None:
    llm = engine(max_model_len=16)
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=50))
    assert all(len(s.tokens) == 16 and s.finish_reason == "length" for s in output.sequences)
    with pytest.raises(ValueError, match="17 tokens leaves no room"):
        llm.beam_search([list(range(17))], BeamSearchParams(beam_width=2, max_tokens=5))


BAD = {
    "beam_width": ({"beam_width": 0}, "beam_width 0"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens 0"),
    "temperature": ({"temperature": 0.7}, "temperature 0.7"),
    "penalty": ({"length_penalty": float("nan")}, "length_penalty nan"),
    "unknown": ({"width": 3}, "width"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_params_are_named(name: str) -> None:
    wrong, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | wrong))


def test_more_logprobs_than_the_engine_gives_are_refused() -> None:
    with pytest.raises(ValueError, match="beam_width 11 needs 22 logprobs a step: max_logprobs is 20"):
        engine().beam_search([[1]], BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(ValueError, match="not a BeamSearchParams"):
        engine().beam_search([[1]], SamplingParams())


def test_a_round_that_another_call_ends_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    generate = llm.generate

    def ended(*args: Any, **kwargs: Any) -> Any:
        (output,) = generate(*args, **kwargs)
        lost = replace(output.outputs[0], token_ids=[], logprobs=[], finish_reason="error")
        return [replace(output, outputs=[lost])]

    monkeypatch.setattr(llm, "generate", ended)
    with pytest.raises(RuntimeError, match="ended by another call"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=2, max_tokens=2))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_no_scores(mode: str) -> None:
    with pytest.raises(ValueError, match=f"logprobs_mode '{mode}'"):
        engine(logprobs_mode=mode).beam_search([[1]], BeamSearchParams(beam_width=2, max_tokens=2))


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_transformers_finds_the_same(penalty: float, tmp_path: Path) -> None:
    """With early_stopping="never", which is the definition: nothing ends before no beam can win any more."""
    torch, tiny_hf = pytest.importorskip("torch"), pytest.importorskip("tiny_hf")
    model = tiny_hf.make("Llama", seed=3)
    tiny_hf.save(model, tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, block_size=8, max_num_seqs=8, max_model_len=128,
        num_gpu_blocks_override=200,
    )  # fmt: skip
    prompts = [[(7 * i + k) % 512 for i in range(11 + 9 * k)] for k in range(2)]
    # it forgets ends of text that are not among its 4 best candidates: without a penalty they may win
    for ends in ([], [5, 17, 100, 201, 300, 444])[: 2 if penalty else 1]:
        llm.eos_ids = frozenset(ends)
        for prompt in prompts:
            theirs = theirs_of(model, torch, prompt, penalty, ends)
            params = BeamSearchParams(
                beam_width=4, max_tokens=8, length_penalty=penalty, include_stop_str_in_output=True
            )
            (ours,) = llm.beam_search([prompt], params)
            assert [s.output_token_ids for s in ours.sequences] == theirs[0]
            np.testing.assert_allclose(
                [s.score for s in ours.sequences], theirs[1], atol=tolerance("float32", "logits")
            )


def theirs_of(
    model: Any, torch: Any, prompt: list[int], penalty: float, ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4, max_new_tokens=8,
        do_sample=False, early_stopping="never", length_penalty=penalty, eos_token_id=ends or None, pad_token_id=511,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    rows = [row[len(prompt) :].tolist() for row in made.sequences]
    cut = [row[: next((i + 1 for i, t in enumerate(row) if t in ends), 8)] for row in rows]
    return cut, made.sequences_scores.tolist()
