"""Two configurations: nothing apart from itself, and every difference where it was made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from oracle import logits as dense_logits
from tiny import PROMPTS, SHARED, TINY, engine, numpy_weights, spec_of
from typer.testing import CliRunner

from octavo.engine.cli import app
from octavo.engine.config import engine_config
from octavo.engine.lab import comparing as module
from octavo.engine.lab.candidate import Candidate, Run
from octavo.engine.lab.compare_plot import draw
from octavo.engine.lab.comparing import Compared, PromptDifference, compare, differing, rows_of_prompts
from octavo.engine.lab.errors import kl_divergence
from octavo.engine.lab.prompts import read_prompts

TEXTS = [SHARED + [3, 4], [1, 5, 9, 2], PROMPTS[3], SHARED + [3, 9]]  # ids: tiny models have no tokenizer
QUICK: dict[str, Any] = {"max_tokens": 6, "rounds": 1}


class Here:
    """In place of a process: tiny models are quicker made here."""

    def __init__(self, arguments: dict[str, Any]):
        self.candidate = TinyCandidate(arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.candidate, method)(*arguments)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TinyCandidate(Candidate):
    def __init__(self, arguments: dict[str, Any]):
        arguments = dict(arguments)
        weights = numpy_weights(TINY)
        factor = arguments.pop("factor", 1)
        self.llm = engine(**arguments) if factor == 1 else None
        if self.llm is None:
            from octavo.engine import LLM

            weights = weights | {"final_norm": weights["final_norm"] * np.float32(factor)}
            self.llm = LLM(spec_of(TINY), weights=weights, block_size=8, num_gpu_blocks_override=120, **arguments)

    def encode(self, prompts: Any) -> Any:
        return prompts


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setattr(module, "_candidate", Here)
        monkeypatch.setattr(module, "engine_config", lambda factor=1, **arguments: engine_config(**arguments))
        monkeypatch.setattr(Candidate, "_flip_text", lambda self, ids: f"<{ids}>")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_configuration_compared_with_itself_differs_in_nothing(backend):
    a = {"backend": backend}
    found = compare(a, dict(a), TEXTS, **QUICK)
    assert found.differing == {} and found.num_flipped == 0
    assert all(p.first_flip is None and p.gap is None and p.mean_kl == 0 for p in found.prompts)
    assert [x for kl in found.kl for x in kl] == [0.0] * 24
    assert found.a.tokens == found.b.tokens
    assert found.verdict == "same tokens for 4 of 4 prompts; KL 0.0e+00 nats a token, at most 0.0e+00"
    for name in ("weights_bytes", "cache_bytes_per_token", "cache_bytes"):
        assert getattr(found.a, name) == getattr(found.b, name) > 0
    assert all(x > 0 for run in (found.a, found.b) for x in (run.ttft_ms, run.per_token_ms, run.peak_bytes))
    assert json.loads(json.dumps(found.to_json()))["max_kl"] == 0


def test_what_differs_is_found_where_it_is_made():
    """B's logits are A's by 1.05: a KL that numpy can tell from dense float64 logits, and flips at no token."""
    backend = {"backend": BACKENDS[0]}
    found = compare(backend, backend | {"factor": 1.05}, TEXTS, **QUICK)
    assert found.differing == {"factor": (None, 1.05)}
    assert found.num_flipped == 0 and found.a.tokens == found.b.tokens
    for ids, made, kl in zip(TEXTS, found.a.tokens, found.kl, strict=True):
        a_TV = dense_logits(spec_of(TINY), numpy_weights(TINY), [*ids, *made])[len(ids) - 1 : -1]
        np.testing.assert_allclose(kl, kl_divergence(a_TV * 1.05, a_TV), rtol=1e-3)


def test_flips_are_told_with_tokens_and_gap():
    """B thinks the opposite of A: every token is another one, and the gap is between A's logits of both."""
    backend = {"backend": BACKENDS[0]}
    found = compare(backend, backend | {"factor": -1.0}, TEXTS, **QUICK)
    assert found.num_flipped == found.num_positions == 24
    for ids, made, other, p in zip(TEXTS, found.a.tokens, found.b.tokens, found.prompts, strict=True):
        logits_V = dense_logits(spec_of(TINY), numpy_weights(TINY), ids)[-1]
        assert (p.first_flip, p.a_token, p.b_token) == (0, f"<{made[0]}>", f"<{other[0]}>")
        assert p.gap == pytest.approx(logits_V.max() - logits_V.min(), rel=1e-4) and not p.is_tie
    assert found.verdict.startswith("same tokens for 0 of 4 prompts (first flip at token 0)")
    assert [row["first flip"] for row in rows_of_prompts(found)] == [0] * 4


def test_kl_is_shown_by_position():
    kl = [[1.0] * 10, [3.0] * 10, [8.0]]
    found = Compared({}, [], kl, 0, None, None)
    rows = found.by_position()
    assert [r["tokens"] for r in rows] == ["0-1", "2-3", "4-5", "6-7", "8-9"]
    assert (rows[0]["mean KL"], rows[0]["max KL"], rows[1]["mean KL"]) == (16 / 5, 8.0, 2.0)


def test_lines_that_differ_are_named_and_defaults_are_not():
    assert differing({"block_size": 16, "dtype": "float32"}, {"dtype": "bfloat16"}) == {
        "dtype": ("float32", "bfloat16")
    }
    assert differing({"max_num_seqs": 8}, {}) == {"max_num_seqs": (8, 32)}


