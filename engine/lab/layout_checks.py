"""What any cache layout must get right, on one backend: ragged steps over random keys, values and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...models import step as programs
from ...models.interface import ArraySpec, AttentionSpec, CacheLayout, Rope, Step, layer_specs, map_tree
from ...models.keeps import keeps_of
from ..backend import Backend

EXACT = 1e-5  # of inputs of unit variance, in float32
ALIKE = 0.6  # a part of exact attention; what is further away has little to do with it
Tables = np.ndarray  # [S, B], block ids
Parts = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]  # q, k and v of each sequence


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    check: str
    ok: bool
    found: str


READS_UNWRITTEN = Check("attention", False, "nan: it reads slots that nobody wrote, weighted with zero or not")


def check_layout(layout: CacheLayout, backend: Backend, attention: AttentionSpec) -> list[Check]:
    """All checks, for layers like this one. A layout that drops tokens is not compared with what has all of them."""
    found = [*_check_spec(layout, attention)]
    keeps = keeps_of(layout)
    if not all(c.ok for c in found):
        return found
    if keeps.window is not None or keeps.budget is not None:
        return [*found, Check("attention", True, "drops tokens: measured on a text, and not checked here")]
    full = replace(attention, window=None)
    world = World(layout, backend, full)
    exact = check_attention(world, World(layout, backend, replace(full, window=layout.block_size - 1 or 1)))
    found += [exact, check_own_blocks(world)]
    # nan is like nothing, so that of cuts and copies nothing can be told
    return found if exact is READS_UNWRITTEN else [*found, check_cuts(world), check_copies(world)]


def _check_spec(layout: CacheLayout, attention: AttentionSpec) -> list[Check]:
    """It is a value, and every array has its blocks in front: there they are copied."""
    try:
        hash(layout)
    except TypeError:
        return [Check("a value", False, "cannot be hashed: decorate the class with @dataclass(frozen=True)")]
    few, many = (layout.spec(attention, n) for n in (3, 5))
    wrong = [n for n in few if (few[n].shape[0], many[n].shape) != (3, (5, *few[n].shape[1:]))]
    if wrong:
        return [Check("blocks in front", False, f"of {', '.join(wrong)} the first axis is not the number of blocks")]
    arrays = f"{', '.join(few)}; {layout.block_size} tokens each"
    return [Check("a value", True, repr(layout)), Check("blocks in front", True, arrays)]


class World:
    """Three sequences of random keys and values, their blocks in random order, and a layout that holds them."""

    def __init__(self, layout: CacheLayout, backend: Backend, spec: AttentionSpec):
        self.layout, self.backend, self.spec = layout, backend, spec
        size, rng = layout.block_size, np.random.default_rng(5)
        self.chunks = ((size + 1, 1, 4), (1, 1, 1), (0, 2 * size + 4, 3))  # tokens of each sequence, step by step
        lengths = np.sum(self.chunks, axis=0)
        heads = spec.num_kv_heads
        shapes = (heads, spec.group_size, spec.k_dim), (heads, spec.k_dim), (heads, spec.v_dim)
        q, k, v = ([rng.standard_normal((n, *s)).astype(np.float32) for n in lengths] for s in shapes)
        self.parts = q, k, v
        self.inv_freq_D = np.geomspace(1, 1e-2, spec.k_dim // 2).astype(np.float32)
        self.tables = random_tables(lengths, size, rng)

    def run(self, chunks: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Outputs of each sequence's tokens, and the cache: from one full of nan, in these steps."""
        cache, done = self.poisoned(), np.zeros(3, int)
        outs: list[list[np.ndarray]] = [[], [], []]
        for counts in chunks:
            where = self.layout, self.backend, cache, self.tables, done, counts
            found, cache = run_step(*where, self.parts, self.spec, self.inv_freq_D)
            for i, piece in enumerate(np.split(found, np.cumsum(counts)[:-1])):
                outs[i].append(piece)
            done += counts
        return [np.concatenate(x) for x in outs], cache

    def poisoned(self) -> dict[str, Any]:
        return poisoned(self.layout, self.backend, self.spec, num_blocks(self.tables))


