"""The blocks that a step adds tokens to, against a loop over sequences and blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_batches import backend_of, make_batch, make_step
from backends import BACKENDS
from shapes import Ragged

from octavo.models.interface import ArraySpec
from octavo.models.layouts.unfinished import growing, whole

P = 4
# tokens computed before and in the step, of each sequence; some have none in it
STEPS = {
    "two tokens over an edge": ([3] * 6, [2] * 6),
    "ragged": ([0, 5, 8, 3], [9, 1, 4, 7]),
    "nobody between": ([4, 6, 8, 2], [0, 3, 0, 5]),
    "one": ([2], [11]),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", STEPS)
def test_each_block_that_grows_has_a_tile_and_is_whole(name, padding):
    computed, counts = STEPS[name]
    case = Ragged(f"growing {name}", tuple(computed), tuple(counts), block_size=P, padding=padding)
    batch, backend = make_batch(case), backend_of(BACKENDS[0], "auto")
    scratch = len(counts)

    def place(x: np.ndarray) -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim, str(x.dtype)))

    rows = np.random.default_rng(0).permutation(len(counts)).astype(np.int32)
    step = replace(make_step(batch, backend), rows_S=place(rows))
    blocks = growing(backend.ops, step, P, scratch)
    index, at, row, tile, within = map(
        backend.read, (blocks.index_W, blocks.at_W, blocks.row_W, blocks.tiles.tile_T, blocks.tiles.place_T)
    )
    # a token's number says whose it is and where, and a row holds what its request's last block had before
    number = np.concatenate(
        [1000.0 * s + np.arange(c, c + n) for s, (c, n) in enumerate(zip(computed, counts, strict=True))]
    )
    kept = np.full((scratch + 1, P), -1.0)
    for s, c in enumerate(computed):
        kept[rows[s], : c % P] = 1000.0 * s + np.arange(c // P * P, c)
    x = np.concatenate([number, np.full(padding, -1.0)]).astype(np.float32)[:, None, None]
    found = backend.read(whole(backend.ops, place(x), place(kept.astype(np.float32)[..., None, None]), blocks, step))
    token, grown = 0, set()
    for s, (c, n) in enumerate(zip(computed, counts, strict=True)):
        for position in range(c, c + n):
            w, last = tile[token], (c + n - 1) // P
            assert (index[w], at[w]) == (position // P, batch.tables[s, position // P])
            assert row[w] == (rows[s] if position // P == last else scratch)
            start, end = position // P * P, min(c + n, position // P * P + P)
            np.testing.assert_array_equal(found[w, : end - start, 0, 0], 1000 * s + np.arange(start, end))
            # a tile's tokens lie in order, from its first one in the step
            assert within[token] == position - max(c, start)
            token, grown = token + 1, grown | {w}
    others = [w for w in range(len(at)) if w not in grown]
    assert len(grown) == sum(len({p // P for p in range(c, c + n)}) for c, n in zip(computed, counts, strict=True))
    assert (at[others] == 0).all() and (row[others] == scratch).all()
