"""Commands of the laboratory: what they are told wrong is said before anything runs; what they find is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backends import BACKENDS
from embedded import embedded_model
from typer.testing import CliRunner

from octavo.engine.backend import get_backend
from octavo.engine.cli import app
from octavo.engine.lab.layouts import Measured


def run(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('model = "smollm2"\n')
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "log").write_text('{"header": {}}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare a.toml a.toml --plot nowhere/x.png", "nowhere/x.png: there is no folder nowhere"),
        ("compare a.toml a.toml --plot x.zip", "x.zip names no picture"),
        ("compare nope.toml a.toml", "nope.toml is no TOML file of engine arguments"),
        ("compare --block-size 8 nope.toml a.toml", "nope.toml is no TOML file of engine arguments"),
        ("compare a.toml a.toml --prompts binary", "binary is no text in UTF-8"),
        ("layouts --plot nowhere/x.png", "nowhere/x.png: there is no folder nowhere"),
        ("layouts --check --plot x.png --window 9", "--check measures nothing: leave out --window, --plot"),
        ("layouts --check --dtype bfloat16", "dtype 'bfloat16': layouts are checked in float32"),
        ("layouts one --model two", "two models, 'one' and --model 'two'"),
        ("layouts --text binary", "binary is no text in UTF-8"),
        ("crosscheck --backend torch", "--backend 'torch': say it in --against"),
        ("crosscheck --threads 1 no/such.gguf", "no/such.gguf"),
        ("certify torch --attention cpu", "--attention 'cpu': say it as BACKEND"),
        ("certify --threads 1 jix", "'jix' is no implementation"),
        ("replay --threads 1 binary", "binary is no text in UTF-8"),
        ("simulate binary", "binary: line 1: 'utf-8' codec"),
        ("simulate a.toml --cost {", "--cost '{' is no valid JSON"),
        ("simulate a.toml --cost binary", "binary is no text in UTF-8"),
        ("simulate log --num-blocks 9 --no-overlap", "log is a step log, which says all but the policy: leave out"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(files, monkeypatch, command, message):
    monkeypatch.setattr("octavo.engine.lab.comparing._candidate", lambda _: pytest.fail("a candidate was started"))
    found = run(*command.split())
    assert found.exit_code == 1 and found.stderr.startswith("error: ") and found.stderr.count("\n") == 1, found.output
    assert message in found.stderr


def test_a_check_runs_on_the_backend_and_attention_that_are_named(monkeypatch):
    """Which stand in front, where their values might be taken for the model."""
    asked = []

    def get(name, options):
        asked.append((name, options["attention"], options["dtype"]))
        return get_backend(name, options)

    monkeypatch.setattr("octavo.engine.backend.get_backend", get)
    words = ["layouts", "--check", "--backend", BACKENDS[0], "--attention", "reference"]
    found = run(*words, str(embedded_model()), "--layout", "token_major", "--json")
    assert found.exit_code == 0, found.output
    assert asked == [(BACKENDS[0], "reference", "float32")]
    assert len(json.loads(found.stdout)["token_major"]) == 6


def test_what_is_measured_is_what_is_asked_for_and_is_printed(files, monkeypatch):
    """Of a stand-in for the measuring itself."""
    asked = {}
    common = {"keeps": "all", "bytes_a_token_sent": 9.0, "bytes_a_request": 0, "num_tokens": 7, "perplexity": 23.5}
    exact = Measured(layout="token_major", bytes_a_token=46080.0, num_blocks=1456, num_requests=2.8,
                     step_ms={16: 1.25}, kl=0.0, max_kl=0.0, flip_rate=0.0, **common)  # fmt: skip
    lossy = Measured(layout="int8", bytes_a_token=12240.0, num_blocks=5482, num_requests=10.7,
                     step_ms={16: 2.5}, kl=1e-3, max_kl=2e-2, flip_rate=0.031, **common)  # fmt: skip

    def measure(model, layouts, **more):
        asked.update(more, model=model, layouts=list(layouts))
        return [exact, lossy]

    monkeypatch.setattr("octavo.engine.lab.layouts.measure_layouts", measure)
    monkeypatch.setenv("COLUMNS", "160")
    (files / "text").write_text("The printer folded the sheet")
    model = str(embedded_model())
    words = (
        "--layout int8 --contexts 16,1K --memory 2M --max-model-len 4K --window 30 --prompt 20 --threads 1 --text text"
    )
    found = run("layouts", *words.split(), model, "--plot", "x.png")
    assert found.exit_code == 0, found.output
    del asked["tell"]
    assert len(asked.pop("text")) == 5
    assert asked == {"model": model, "layouts": ["int8"], "contexts": [16, 1024], "memory": 2**21,
                     "max_model_len": 4096, "window": 30, "prompt": 20, "threads": 1}  # fmt: skip
    assert (files / "x.png").read_bytes().startswith(b"\x89PNG")
    head, first, second = (
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in found.stdout.splitlines()
        if "│" in line or "┃" in line
    )
    assert head[3:6] == ["blocks in 2M", "requests of 4K", "ms at 16"]
    assert first == ["token_major", "all", "46,080", "1,456", "2.8", "1.2", "23.500", "0", "0", "0.0%"]
    assert second == ["int8", "all", "12,240", "5,482", "10.7", "2.5", "23.500", "1.0e-03", "2.0e-02", "3.1%"]
    as_json = json.loads(run("layouts", *words.split(), model, "--json").stdout)
    assert [(m["layout"], m["exact"]) for m in as_json] == [("token_major", True), ("int8", False)]