def check_attention(world: World, windowed: World) -> Check:
    """Against float64; with and without a window."""
    errors, shares = [], []
    for w in (world, windowed):
        outs, _ = w.run(w.chunks)
        if not all(np.isfinite(x).all() for x in outs):
            return READS_UNWRITTEN
        wanted = np.concatenate([dense(*parts, w.spec, w.inv_freq_D) for parts in zip(*w.parts, strict=True)])
        apart = np.concatenate(outs) - wanted
        errors.append(float(np.abs(apart).max()))
        shares.append(float(np.sqrt((apart**2).mean() / (wanted**2).mean())))
    if max(errors) < EXACT:
        return Check("attention", True, f"exact: within {max(errors):.0e} of float64, with a window too")
    lossy = f"lossy: on noise {shares[0]:.1%} from exact (root mean square), {shares[1]:.1%} with a window"
    return Check("attention", max(shares) < ALIKE, lossy)


def check_own_blocks(world: World) -> Check:
    """What belongs to nobody stays as it was."""
    before = world.backend.read_tree(world.poisoned())
    after = world.backend.read_tree(world.run(world.chunks)[1])
    free = unused_blocks(world.tables)
    for name in world.layout.spec(world.spec, 1):
        a, b = (x[name][free].astype(np.float32) for x in (before, after))
        if not np.array_equal(a, b, equal_nan=True):
            return Check("own blocks only", False, f"{name}: blocks of nobody were written")
    return Check("own blocks only", True, "nothing else was written")


def check_cuts(world: World) -> Check:
    """The same tokens in one step: what a query sees must not depend on how steps are cut."""
    outs, _ = world.run(world.chunks)
    once, _ = world.run([np.sum(world.chunks, axis=0)])
    error = max(float(np.abs(a - b).max()) for a, b in zip(outs, once, strict=True))
    if error < EXACT:
        return Check("any chunks", True, "one step or several: the same")
    differs = f"in one step attention differs by {error:.1e}: so would a request that is preempted"
    return Check("any chunks", False, differs)


def check_copies(world: World) -> Check:
    """Attention over copies of all blocks is equal in every bit."""
    *first, last = world.chunks[:2]
    outs = []
    for moved in (False, True):
        tables = world.tables
        cache = world.run(first)[1]
        if moved:
            cache, tables = move_all(world.backend, cache, tables)
        where = world.layout, world.backend, cache, tables, np.sum(first, axis=0), last
        outs.append(run_step(*where, world.parts, world.spec, world.inv_freq_D)[0])
    same = np.array_equal(*outs)
    return Check("copied blocks", same, "equal in every bit" if same else "a copy of a block reads otherwise than it")


def move_all(backend: Backend, cache: dict[str, Any], tables: Tables) -> tuple[dict[str, Any], Tables]:
    """Every block copied to a free one, and the tables that name those."""
    source = tables[tables > 0].astype(np.int32)
    target = unused_blocks(tables)[: len(source)].astype(np.int32)
    move = backend.compile(programs.move_blocks, ("groups", "source", "target"), ("groups",), consumes="groups")
    ((cache,),) = move(((cache,),), (source,), (target,))
    new = dict(zip(source.tolist(), target.tolist(), strict=True)) | {0: 0}
    return cache, np.vectorize(new.get)(tables).astype(np.int32)


