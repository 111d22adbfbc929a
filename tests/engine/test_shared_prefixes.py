"""Groups of sequences that share first blocks: against brute force, and remembered no longer than they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from tiny import GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import shared_prefixes
from octavo.engine.batch import Shapes, step_input
from octavo.engine.lab.replaying import replay
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.engine.shared_prefixes import SPARE_TILES, TILE, PrefixFinder, laid_out, worth_it

SIZE = 8
# XLA takes a while for what torch does not compile
SLOW = pytest.mark.slow
EACH = [pytest.param(b, marks=[SLOW] * (b == "jax")) for b in BACKENDS]


@pytest.fixture
def anything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest saving is worth it."""
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_GROUP", 1)
    monkeypatch.setattr(shared_prefixes, "DEPTH", 99)
    monkeypatch.setattr(shared_prefixes, "PADDING", 0)


def chunks(starts: Any, counts: Any = None) -> list[Chunk]:
    counts = counts or [1] * len(starts)
    return [Chunk(str(i), i, int(s), n, True) for i, (s, n) in enumerate(zip(starts, counts))]


def found(table: np.ndarray, starts: Any, counts: Any = None, windows: Any = (None,)) -> list[list[Any]]:
    finder, plan = PrefixFinder(windows, SIZE), chunks(starts, counts)
    rows = np.array([c.row if c.num_tokens == 1 else -1 for c in plan], np.int32)
    finder.find(plan, rows, [table] * len(windows))
    return [sorted((tuple(members.tolist()), blocks) for members, blocks in groups) for groups in finder.found]


def most_saved(rows: list[tuple[int, ...]]) -> int:
    """Blocks that the best choice of groups saves: one group of all, or the best of those that go on alike."""
    if len(rows) < 2:
        return 0
    length = 0
    while all(len(r) > length and r[length] == rows[0][length] for r in rows):
        length += 1
    rest: dict[int, list[tuple[int, ...]]] = {}
    for r in rows:
        if len(r) > length:
            rest.setdefault(r[length], []).append(r)
    return max((len(rows) - 1) * length, sum(map(most_saved, rest.values())))


