"""octavo layouts: what it measures is right, and what a wrong layout does is found."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from backends import BACKENDS, QUIET
from embedded import embedded_model
from oracle import logits
from tiny import PROMPTS, TINY, numpy_weights, spec_of
from typer.testing import CliRunner

from octavo.engine.backend import get_backend
from octavo.engine.cli import app
from octavo.engine.lab.layout_checks import check_layout
from octavo.engine.lab.layouts import Measured, measure_layouts
from octavo.engine.lab.layouts_plot import draw
from octavo.engine.lab.prompts import tokenized
from octavo.engine.lab.text import TEXT as TEXT_OF_OURS
from octavo.models.interface import AttentionSpec
from octavo.models.layouts import LAYOUTS, HeadMajor, TokenMajor

SPEC = AttentionSpec(num_kv_heads=2, group_size=3, k_dim=16, v_dim=16, scale=0.25, window=None)
TEXT = PROMPTS[3] + PROMPTS[2]


def measured(*layouts: str, text: list[int] = TEXT) -> list[Measured]:
    return measure_layouts(
        spec_of(TINY), layouts, weights=numpy_weights(TINY), text=text, window=60, prompt=30, contexts=(16, 64),
        memory=2**20, max_model_len=128, block_size=8, **QUIET,
    )  # fmt: skip


@pytest.fixture(scope="module")
def some() -> dict[str, Measured]:
    return {
        m.layout: m
        for m in measured("head_major", "k_transposed", "int8", "kivi", "streaming_llm:window=12", "h2o:budget=32")
    }


def test_quality_is_that_of_the_oracle(some):
    """Perplexity of the exact layout: each window's second half, in float64."""
    nll = []
    for start in (0, 60):
        ids = TEXT[start : start + 60]
        rows = logits(spec_of(TINY), numpy_weights(TINY), ids)
        for i in range(30, len(ids)):
            row = rows[i - 1] - rows[i - 1].max()
            nll.append(np.log(np.exp(row).sum()) - row[ids[i]])
    assert some["token_major"].num_tokens == len(nll) == 60
    assert some["token_major"].perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)


def test_exact_ones_are_zero_and_lossy_ones_in_their_order(some):
    assert all(some[name].exact and some[name].kl < 1e-9 for name in ("token_major", "head_major", "k_transposed"))
    assert not any(some[name].exact for name in ("int8", "kivi", "streaming_llm:window=12"))
    assert 0 < some["int8"].kl < some["kivi"].kl
    assert some["int8"].flip_rate < some["kivi"].flip_rate
    assert all(m.kl <= m.max_kl for m in some.values())


def test_bytes_are_worked_out_by_hand(some):
    """4 layers of 2 heads of 8, keys and values; a MiB holds so many blocks of 8 tokens."""
    assert some["token_major"].bytes_a_token == 4 * 2 * 2 * 8 * 4
    assert some["int8"].bytes_a_token == 4 * 2 * 2 * (8 + 4)
    # codes; of keys a range for 8 tokens, of values one for each
    assert some["kivi"].bytes_a_token == 4 * 2 * (2 * 2 + 8 * 4 / 8 + 4)
    assert some["kivi"].bytes_a_request == 4 * 2 * 8 * 8 * 4
    assert some["int8"].bytes_a_request == 0


def test_a_dropped_token_takes_nothing(some):
    """Of 128 tokens: two layers that look back on all hold 32, with a position and a weight for each of 2 heads."""
    assert some["token_major"].bytes_a_token_sent == some["token_major"].bytes_a_token == 512
    held = 2 * (128 + 2 * 8) * 32 + 2 * 128 * 128
    assert some["h2o:budget=32"].bytes_a_token_sent * 128 == held


def test_blocks_that_fit_follow_from_bytes(some):
    """Of a MiB."""
    for name in ("token_major", "int8", "kivi"):
        assert some[name].num_blocks == int(2**20 / 8 / some[name].bytes_a_token)


def test_what_is_dropped_is_told(some):
    assert some["int8"].keeps == "all"
    assert some["streaming_llm:window=12"].keeps == "first 4, last 12"
    assert all(set(m.step_ms) == {16, 64} and min(m.step_ms.values()) > 0 for m in some.values())


def test_a_text_without_anything_behind_a_prompt_is_refused():
    with pytest.raises(ValueError, match="the text has 20 tokens, and a prompt takes 30"):
        measured(text=TEXT[:20])
    with pytest.raises(ValueError, match="a window of 60 tokens has nothing behind a prompt of 60"):
        measure_layouts(spec_of(TINY), (), text=TEXT, window=60, prompt=60)


