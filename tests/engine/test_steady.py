"""The step and the sampling that are given again, and when they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.engine.batch import Shapes, sampling_input, step_input
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.engine.steady import Steady
from octavo.models.interface import Sampling, StepInput

SIZE = 4
SHAPES = Shapes.chain(4, 32, 64, SIZE, 100)


def decode(at: int, rows: tuple[int, ...] = (0, 1), **more: Any) -> Plan:
    """Each of these rows computes its token at that place."""
    return Plan(at, tuple(Chunk(f"r{row}", row, at, 1, True) for row in rows), **more)


class Layouts:
    """What a Runner does with a Steady; counts what is made."""

    def __init__(self) -> None:
        self.steady, self.num_made = Steady(SIZE), 0
        self.tables = [np.arange(1, 1 + 5 * 16, dtype=np.int32).reshape(5, 16)]

    def step(self, plan: Plan) -> StepInput:
        def make() -> StepInput:
            self.num_made += 1
            return step_input(plan, self.tables, SHAPES, SIZE)

        return self.steady.step_input(plan, make)

    def sampling(self, plan: Plan, joined: bool = False) -> Sampling:
        return self.steady.sampling(plan, joined, lambda: sampling_input(plan, SHAPES, 4, False))


def test_a_decode_step_like_the_last_one_is_the_very_same_value() -> None:
    layouts = Layouts()
    first, sampled = layouts.step(plan := decode(5)), layouts.sampling(plan)
    for plan in map(decode, (6, 7)):
        assert layouts.step(plan) is first
        assert layouts.sampling(plan) is sampled
        assert layouts.sampling(plan, joined=True) is not sampled
    assert layouts.num_made == 1


@pytest.mark.parametrize(
    "other",
    [
        decode(6, (0,)),
        decode(6, (1, 0)),
        decode(6, table_writes=(TableWrite(0, 1, 2, (9,)),)),
        decode(6, admitted=(Admission(1, (3, 4), 0, 2, (0, 0), ()),)),
        decode(6, cuts=True),
        Plan(6, (Chunk("r0", 0, 6, 1, True), Chunk("r1", 1, 6, 1, False))),
        Plan(6, (Chunk("r0", 0, 6, 1, True), Chunk("r1", 1, 6, 3, True))),
    ],
)
def test_what_differs_is_laid_out_anew(other: Plan) -> None:
    layouts = Layouts()
    first, sampled = layouts.step(plan := decode(5)), layouts.sampling(plan)
    assert layouts.step(other) is not first
    assert layouts.sampling(other) is not sampled
    assert layouts.num_made == 2


def test_tables_are_widened_in_time_without_a_write() -> None:
    """A layout that forgets goes on without new blocks."""
    layouts = Layouts()
    for at in range(20, 60):
        (table_SB,) = layouts.step(decode(at)).block_tables
        assert table_SB.shape[1] * SIZE > at
    assert layouts.num_made == 2


def test_a_mixed_step_is_never_given_again() -> None:
    layouts, mixed = Layouts(), Plan(0, (Chunk("r0", 0, 0, 3, True),))
    assert layouts.step(mixed) is not layouts.step(replace(mixed, step=1))
    assert layouts.sampling(mixed) is not layouts.sampling(mixed)


def test_another_way_of_sampling_is_another_value() -> None:
    layouts = Layouts()
    layouts.step(plan := decode(5, variant="sample"))
    first = layouts.sampling(plan)
    layouts.step(other := decode(6))
    assert (first.variant, layouts.sampling(other).variant) == ("sample", "greedy")
    layouts.step(plan := decode(7, variant="sample"))
    assert layouts.sampling(plan) is first


def test_what_is_forgotten_is_laid_out_anew() -> None:
    layouts = Layouts()
    first = layouts.step(decode(5))
    layouts.steady.forget()
    assert layouts.step(decode(6)) is not first
