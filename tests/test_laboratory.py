"""docs/laboratory.md, run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from backends import BACKENDS
from embedded import embedded_model
from typer.testing import CliRunner

from octavo.engine.cli import app
from octavo.engine.lab import crosscheck as lab

DOC = Path(__file__).parents[1] / "docs" / "laboratory.md"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```(?:\n\n```\n(.*?)```)?", DOC.read_text(), re.DOTALL)


def first_line(text: str) -> str:
    """Without what differs between machines: numbers."""
    return re.sub(r"[\d.]+(e[+-]\d+)?", "#", text.strip().splitlines()[0].rstrip())


@pytest.mark.slow
@pytest.mark.skipif(BACKENDS != ["torch", "jax"], reason="its commands name both backends and transformers")
def test_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    embedded_model()
    monkeypatch.chdir(tmp_path)
    # the page puts another one in its place
    monkeypatch.setattr(lab, "make_subject", lab.make_subject)
    space: dict = {}
    shown = 0
    for kind, code, output in BLOCKS:
        capsys.readouterr()
        if kind == "python":
            exec(compile(code, str(DOC), "exec"), space)
            printed = capsys.readouterr().out
        else:
            printed = ""
            for command in code.strip().splitlines():
                run = CliRunner().invoke(app, shlex.split(command)[1:])
                assert run.exit_code == 0, f"{command}: {run.output}"
                printed += run.stdout
        if output:
            assert first_line(printed) == first_line(output)
            shown += 1
    assert shown == 3