def test_the_picture_shows_every_layout(some, tmp_path):
    draw(list(some.values()), tmp_path / "x.png", "tiny")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_the_table_passes_the_checks(name):
    checks = check_layout(LAYOUTS[name](8), get_backend(BACKENDS[0]), SPEC)
    assert all(c.ok for c in checks), checks


@dataclass(frozen=True)
class Astray(TokenMajor):
    """Writes into the next block too, whoever has it."""

    def attention(self, ops, cache, parts, step, spec):
        out, cache = super().attention(ops, cache, parts, step, spec)
        after = ((step.blocks_T + 1) % cache["v"].shape[0], step.offsets_T)
        return out, cache | {"v": ops.scatter(cache["v"], after, parts["v"])}


@dataclass(frozen=True)
class ByStep(TokenMajor):
    """Rounds to the greatest number of the step: what a token becomes depends on its neighbours."""

    def attention(self, ops, cache, parts, step, spec):
        unit = ops.xp.max(ops.xp.abs(parts["v"])) / 7
        parts = parts | {"v": ops.xp.round(parts["v"] / unit) * unit}
        return super().attention(ops, cache, parts, step, spec)


@dataclass(frozen=True)
class BlocksBehind(HeadMajor):
    """Has its blocks in the second axis."""

    def spec(self, attention, num_blocks):
        arrays = super().spec(attention, num_blocks)
        return {n: replace(s, shape=(s.shape[1], s.shape[0], *s.shape[2:])) for n, s in arrays.items()}


@dataclass(frozen=True)
class Unseen(TokenMajor):
    """Adds slots that nobody wrote, times nothing."""

    def attention(self, ops, cache, parts, step, spec):
        out, cache = super().attention(ops, cache, parts, step, spec)
        return out + 0 * ops.xp.max(cache["v"]), cache


@dataclass(frozen=True)
class Unturned(TokenMajor):
    """Forgets rope."""

    def attention(self, ops, cache, parts, step, spec):
        return super().attention(ops, cache, parts, step, replace(spec, rope=None))


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        (Astray, "own blocks only", "v: blocks of nobody were written"),
        (ByStep, "any chunks", "in one step attention differs"),
        (BlocksBehind, "blocks in front", "of k, v the first axis is not the number of blocks"),
        (Unseen, "attention", "nan: it reads slots that nobody wrote"),
    ],
)
def test_a_wrong_layout_is_found(kind, check, message):
    wrong = [c for c in check_layout(kind(8), get_backend(BACKENDS[0]), SPEC) if not c.ok]
    assert wrong and wrong[0].check == check and message in wrong[0].found


def test_nan_is_said_once_and_not_taken_for_a_wrong_copy():
    """It is equal to nothing, so a comparison of two runs would find it different."""
    found = check_layout(Unseen(8), get_backend(BACKENDS[0]), SPEC)
    assert [c.check for c in found if not c.ok] == ["attention"] and found[-1].check == "own blocks only"


def test_what_forgets_rope_is_not_called_exact():
    found = {c.check: c.found for c in check_layout(Unturned(8), get_backend(BACKENDS[0]), SPEC)}
    assert re.fullmatch(r"lossy: on noise [2-9]\d\.\d% from exact .*", found["attention"])


def test_on_the_command_line_a_wrong_layout_ends_with_status_1(tmp_path):
    """A layout of one's own, from a file, beside one of the table."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    model, run = str(embedded_model()), CliRunner().invoke
    found = run(app, ["layouts", model, "--check", "--json", "--layout", "int8", "--layout", f"{file}:Mine"])
    assert found.exit_code == 1, found.output
    checks = json.loads(found.stdout)
    assert all(c["ok"] for c in checks["int8"])
    assert [c["check"] for c in checks[f"{file}:Mine"] if not c["ok"]] == ["attention"]


MINE = """
from __future__ import annotations

from dataclasses import dataclass

from octavo.models.layouts import TokenMajor


@dataclass(frozen=True)
class Mine(TokenMajor):
    factor: float = 3.0

    def attention(self, ops, cache, parts, step, spec):
        return super().attention(ops, cache, parts | {"v": self.factor * parts["v"]}, step, spec)
"""


@pytest.mark.slow
def test_int8_costs_smollm2_less_than_a_thousandth_of_a_nat():
    """On the shipped text; the exact ones cost nothing."""
    model = str(embedded_model())
    (ids,) = tokenized(model, [TEXT_OF_OURS])
    found = measure_layouts(model, ("head_major", "int8"), text=ids, window=544, contexts=(16,), **QUIET)
    exact, head_major, narrow = found
    assert exact.exact and head_major.exact
    assert 0 < narrow.kl < 1e-3
    assert narrow.num_tokens == 64