def random_tables(lengths: np.ndarray, block_size: int, rng: Any) -> Tables:
    """Block tables of three sequences, of random blocks, half of all blocks being nobody's."""
    widths = -(-lengths // block_size)
    tables = np.zeros((len(lengths), widths.max() + 1), np.int32)
    free = 1 + rng.permutation(num_blocks(tables) - 1)
    for row, width in zip(tables, widths, strict=True):
        row[:width], free = free[:width], free[width:]
    return tables


def num_blocks(tables: Tables) -> int:
    return 2 * tables.size + 4


def unused_blocks(tables: Tables) -> np.ndarray:
    return np.setdiff1d(np.arange(1, num_blocks(tables)), tables)


def poisoned(layout: CacheLayout, backend: Backend, spec: AttentionSpec, blocks: int) -> dict[str, Any]:
    """A layer's cache full of what shows if it is read: nan, or of integers large ones."""

    def junk(s: ArraySpec) -> np.ndarray:
        integers = s.dtype is not None and "int" in s.dtype
        return np.full(s.shape, 117, s.dtype) if integers else np.full(s.shape, np.nan, np.float32)

    return map_tree(lambda s: backend.place(junk(s), s), layer_specs(layout, spec, blocks, 4))


def run_step(
    layout: CacheLayout,
    backend: Backend,
    cache: dict[str, Any],
    tables: Tables,
    done: Any,
    counts: Any,
    parts: Parts,
    spec: AttentionSpec,
    inv_freq_D: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """layout.attention on one ragged step with two tokens of padding. Without frequencies rope turns by nothing."""
    take = [np.concatenate([x[i][done[i] : done[i] + n] for i, n in enumerate(counts)]) for x in parts]
    padded = [np.concatenate([x, np.ones_like(x[:1]), np.ones_like(x[:1])]) for x in take]
    still = np.zeros(spec.k_dim // 2, np.float32)
    step = make_step(layout.block_size, still if inv_freq_D is None else inv_freq_D, tables, done, counts)
    out, cache = program_of(layout, backend, spec)(cache, dict(zip("qkv", padded, strict=True)), step)
    return backend.read(out)[: sum(counts)], cache


@lru_cache(maxsize=16)
def program_of(layout: CacheLayout, backend: Backend, spec: AttentionSpec) -> Any:
    """layout.attention alone. One for all checks: XLA then compiles each shape of a step once."""

    def program(cache: dict, parts: dict, step: Step, *, ops: Any) -> Any:
        return layout.attention(ops.for_step([step]), cache, parts, step, spec)

    return backend.compile(program, ("cache", "parts", "step"), ("out", "cache"), consumes="cache")


def make_step(block_size: int, inv_freq_D: np.ndarray, tables: Tables, done: Any, counts: Any) -> Step:
    """The step in which each of three sequences goes on by so many tokens."""
    seqs = np.repeat(np.arange(3), counts)
    positions = np.concatenate([np.arange(done[i], done[i] + n) for i, n in enumerate(counts)] + [np.zeros(2, int)])
    seqs = np.concatenate([seqs, [2, 2]])
    real = np.arange(len(seqs)) < sum(counts)
    blocks = np.where(real, tables[seqs, positions // block_size], 0)
    angle_TD = (positions[:, None] * inv_freq_D).astype(np.float32)

    def i32(x: Any) -> np.ndarray:
        return np.ascontiguousarray(x, np.int32)

    return Step(
        token_ids_T=i32(positions),
        positions_T=i32(positions),
        seq_ids_T=i32(seqs),
        is_real_T=real,
        blocks_T=i32(blocks),
        offsets_T=i32(positions % block_size),
        lengths_S=i32(done + np.array(counts)),
        query_starts_S1=i32(np.concatenate([[0], np.cumsum(counts)])),
        block_tables_SB=tables,
        decode=False,
        ropes={"rope": Rope(inv_freq_D, np.cos(angle_TD), np.sin(angle_TD))},
        extra={},
        rows_S=i32([2, 0, 1]),
    )


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec, inv_freq_D: np.ndarray) -> np.ndarray:
    """Attention of each position over all before it, in float64, rope included."""
    q, k = (turned(x.astype(float), inv_freq_D) for x in (q, k))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for i in range(len(q)):
        seen = slice(max(0, i + 1 - (spec.window or i + 1)), i + 1)
        scores = np.einsum("kgd,mkd->kgm", q[i], k[seen]) * spec.scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[i] = np.einsum("kgm,mkd->kgd", weights / weights.sum(-1, keepdims=True), v[seen].astype(float))
    return out


def turned(x: np.ndarray, inv_freq_D: np.ndarray) -> np.ndarray:
    """x [L, ..., D], the row at each position turned by it: the first half of its numbers against the second."""
    angle = np.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1)) * inv_freq_D.astype(float)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
