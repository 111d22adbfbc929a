"""The examples of docs/beyond_generate.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from embedded import embedded_model

PAGE = Path(__file__).parent.parent / "docs" / "beyond_generate.md"


@pytest.mark.slow
def test_the_examples_run_and_say_what_they_shall(capsys: pytest.CaptureFixture[str]) -> None:
    embedded_model()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    found: dict[str, Any] = {}
    printed = []
    for block in blocks:
        exec(block, found)
        printed.append(capsys.readouterr().out.splitlines())
    beams, near_far, states, equal = printed
    scores = [float(line.split()[0]) for line in beams]
    assert len(beams) == 3 and scores == sorted(scores, reverse=True)
    assert "The capital of France is Paris" in beams[0]
    near, far = map(float, near_far[0].split())
    assert near > far
    assert [line.split(" ", 1) for line in states] == [[str(i), states[0][2:]] for i in (0, 15, -1)]
    assert equal == ["True"]
