"""Prompts of ids: what passes at a glance, and what does not."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from octavo.engine import prompts
from octavo.engine.prompts import list_of_prompts, token_ids_of

VOCAB = 1000


@pytest.mark.parametrize("ids", [[0], [999], list(range(VOCAB)), [300] * 5000], ids=str)
def test_plain_ids_pass_at_a_glance(ids: list[int]) -> None:
    assert prompts._are_plain(ids, VOCAB)
    found = token_ids_of(ids, None, VOCAB)
    assert found == ids and found is not ids


ODD = [True, -1, VOCAB, 2**31, 2**32 + 5, 2**40, 1.0, "a", None, [1], array("i", [1]), np.int32(3), b"ab", (1,)]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("at", [0, 1, 7])
def test_whatever_else_is_seen_wherever_it_stands(odd: Any, at: int) -> None:
    ids: list[Any] = [5] * 8
    ids[at] = odd
    assert not prompts._are_plain(ids, VOCAB)


def test_ids_of_other_whole_numbers_become_ints() -> None:
    found = token_ids_of([np.int64(3), 4], None, VOCAB)
    assert found == [3, 4] and set(map(type, found)) == {int}


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_an_array_of_ids_is_a_prompt(dtype: Any) -> None:
    ids = np.array([3, 4, 999], dtype)
    for prompt in ({"prompt_token_ids": ids}, *list_of_prompts(ids), *list_of_prompts([ids])):
        found = token_ids_of(prompt, None, VOCAB)
        assert found == [3, 4, 999] and set(map(type, found)) == {int}


@pytest.mark.parametrize(
    "ids", [np.array([1.0]), np.array([[1, 2]]), np.array([True])], ids=["floats", "rows", "bools"]
)
def test_an_array_of_anything_else_is_refused(ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match="is outside the vocabulary"):
        token_ids_of({"prompt_token_ids": ids}, None, VOCAB)