def test_other_vocabularies_are_refused(tmp_path):
    candidate = TinyCandidate({"backend": BACKENDS[0]})
    np.save(tmp_path / "0.npy", np.zeros((2, 11), np.float32))
    with pytest.raises(ValueError, match="vocabularies of 11 and 97"):
        candidate.compare_logits([[1]], [[1, 2]], [[1, 2]], str(tmp_path))


@pytest.mark.parametrize(
    ("b", "more", "message"),
    [
        ({"zz": 3}, {}, "unknown engine argument 'zz'"),
        ({"layout": "h2o:budget=0"}, {}, "budget 0"),
        ({}, {"rounds": 0}, "rounds 0"),
        ({}, {"max_tokens": 0}, "max_tokens 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(monkeypatch, b, more, message):
    monkeypatch.setattr(module, "_candidate", lambda arguments: pytest.fail("a candidate was started"))
    with pytest.raises(ValueError, match=message):
        compare({"backend": BACKENDS[0]}, {"backend": BACKENDS[0]} | b, TEXTS, **more)


def test_the_command_prints_verdict_lines_and_tables(tmp_path, monkeypatch):
    kl, run = [[0.0, 0.5]], Run([[1, 2]], 1.0, 2.0, 3.0, 2**21, 4.0, 5, 6)
    prompt = PromptDifference(3, 2, 1, " a", " b", 1e-5, 0.25)
    found = Compared({"block_size": (8, 16)}, [prompt], kl, 1, run, replace(run, ttft_ms=2.5))
    monkeypatch.setattr(module, "compare", lambda *args, **more: found)
    lines = CliRunner().invoke(app, ["compare", "a.toml", "b.toml"]).stdout.splitlines()
    assert lines[0].startswith(
        "same tokens for 0 of 1 prompts (first flip at token 1; 1 of the flips are ties); KL 2.5"
    )
    assert lines[1] == "differs: block_size = 8 in A, 16 in B"
    assert any("ttft_ms" in line and "2.50" in line for line in lines)
    assert any("2.0 MiB" in line for line in lines)


def test_prompts_come_as_lines_or_as_json(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('"one"\n{"prompt": "two"}\n')
    assert read_prompts(tmp_path / "a.txt") == read_prompts(tmp_path / "b.jsonl") == ["one", "two"]
    (tmp_path / "c.jsonl").write_text('{"text": "two"}\n')
    with pytest.raises(ValueError, match="line 1 has no prompt"):
        read_prompts(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text('"one"\n\n"two\n')
    with pytest.raises(ValueError, match=r"d\.jsonl: line 3 is no valid JSON"):
        read_prompts(tmp_path / "d.jsonl")


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    (tmp_path / "b.toml").write_text("model smollm2")
    for name, why in (("a.toml", "there is no file"), ("b.toml", "at line 1")):
        with pytest.raises(ValueError, match=rf"{name} is no TOML file of engine arguments .*{why}"):
            compare(tmp_path / name, {})


def test_a_prompt_of_no_token_or_of_one_too_large_is_refused():
    candidate = TinyCandidate({"backend": BACKENDS[0]})
    for prompts, message in (
        ([[1], []], "the prompt is empty"),
        ([[1, 97]], "token id 97, and this model's vocabulary has 97"),
    ):
        with pytest.raises(ValueError, match=message):
            candidate.run(prompts, 2, 1)


def test_the_picture_has_the_mean_of_those_that_go_so_far(tmp_path, monkeypatch):
    """And both costs, and a line where tokens first differ."""
    run = Run([[1, 2, 3], [1]], 1.0, 2.0, 3.0, 4, 5.0, 6, 2**30)
    prompts = [PromptDifference(3, 3, 1, " a", " b", 0.5, 0.5), PromptDifference(3, 1)]
    found = Compared({}, prompts, [[0.0, 0.5, 1.0], [4.0]], 1, run, replace(run, peak_bytes=3 * 2**30))
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **more: drawn.append(self))
    draw(found, tmp_path / "x.png")
    left, *costs = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert lines["mean of the prompts"] == [2.0, 0.5, 1.0]
    assert any(line.get_linestyle() == ":" and list(line.get_xdata()) == [1, 1] for line in left.lines)
    assert [[bar.get_height() for bar in axes.patches] for axes in costs] == [[1.0, 1.0], [2.0, 2.0], [1.0, 3.0]]


@pytest.mark.slow
def test_configurations_of_smollm2_are_compared_on_the_command_line(tmp_path):
    """Each in a process of its own; half the bytes of a weight move the distribution a little."""
    (tmp_path / "a.toml").write_text(f'model = "{embedded_model()}"\nbackend = "{BACKENDS[0]}"\nmax_model_len = 128\n')
    (tmp_path / "b.toml").write_text((tmp_path / "a.toml").read_text() + 'dtype = "bfloat16"\n')
    (tmp_path / "prompts").write_text("The printer folded the sheet\ndef fold(sheet):\n")
    a, b, picture = (str(tmp_path / name) for name in ("a.toml", "b.toml", "p.png"))
    more = ["--prompts", str(tmp_path / "prompts"), "--max-tokens", "8", "--rounds", "1"]
    run = CliRunner().invoke(app, ["compare", a, b, *more, "--plot", picture, "--json"])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads(run.stdout)
    assert found["verdict"].startswith("same tokens for ") and found["differing"] == {"dtype": ["auto", "bfloat16"]}
    assert 1e-6 < found["mean_kl"] < 1e-2 and len(found["kl"]) == 2
    assert found["b"]["weights_bytes"] == pytest.approx(found["a"]["weights_bytes"] / 2, rel=1e-3)
    assert found["b"]["cache_bytes_per_token"] * 2 == found["a"]["cache_bytes_per_token"]
