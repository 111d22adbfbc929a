"""Steps of several replicas laid out alike: what each of them does stays, and padding does nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.engine.batch import Shapes
from octavo.engine.parallel.joint_batch import (
    JointPlan,
    alike_moves,
    alike_readings,
    alike_rows,
    alike_samplings,
    alike_steps,
)
from octavo.engine.plan import Chunk, Plan
from octavo.models.interface import Reading, Sampling, StepInput

SHAPES = Shapes.chain(6, 64, 128, 8, 97)
SCRATCH = 6


def step(counts: list[int], width: int, num_tokens: int, *, decode: bool) -> StepInput:
    """Of rows 0, 1 ..., padded as a Runner alone pads it."""
    seqs = num_tokens if decode else SCRATCH
    rows = np.full(seqs, SCRATCH, np.int32)
    rows[: len(counts)] = range(len(counts))
    ends = np.cumsum(counts + [0] * (seqs - len(counts)))
    table = np.arange(1, seqs * width + 1, dtype=np.int32).reshape(seqs, width)
    return StepInput(rows, np.append(0, ends).astype(np.int32), (table,), num_tokens, decode)


IDLE, FEW, MANY = step([], 8, 1, decode=True), step([1, 1, 1], 8, 4, decode=True), step([20, 1], 16, 32, decode=False)


@pytest.mark.parametrize("steps", [(IDLE, FEW), (MANY, FEW), (IDLE, MANY, FEW)])
def test_each_does_what_it_did_at_the_sizes_of_all(steps: tuple[StepInput, ...]) -> None:
    found = alike_steps(steps, SHAPES, SCRATCH)
    assert len({(f.num_tokens, f.decode, *(x.shape for x in (f.rows_S, *f.block_tables))) for f in found}) == 1
    assert found[0].decode == all(s.decode for s in steps)
    for before, after in zip(steps, found, strict=True):
        seqs, table = len(before.rows_S), before.block_tables[0]
        assert (after.rows_S[:seqs] == before.rows_S).all() and (after.rows_S[seqs:] == SCRATCH).all()
        assert (np.diff(after.query_starts_S1)[:seqs] == np.diff(before.query_starts_S1)).all()
        assert after.query_starts_S1[-1] == before.query_starts_S1[-1] <= after.num_tokens
        assert (after.block_tables[0][:seqs, : table.shape[1]] == table).all()


def test_taps_and_embeddings_of_one_are_there_for_all() -> None:
    rows = np.ones((32, 4), np.float32)
    tapped, plain = alike_steps((replace(MANY, taps=("norm",), extra={"embeds": rows}), FEW), SHAPES, SCRATCH)
    assert tapped.taps == plain.taps == ("norm",)
    assert (tapped.extra["embeds"] == 1).all() and not plain.extra["embeds"].any()


def test_masks_of_one_forbid_nothing_to_the_other() -> None:
    at = np.arange(2, dtype=np.int32)
    masked = Sampling(at, at, "edits", mask_RW=np.zeros((2, 3), np.int32), token_ids_RN=np.ones((2, 8), np.int32))
    plain = Sampling(np.zeros(4, np.int32), np.arange(4, dtype=np.int32), "edits")
    first, second = alike_samplings((masked, plain), SCRATCH)
    assert first.rows_R.tolist() == [0, 1, SCRATCH, SCRATCH] and second.rows_R.tolist() == [0, 1, 2, 3]
    for found, real in ((first, 2), (second, 0)):
        assert found.mask_RW is not None and not found.mask_RW[:real].any() and (found.mask_RW[real:] == -1).all()
        assert found.token_ids_RN is not None and found.token_ids_RN.shape == (4, 8)


def test_rows_of_nobody_go_to_the_scratch_row() -> None:
    one = np.array([2], np.int32), {"tokens": np.array([[5, 6]], np.int32), "min_tokens": np.array([1], np.int32)}
    two = np.array([0, 3, 4], np.int32), {"tokens": np.zeros((3, 4), np.int32), "min_tokens": np.zeros(3, np.int32)}
    (at, values), _ = alike_rows((one, two), SCRATCH)
    assert at.tolist() == [2, SCRATCH, SCRATCH]
    assert values["tokens"].shape == (3, 4) and values["tokens"][0, :2].tolist() == [5, 6]


def test_moves_of_nobody_copy_the_null_block_onto_itself() -> None:
    few = (np.array([3], np.int32),), (np.array([4], np.int32),)
    many = (np.array([1, 2], np.int32),), (np.array([5, 6], np.int32),)
    ((source,), (target,)), _ = alike_moves((few, many))
    assert (source.tolist(), target.tolist()) == ([3, 0], [4, 0])


def test_tiles_are_as_many_as_of_the_one_that_has_most() -> None:
    tile = Reading(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32), 32, 0)
    (first, second), (third, nobody) = alike_readings(
        [[tile, tile], [replace(tile, num_logprobs=5)]], 4, 32, "raw_logprobs"
    )
    assert first.num_logprobs == second.num_logprobs == 5 and third.num_logprobs == nobody.num_logprobs == 0
    assert nobody.hidden_R.tolist() == [0] * 4


def test_one_head_serves_all() -> None:
    def chunk(name: str, *, samples: bool) -> Chunk:
        return Chunk(name, 0, 0, 1, samples)

    plans = (
        Plan(7, (chunk("a", samples=True),), variant="truncate", num_logprobs=3),
        None,
        Plan(4, (chunk("b", samples=True),), variant="penalties"),
        Plan(4, (chunk("c", samples=False),), variant="processors"),
    )
    found = JointPlan(plans).sampled()
    assert {(p.variant, p.num_logprobs) for p in found} == {("penalties", 3)}
    assert [len(p.sampled) for p in found] == [1, 0, 1, 0]
