"""Every layout of the table, and the ways to name one, pass the shared suite."""

from __future__ import annotations

import layout_suite
import pytest
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, engine, tokens

from octavo.engine.backend import get_backend
from octavo.models.layouts import LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_suite(backend: str, name: str) -> None:
    layout_suite.check_all(LAYOUTS[name](8), get_backend(backend))


def test_a_layout_by_name_or_by_value_is_the_same() -> None:
    by_name = engine(layout="head_major", block_size=8)
    by_value = engine(layout=LAYOUTS["head_major"](8))
    assert by_name.layout == by_value.layout and tokens(by_name, PROMPTS[:2], GREEDY) == tokens(by_value, PROMPTS[:2])


def test_two_block_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size 16 is not the 8 of layout"):
        engine(layout=LAYOUTS["token_major"](8), block_size=16)
