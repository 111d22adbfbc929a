"""The examples of docs/structured_output.md and the options of the command line, run on the real model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from backends import BACKENDS
from embedded import embedded_model
from typer.testing import CliRunner

pytest.importorskip("llguidance")

PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the page's Python blocks leave behind."""
    embedded_model()
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_examples_of_the_page_give_what_they_say(said: dict[str, Any]) -> None:
    assert [said[name].finish_reason for name in ("dog", "phone", "answer", "total")] == ["stop"] * 4
    dog = json.loads(said["dog"].text)
    assert set(dog) == {"name", "age"} and len(dog["name"]) <= 20 and 0 <= dog["age"] <= 30
    assert re.fullmatch(r"\d{3}-\d{4}", said["phone"].text)
    assert said["answer"].text in ("yes", "no", "perhaps")
    assert re.fullmatch(r"\d{1,2}( \+ \d{1,2})* = \d{1,2}", said["total"].text)


def test_the_page_names_every_part_and_constraint() -> None:
    from octavo.engine.structured_output_config import STRUCTURED_OUTPUTS
    from octavo.engine.structured_output_params import CONSTRAINTS

    page = PAGE.read_text()
    for name, default in STRUCTURED_OUTPUTS.items():
        shown = json.dumps(default) if isinstance(default, str) else repr(default)
        assert re.search(rf"\| .*`{name}`.* \| `{re.escape(shown)}` \|", page), name
    assert all(f"| `{name}` |" in page for name in CONSTRAINTS)


def test_the_command_line_takes_a_schema_or_a_regex(tmp_path: Path) -> None:
    from octavo.engine.cli import app

    embedded_model()
    (tmp_path / "s.json").write_text(json.dumps({"enum": ["left", "right"]}))
    common = ["generate", "-p", "Where?", "--backend", BACKENDS[0], "--max-tokens", "20", "--max-model-len", "64"]
    result = CliRunner().invoke(app, [*common, "--json-schema", str(tmp_path / "s.json")])
    assert result.exit_code == 0 and result.stdout.strip() in ('"left"', '"right"')
    for more, message in (
        (["--regex", "a", "--json-schema", str(tmp_path / "s.json")], "give one of them"),
        (["--json-schema", str(tmp_path / "none.json")], "none.json"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos"),
        (["--regex", "["], "unclosed character class"),
        (["--regex", "[", "-p", "When?"], "unclosed character class"),
        (["--regex", "[", "--json"], "unclosed character class"),
    ):
        result = CliRunner().invoke(app, [*common, *more])
        assert result.exit_code == 1 and message in result.output
