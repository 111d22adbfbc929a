"""Layouts as text: the table's names, a user's file, and fields."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.engine.config import engine_config
from octavo.engine.layout_names import layout_from, layout_text
from octavo.models.layouts import LAYOUTS

MINE = """
from dataclasses import dataclass
from octavo.models.layouts import TokenMajor

@dataclass(frozen=True)
class Mine(TokenMajor):
    size: int = 3

made = Mine(8, size=5)

class Bare:
    pass
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path / 'mine.py'}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_name_and_its_text(name):
    assert layout_from(name, 8) == LAYOUTS[name](8)
    assert layout_text(LAYOUTS[name](8)) == name


def test_a_layout_from_a_file(mine):
    made = engine_config("m", layout=f"{mine}:Mine:size=4", block_size=8).layout
    assert (made.block_size, made.size) == (8, 4)
    assert engine_config("m", layout=f"{mine}:Mine").layout.block_size == 16
    assert engine_config("m", layout=f"{mine}:made").layout.size == 5
    assert layout_text(made) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diagonal", "unknown layout 'diagonal'"),
        ("token_major:size=3", "field of layout 'token_major' 'size'"),
        ("token_major:block_size=8", "field of layout 'token_major' 'block_size'"),
        ("no.py:Mine", "there is no file no.py"),
        ("head_major:size=x", "'x' is no number"),
        ('h2o:budget="x"', "budget 'x' is not of type int"),
        ("h2o:budget=null", "budget None is not of type int"),
        ("h2o:budget=true", "budget True is not of type int"),
        ("streaming_llm:sinks=1.5", "sinks 1.5 is not of type int"),
        ("streaming_llm:window=NaN", "window nan is not of type int"),
        ("h2o:budget=24,budget=32", "'budget' is given twice"),
        ('token_major:dtype="float99"', "dtype 'float99' of TokenMajor: float32, bfloat16, float16 or None is right"),
        ('token_major:dtype="int8"', "dtype 'int8' of TokenMajor"),
        ('head_major:dtype="float64"', "dtype 'float64' of HeadMajor"),
        ('streaming_llm:dtype="x"', "dtype 'x' of StreamingLLM"),
        ('h2o:dtype="x"', "dtype 'x' of H2O"),
        ('snapkv:dtype="x"', "dtype 'x' of SnapKV"),
        ('int8:dtype="uint8"', "dtype 'uint8' of Int8: int8 is right"),
        ('fp8:dtype="int8"', "dtype 'int8' of Fp8: float8_e4m3fn is right"),
        ("fp8_per_token_head:dtype=null", "dtype None of Fp8PerTokenHead: float8_e4m3fn is right"),
    ],
)
def test_a_wrong_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        layout_from(text, 8)


def test_a_class_that_is_no_layout_is_refused(mine):
    with pytest.raises(ValueError, match="is no dataclass with a block_size"):
        layout_from(f"{mine}:Bare", 8)
    with pytest.raises(ValueError, match="field of layout"):
        layout_from(f"{mine}:made:size=3", 8)


def test_a_wrong_window_is_refused_without_asserts_too():
    code = "from octavo.models.layouts import StreamingLLM; StreamingLLM(window=0)"
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "ValueError: window 0 must be at least 1 token" in ran.stderr
