"""docs/laboratory.md and docs/find_a_numerical_fault.md, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from backends import BACKENDS
from embedded import embedded_model
from typer.testing import CliRunner

from octavo.engine.cli import app

DOCS = Path(__file__).parents[1] / "docs"
CODE = re.compile(r"```(python|sh)\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
PAGES = {"laboratory.md": 2, "find_a_numerical_fault.md": 2}  # and how many outputs each shows


def first_line(text: str) -> str:
    """Without what differs between machines: numbers, and whether another rounding flips a token."""
    line = re.sub(r"[\d.]+(e[+-]\d+)?", "#", text.strip().splitlines()[0].rstrip())
    return re.sub(r" \(first flip .*?\)", "", line)


def all_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(BACKENDS != ["torch", "jax"], reason="its commands name both backends and transformers")
@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    embedded_model()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    space: dict = {}
    shown = 0
    for kind, code, output in CODE.findall((DOCS / page).read_text()):
        capsys.readouterr()
        if kind == "python":
            exec(compile(code, page, "exec"), space)
            printed = capsys.readouterr().out
        else:
            printed = ""
            for command in code.strip().splitlines():
                run = CliRunner().invoke(app, shlex.split(command)[1:])
                assert run.exit_code == ("relative error" in output), f"{command}: {run.output}"
                printed += run.stdout
        if output:
            # what was decided is the same on any machine
            form = all_lines if code.startswith("octavo explain") else first_line
            assert form(printed) == form(output)
            shown += 1
    assert shown == PAGES[page]


def test_the_page_names_every_guarantee():
    shown = re.findall(r"^held    ([^:]+):", (DOCS / "laboratory.md").read_text(), re.MULTILINE)
    source = (DOCS.parent / "engine" / "lab" / "certifying.py").read_text()
    assert len(shown) == 12 and all(f'"{name}"' in source for name in shown)


def test_the_page_has_the_first_line_of_every_fault():
    """By name; tests/engine/lab/test_crosscheck.py runs them."""
    page = (DOCS / "find_a_numerical_fault.md").read_text()
    faults = re.findall(r"^def (\w+)\(make", (DOCS.parent / "examples" / "faults.py").read_text(), re.MULTILINE)
    assert len(faults) == 6 and all(f"`{name}`" in page for name in faults)
