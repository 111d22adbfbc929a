"""docs/add_a_cache_layout.md, run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from backends import BACKENDS, QUIET
from embedded import embedded_model
from tiny import PROMPTS, engine, tokens
from typer.testing import CliRunner

from octavo.engine.cli import app

DOC = (Path(__file__).parents[1] / "docs" / "add_a_cache_layout.md").read_text()
LAYOUT = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOC, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)\n```(?:\n\n```\n(.*?)\n```)?", DOC, re.DOTALL)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """In a folder with the page's file, in a terminal as wide as the page's."""
    ((name, code),) = LAYOUT
    (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "127")


def words(text: str) -> list[str]:
    """What is in a table, without lines and what differs between machines: numbers."""
    return re.sub(r"\d[\d.,]*(e[+-]\d+)?%?", "#", re.sub(r"[^\w\s.,:%=()+-]", " ", text)).split()


def test_the_layout_passes_the_checks_as_the_page_says(page):
    embedded_model()
    command, output = COMMANDS[0]
    assert "--check" in command
    run = CliRunner().invoke(app, shlex.split(command)[1:])
    assert run.exit_code == 0, run.output
    assert words(run.stdout) == words(output)


# JAX compiles both engines
@pytest.mark.parametrize("backend", [pytest.param(b, marks=[pytest.mark.slow] * (b == "jax")) for b in BACKENDS])
def test_the_layout_gives_the_exact_ones_tokens(page, backend):
    arguments = {"backend": backend} | (QUIET if backend == "torch" else {})
    want = tokens(engine(**arguments), PROMPTS[:3])
    assert tokens(engine(layout="unturned.py:Unturned", **arguments), PROMPTS[:3]) == want


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="its command names torch")
def test_the_measuring_command_runs_as_it_stands(page):
    embedded_model()
    command, output = COMMANDS[1]
    run = CliRunner().invoke(app, shlex.split(command)[1:])
    assert run.exit_code == 0, run.output
    assert words(run.stdout) == words(output)
    exact, unturned, narrow = (line for line in run.stdout.splitlines() if "│ all" in line)
    assert unturned.split("│")[-4:-1] == exact.split("│")[-4:-1], "KL, its maximum and flips are 0"
    assert narrow.split("│")[-4] != exact.split("│")[-4]
