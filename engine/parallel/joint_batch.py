"""What several replicas do in one step, laid out alike: one program, or programs that meet, run it all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...models.interface import Reading, Sampling, StepInput
from ...models.sampling import VARIANTS
from ..batch import Shapes, at_least, padded
from ..plan import Chunk, Plan

Rows = tuple[np.ndarray, dict[str, np.ndarray]]  # what set_rows takes: which rows, and their values


@dataclass(frozen=True)
class JointPlan:
    """What all replicas do in one step; None: one that has nothing to do, and runs along."""

    plans: tuple[Plan | None, ...]

    @property
    def step(self) -> int:
        return next(plan.step for plan in self.plans if plan)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those of all replicas."""
        return tuple(chunk for plan in self.plans if plan for chunk in plan.chunks)

    @property
    def taps(self) -> tuple[str, ...]:
        """Hidden rows that one of them wants."""
        return union(plan.taps for plan in self.plans if plan)

    def sampled(self) -> list[Plan]:
        """For each replica a plan that samples with a head that serves all."""
        plans = [plan or Plan(self.step, ()) for plan in self.plans]
        busy = [plan for plan in plans if plan.sampled]
        variant = max((plan.variant for plan in busy), key=VARIANTS.index)
        return [replace(plan, variant=variant, num_logprobs=max(p.num_logprobs for p in busy)) for plan in plans]


def union(each: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """All names, each once, in order."""
    return tuple(sorted({name for names in each for name in names}))


def alike_steps(steps: Sequence[StepInput], shapes: Shapes, scratch: int) -> list[StepInput]:
    """The steps with the same sizes, decode steps if all are, and the same taps."""
    decode, taps = all(s.decode for s in steps), union(s.taps for s in steps)
    seqs = max(len(s.rows_S) for s in steps) if decode else scratch
    tokens = seqs if decode else at_least(shapes.tokens, max(int(s.query_starts_S1[-1]) for s in steps))
    width = max(table.shape[1] for s in steps for table in s.block_tables)
    extra = {name: x for s in steps for name, x in s.extra.items()}
    return [
        StepInput(
            grown(s.rows_S, (seqs,), scratch),
            grown(s.query_starts_S1, (seqs + 1,), int(s.query_starts_S1[-1])),
            tuple(grown(table, (seqs, width), 0) for table in s.block_tables),
            tokens,
            decode,
            {name: grown(s.extra.get(name, x[:0]), (tokens, *x.shape[1:]), 0) for name, x in extra.items()},
            taps,
        )
        for s in steps
    ]


def alike_samplings(samplings: Sequence[Sampling], scratch: int) -> list[Sampling]:
    """The samplings, which have the same variant, with the same sizes."""
    size = max(len(s.rows_R) for s in samplings)
    masks, ids = _widest(s.mask_RW for s in samplings), _widest(s.token_ids_RN for s in samplings)
    return [
        replace(
            s,
            hidden_R=grown(s.hidden_R, (size,), 0),
            rows_R=grown(s.rows_R, (size,), scratch),
            # padding allows everything
            mask_RW=None if masks is None else grown(_or_none_of(s.mask_RW, masks), (size, masks), -1),
            token_ids_RN=None if ids is None else grown(_or_none_of(s.token_ids_RN, ids), (size, ids), 0),
        )
        for s in samplings
    ]


def alike_readings(tiles: Sequence[Sequence[Reading]], size: int, num_tokens: int, mode: str) -> list[list[Reading]]:
    """For each tile that one of the replicas reads, one of each replica: some of nobody, all of the same sizes."""
    nobody = Reading(padded((), size, 0), padded((), size, 0), num_tokens, -1, mode)
    found = []
    for i in range(max(map(len, tiles))):
        each = [own[i] if i < len(own) else nobody for own in tiles]
        num, ids = max(t.num_logprobs for t in each), _widest(t.token_ids_RN for t in each)
        found.append([
            replace(
                t,
                num_logprobs=num,
                token_ids_RN=None if ids is None else grown(_or_none_of(t.token_ids_RN, ids), (size, ids), 0),
            )
            for t in each
        ])  # fmt: skip
    return found


def alike_rows(each: Sequence[Rows], scratch: int) -> list[Rows]:
    """What each replica writes into its rows, as much of it: the rest goes to the scratch row."""
    size = max(len(at) for at, _ in each)
    widths = {name: max(values[name].shape[1:] for _, values in each) for name in each[0][1]}
    return [
        (grown(at, (size,), scratch), {name: grown(x, (size, *widths[name])) for name, x in values.items()})
        for at, values in each
    ]


def alike_tokens(each: Sequence[tuple[np.ndarray, ...]], scratch: int) -> list[tuple[np.ndarray, ...]]:
    """Rows, places and ids of what each replica has sampled, as many: the rest goes to the scratch row."""
    size = max(len(rows) for rows, _, _ in each)
    return [(grown(rows, (size,), scratch), *(grown(x, (size,), 0) for x in others)) for rows, *others in each]


def alike_moves(each: Sequence[tuple[tuple[np.ndarray, ...], ...]]) -> list[tuple[tuple[np.ndarray, ...], ...]]:
    """Source and target blocks of each replica, as many: padding copies the null block onto itself."""
    size = max(len(x) for sides in each for side in sides for x in side)
    return [tuple(tuple(grown(x, (size,), 0) for x in side) for side in sides) for sides in each]


def grown(x: np.ndarray, shape: tuple[int, ...], fill: int | None = None) -> np.ndarray:
    """x of that shape, which is no smaller, with `fill` behind it; None: its last ones, again and again."""
    if x.shape == shape:
        return x
    if fill is None:
        return np.pad(x, [(0, size - had) for size, had in zip(shape, x.shape, strict=True)], mode="edge")
    out = np.full(shape, fill, x.dtype)
    out[tuple(slice(had) for had in x.shape)] = x
    return out


def _widest(arrays: Iterable[np.ndarray | None]) -> int | None:
    """The most columns of those that are there; None: none is."""
    return max((x.shape[1] for x in arrays if x is not None), default=None)


def _or_none_of(x: np.ndarray | None, width: int) -> np.ndarray:
    return np.zeros((0, width), np.int32) if x is None else x