@pytest.mark.usefixtures("anything_goes")
@pytest.mark.parametrize("seed", range(40))
def test_groups_are_alike_and_save_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, width = int(rng.integers(2, 24)), 9
    table = np.zeros((num + 1, width), np.int32)
    free, starts = 1, []
    for i in range(num):
        length = int(rng.integers(1, width + 1))
        # a parent's first blocks, then own ones
        cut = int(rng.integers(0, length + 1)) if i else 0
        parent = table[rng.integers(0, max(i, 1))]
        cut = min(cut, int((parent > 0).sum()))
        table[i, :length] = [*parent[:cut], *range(free, free + length - cut)]
        free += length
        starts.append(int(rng.integers(0, length * SIZE)))
    counts = [1 if rng.random() < 0.9 else 2 for _ in range(num)]
    (groups,) = found(table, starts, counts)
    for members, blocks in groups:
        assert len(members) > 1 and blocks > 0
        assert all(starts[m] >= blocks * SIZE and counts[m] == 1 for m in members)
        assert (table[list(members), :blocks] == table[members[0], :blocks]).all() and table[members[0], blocks - 1]
    everybody = [m for members, _ in groups for m in members]
    assert len(everybody) == len(set(everybody))
    rows = [tuple(table[i, : starts[i] // SIZE].tolist()) for i in range(num) if counts[i] == 1]
    assert sum((len(m) - 1) * b for m, b in groups) == most_saved(rows)


def test_little_is_not_worth_it() -> None:
    table = np.zeros((300, 200), np.int32)
    table[:, :128] = np.arange(1, 129)
    assert found(table, [1024] * 9) == [[(tuple(range(9)), 128)]]
    assert found(table, [1023] * 2) == [[]]  # 127 blocks of 8 tokens
    assert found(table, [1031] * 9, windows=(None, 50)) == [[(tuple(range(9)), 128)], []]
    assert found(table, [1024] * 9, [1] * 8 + [2]) == [[(tuple(range(8)), 128)]]
    assert [worth_it(n, padding) for n, padding in ((8191, 0), (8192, 0), (8192, 1), (8692, 1))] == [0, 1, 0, 1]


def test_a_step_is_padded_for_sharing_only_where_it_pays() -> None:
    """Nine sequences of a prefix of 1,024 tokens save 8,192: just enough, if nothing is padded for it."""
    shapes = Shapes.chain(64, 512, 2048, SIZE, 100, graph_tokens=512, any_width=True, shared_prefixes=True)
    assert shapes.shared == (16, 32, 48, 64) and shapes.shared_tokens == (512,)
    table = np.zeros((65, shapes.widths[-1]), np.int32)
    table[:64, :128] = np.arange(1, 129)

    def step(starts: list[int], counts: list[int] | None = None) -> Any:
        plan = Plan(0, tuple(chunks(starts, counts)))
        return step_input(plan, [table], shapes, SIZE, prefixes=PrefixFinder((None,), SIZE))

    def size(starts: list[int], counts: list[int] | None = None) -> tuple[int, bool]:
        inputs = step(starts, counts)
        assert all(x is not None and len(x.lengths_S) == len(inputs.rows_S) for x in inputs.shared)
        return inputs.num_tokens, bool(inputs.shared)

    assert size([1024] * 9) == (16, True)
    assert size([1024] * 8) == (8, False)
    assert size([1024] * 40) == (48, True)  # 8 rows more
    assert size([1024] * 33 + [0] * 7) == (48, True)
    assert size([1024] * 12 + [0] * 21) == (40, False)  # 11 x 1,024 tokens are not 8 rows more
    assert size([1024] * 60, [1] * 59 + [100]) == (256, False)  # 512 would be 256 tokens more
    assert size([1024] * 60, [1] * 59 + [350]) == (512, True)


@pytest.mark.usefixtures("anything_goes")
def test_more_groups_than_tiles_keep_those_that_save_most() -> None:
    pairs = 3 * SPARE_TILES
    table = np.zeros((2 * pairs + 1, 40), np.int32)
    for i in range(pairs):
        table[2 * i : 2 * i + 2, : i + 1] = 1 + 40 * i + np.arange(i + 1)
    (groups,) = found(table, [40 * SIZE] * 2 * pairs)
    tiles = 2 * pairs // TILE + SPARE_TILES
    assert len(groups) == tiles
    finder = laid_out([(np.array(m), b) for m, b in groups], 2 * pairs, SIZE)
    assert finder.members_WC.shape == (tiles, TILE) and (finder.lengths_W > 0).all()


def test_tiles_hold_every_member_once() -> None:
    groups = [(np.arange(1, 99, 2), 5), (np.arange(0, 66, 2), 3)]
    laid = laid_out(groups, 128, 16)
    assert laid.members_WC.shape == (128 // TILE + SPARE_TILES, TILE)
    held = [(int(m), int(n)) for row, n in zip(laid.members_WC, laid.lengths_W) for m in row if m >= 0]
    assert sorted(held) == sorted((int(m), b * 16) for members, b in groups for m in members)
    assert (laid.members_WC[laid.lengths_W > 0, 0] >= 0).all() and not laid.lengths_W[4:].any()
    assert [(i, n) for i, n in enumerate(laid.lengths_S.tolist()) if n] == sorted(held)


@pytest.mark.usefixtures("anything_goes")
def test_what_is_remembered_goes_with_what_it_rests_on() -> None:
    table = np.zeros((5, 6), np.int32)
    table[:4, :3] = [1, 2, 3]
    finder, rows = PrefixFinder((None,), SIZE), np.arange(4, dtype=np.int32)
    plan = chunks([30] * 4)

    def groups(some: int = 4) -> Any:
        finder.find(plan[:some], rows[:some], [table])
        return [(len(m), b) for m, b in finder.found[0]]

    assert groups() == [(4, 3)]
    table[1, 1] = 9
    assert groups() == [(4, 3)], "not looked at again"
    finder.note((), (TableWrite(0, 1, 3, (7,)),))
    assert groups() == [(4, 3)], "new blocks at the end change nothing"
    finder.note((), (TableWrite(0, 1, 1, (9,)),))
    assert groups() == [(3, 3)]
    assert groups(2) == [(2, 1)]
    table[0, 0] = 0
    finder.note((Admission(0, (1,), 0, 1, (0, 0), ()),), ())
    assert groups(2) == []


@pytest.mark.usefixtures("anything_goes")
@pytest.mark.parametrize(
    ("backend", "overlap"),
    [pytest.param(b, o, marks=[SLOW] * (b == "jax")) for b in BACKENDS for o in (True, False) if b == "torch" or o],
)
def test_an_engine_finds_what_a_fresh_look_finds(backend: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With forks, preemptions and a group of a window, and the tokens are those without."""
    find, seen = PrefixFinder.find, []

    def watched(self: PrefixFinder, plan: Any, rows: np.ndarray, tables: Any) -> int:
        out, fresh = find(self, plan, rows, tables), PrefixFinder(self.windows, self.block_size)
        find(fresh, plan, rows, tables)
        # a member of more tokens shares no less than when it was looked at
        for mine, theirs in zip(self.found, fresh.found, strict=True):
            assert [(m.tolist(), b) for m, b in mine] == [(m.tolist(), b) for m, b in theirs]
        seen.append(self.found)
        return out

    monkeypatch.setattr(PrefixFinder, "find", watched)
    more: dict[str, Any] = {"backend": backend, "attention": "reference", "async_scheduling": overlap}
    more |= {"num_gpu_blocks_override": 30, "max_num_seqs": 6}
    params = replace(GREEDY, n=2, seed=1, temperature=0.7)
    llm = engine(**more)
    got = llm.generate(PROMPTS[:8], params, use_tqdm=False)
    assert any(groups[0] for groups in seen) and not any(groups[1] for groups in seen)
    assert llm.scheduler.num_preemptions > 0
    count = len(seen)
    want = engine(**more, disable_cascade_attn=True).generate(PROMPTS[:8], params, use_tqdm=False)
    assert len(seen) == count
    for a, b in zip(got, want, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


@pytest.mark.usefixtures("anything_goes")
@pytest.mark.parametrize("backend", EACH)
def test_nothing_is_compiled_after_a_warm_up(backend: str) -> None:
    more: dict[str, Any] = {"backend": backend, "attention": "reference", "num_gpu_blocks_override": 60}
    llm = engine(**more, warmup="all", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
    before, prompts = llm.backend.num_compiles(), [p[:40] for p in PROMPTS]
    got = tokens(llm, prompts, replace(GREEDY, max_tokens=9))
    assert llm.backend.num_compiles() == before
    assert got == tokens(engine(**more, disable_cascade_attn=True), prompts, replace(GREEDY, max_tokens=9))


@pytest.mark.usefixtures("anything_goes")
@pytest.mark.parametrize("backend", ["torch"] if "torch" in BACKENDS else EACH)
def test_a_run_that_shares_is_replayed_bit_for_bit(backend: str, tmp_path: Path) -> None:
    """Plans say nothing of it: it is read off the tables again."""
    log, model, weights = tmp_path / "log", spec_of(TINY), numpy_weights(TINY)
    llm = engine(backend=backend, attention="reference", step_log=str(log), max_num_batched_tokens=32)
    tokens(llm, PROMPTS[2:7], replace(GREEDY, max_tokens=6))
    assert llm.runner.prefixes is not None and llm.runner.shapes.shared
    found = replay(log, model=model, weights=weights)
    assert found.ok and found.num_tokens == 30, found
