"""What a step's tokens are derived to, in Triton's interpreter: against the plain ops, and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.kernels_triton import derive
from octavo.kernels_triton.ops import TorchOps
from octavo.models import step

pytestmark = pytest.mark.usefixtures("guarded")

SIZE, LONGEST, SCRATCH = 8, 400, 90


def make(counts: list[int], computed: list[int], num_tokens: int, pad: int) -> tuple[dict, SimpleNamespace]:
    """Rows of a cache, and a step of sequences with so many tokens, padded by `pad` sequences of nobody."""
    rng = np.random.default_rng(len(counts))
    seqs = len(counts) + pad
    of = np.concatenate([rng.permutation(SCRATCH)[: len(counts)], np.full(pad, SCRATCH)])
    rows = {
        "tokens": rng.integers(0, 1000, (SCRATCH + 1, LONGEST)),
        "num_computed": rng.integers(0, 9, SCRATCH + 1),
        "prompt_len": rng.integers(1, 99, SCRATCH + 1),
    }
    rows["num_computed"][of[: len(counts)]] = computed
    starts = np.concatenate([[0], np.cumsum([*counts, *[0] * pad])])
    table = rng.integers(1, 500, (seqs, LONGEST // SIZE + 3))

    def put(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x.astype(np.int32))

    inputs = SimpleNamespace(
        rows_S=put(of), query_starts_S1=put(starts), block_tables=(put(0 * table), put(table)), num_tokens=num_tokens
    )
    return {name: put(x) for name, x in rows.items()}, inputs


CASES = {
    "one": ([1], [37], 1, 0),
    "decode": ([1] * 5, [0, 7, 8, 300, 15], 8, 3),
    "decode-many": ([1] * 70, list(range(70)), 70, 0),
    "mixed": ([1, 33, 0, 1, 100], [40, 0, 5, 9, 200], 192, 60),
    "prefill": ([130], [8], 256, 2),
    "nobody": ([], [], 16, 4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_places_are_those_of_the_plain_ops(case: tuple) -> None:
    rows, inputs = make(*case)
    found, want = derive.derive(rows, inputs, 1, SIZE), step.places(rows, inputs, 1, SIZE, TorchOps())
    assert found.keys() == want.keys()
    for name, x in found.items():
        assert x.dtype == want[name].dtype and torch.equal(x, want[name]), name


def test_places_by_hand() -> None:
    rows, inputs = make([2, 1], [7, 20], 4, 1)
    found, of = derive.derive(rows, inputs, 1, SIZE), inputs.rows_S
    assert found["positions_T"].tolist() == [7, 8, 20, 0] and found["is_real_T"].tolist() == [True, True, True, False]
    assert found["token_ids_T"].tolist() == [*rows["tokens"][of[0], 7:9].tolist(), int(rows["tokens"][of[1], 20]), 0]
    table = inputs.block_tables[1]
    assert found["blocks_T"].tolist() == [int(table[0, 0]), int(table[0, 1]), int(table[1, 2]), 0]
    assert found["lengths_S"].tolist()[:2] == [9, 21]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_last_rows(case: tuple) -> None:
    _, inputs = make(*case)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((inputs.num_tokens, 1100)).astype(np.float32))
    assert torch.equal(derive.last_rows(x, inputs, 80), step.last_rows(x, inputs, 80, TorchOps()))
