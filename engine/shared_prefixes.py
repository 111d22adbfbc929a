"""Which sequences of a step begin with the same blocks: read off the block tables, anew only when that may change.

Attention then reads those blocks once for all of a group (decision 023). Letters: S sequences of a step, B blocks of a
table, W tiles, C members of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..models.interface import SharedPrefixes
from .plan import Admission, Chunk, TableWrite

TILE = 32  # members of a tile: with all heads of a group, as many rows as one product likes
SPARE_TILES = 8  # beyond a step's sequences by tiles: so many groups always fit
# tokens that a step, and a group, need not read again. Below, two more launches a layer cost as much: 10 us are 10,000
# tokens of 4 KiB, what a layer of an 8B model holds of one
LEAST_SAVED, LEAST_OF_GROUP = 8192, 1024
PADDING = 500  # such tokens are read while a layer of that model computes one more token
DEPTH = 4  # times that a group is split into those that share more

Group = tuple[np.ndarray, int]  # members' places in the step, and how many blocks they share


class PrefixFinder:
    """Finds the groups of each step. Remembers them while nobody comes, goes, or has other first blocks."""

    def __init__(self, windows: Sequence[int | None], block_size: int):
        self.windows, self.block_size = windows, block_size
        self.forget()

    def forget(self) -> None:
        """Has the next `find` look at the tables again."""
        self.key: bytes | None = None
        self.found: list[list[Group]] = []
        self.saved = 0
        self.laid: dict[int, tuple[SharedPrefixes | None, ...]] = {}
        self.reach = [0] * len(self.windows)  # blocks of a table on which `found` rests

    def note(self, admitted: Sequence[Admission], writes: Sequence[TableWrite]) -> None:
        """Forgets if these change a table where it matters. New blocks at an end are nobody else's, and do not."""
        if admitted or any(w.index < self.reach[w.group] for w in writes):
            self.forget()

    def find(self, chunks: Sequence[Chunk], row_S: np.ndarray, tables: Sequence[np.ndarray]) -> int:
        """Looks for groups. Returns how many tokens need not be read again.

        `row_S`: the rows of the chunks, -1 for one of several tokens. `tables` are the host's, of all rows.
        """
        key = row_S.tobytes()
        if self.key != key:
            self.forget()
            self.key = key
            start_S = np.array([c.start for c in chunks], np.int32)
            self.found = [
                [] if window is not None else self._groups(row_S, start_S, table)
                for window, table in zip(self.windows, tables, strict=True)
            ]
            self.reach = [max((blocks for _, blocks in groups), default=0) for groups in self.found]
            self.saved = sum(_saved(len(m), blocks, self.block_size) for groups in self.found for m, blocks in groups)
        return self.saved

    def _groups(self, row_S: np.ndarray, start_S: np.ndarray, table: np.ndarray) -> list[Group]:
        """The groups of one cache group that save most, as many as there are tiles for."""
        first_S = np.where(row_S >= 0, table[row_S, 0], 0)
        blocks, counts = np.unique(first_S, return_counts=True)
        often = (counts > 1) & (blocks > 0)
        if not often.any():
            return []
        tiles = len(row_S) // TILE + SPARE_TILES
        order = np.argsort(-counts[often], kind="stable")[:tiles]
        groups: list[Group] = []
        for block in blocks[often][order]:
            members = np.flatnonzero(first_S == block)
            # the token of this step is not shared, whatever the table says
            whole_S = start_S[members] // self.block_size
            own_SB = table[row_S[members], : whole_S.max(initial=0)]
            own_SB = np.where(np.arange(own_SB.shape[1]) < whole_S[:, None], own_SB, 0)
            groups += self._best(members, own_SB, 0, DEPTH)
        groups.sort(key=lambda g: -(len(g[0]) - 1) * g[1])
        ends = np.cumsum([-(-len(members) // TILE) for members, _ in groups])
        return groups[: int(np.searchsorted(ends, tiles, side="right"))]

    def _best(self, members: np.ndarray, own_SB: np.ndarray, start: int, depth: int) -> list[Group]:
        """One group of all members, or those who share more apart, whichever saves more. They share `start` blocks."""
        alike_B = (own_SB[:, start:] == own_SB[0, start:]).all(0) & (own_SB[0, start:] > 0)
        length = start + int(np.argmin(np.append(alike_B, False)))
        groups = [(members, length)] if _saved(len(members), length, self.block_size) >= LEAST_OF_GROUP else []
        if depth == 0 or length == own_SB.shape[1]:
            return groups
        next_S = own_SB[:, length]
        blocks, counts = np.unique(next_S, return_counts=True)
        parts: list[Group] = []
        for block in blocks[(counts > 1) & (blocks > 0)]:
            some = next_S == block
            parts += self._best(members[some], own_SB[some], length, depth - 1)
        one, several = (sum(_saved(len(m), n, self.block_size) for m, n in gs) for gs in (groups, parts))
        return parts if several > one else groups

    def lay_out(self, num_seqs: int) -> tuple[SharedPrefixes | None, ...]:
        """What was found, for a step padded to so many sequences. The arrays are kept: nobody may write to them."""
        if num_seqs not in self.laid:
            self.laid[num_seqs] = self._laid_out(self.found, num_seqs)
        return self.laid[num_seqs]

    def nothing(self, num_seqs: int) -> tuple[SharedPrefixes | None, ...]:
        """As lay_out, of a step in which nobody shares anything."""
        return self._laid_out([[] for _ in self.windows], num_seqs)

    def _laid_out(self, found: list[list[Group]], num_seqs: int) -> tuple[SharedPrefixes | None, ...]:
        return tuple(
            None if window is not None else laid_out(groups, num_seqs, self.block_size)
            for window, groups in zip(self.windows, found, strict=True)
        )


def worth_it(saved: int, padding: int) -> bool:
    """Whether not to read so many tokens again is worth so many more of padding, and two more launches a layer."""
    return saved >= LEAST_SAVED + PADDING * padding


def _saved(members: int, blocks: int, block_size: int) -> int:
    """Tokens that are not read again."""
    return (members - 1) * blocks * block_size


def laid_out(groups: Sequence[Group], num_seqs: int, block_size: int) -> SharedPrefixes:
    """Groups cut into tiles. The sizes follow from num_seqs alone."""
    tiles = num_seqs // TILE + SPARE_TILES
    members_WC, lengths_W = np.full((tiles, TILE), -1, np.int32), np.zeros(tiles, np.int32)
    lengths_S, at = np.zeros(num_seqs, np.int32), 0
    for members, blocks in groups:
        lengths_S[members] = blocks * block_size
        for start in range(0, len(members), TILE):
            some = members[start : start + TILE]
            members_WC[at, : len(some)], lengths_W[at], at = some, blocks * block_size, at + 1
    return SharedPrefixes(members_WC, lengths_W, lengths_S)
