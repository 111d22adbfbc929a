"""docs/try_a_scheduling_policy.md, run as it stands there; what is printed is what stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from embedded import embedded_model
from typer.testing import CliRunner

from octavo.engine.cli import app

DOC = Path(__file__).parents[1] / "docs" / "try_a_scheduling_policy.md"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```(?:\n\n```\n(.*?)```)?", DOC.read_text(), re.DOTALL)


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    embedded_model()
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    shown = 0
    for kind, code, output in BLOCKS:
        capsys.readouterr()
        if kind == "python":
            exec(compile(code, str(DOC), "exec"), space)
            printed = capsys.readouterr().out
        else:
            run = CliRunner().invoke(app, shlex.split(code)[1:])
            assert run.exit_code == 0, f"{code}: {run.output}"
            printed = run.stdout
        if output:
            # padding is the terminal's
            assert printed.split() == output.split()
            shown += 1
    assert shown == 6
