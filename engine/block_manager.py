"""The block tables of all cache groups: what a request hits, is given, shares and gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.keeps import ALL, Keeps, by_window
from .block_hashes import Hasher
from .block_pool import BlockPool
from .plan import TableWrite
from .request import Request


@dataclass(frozen=True)
class Hit:
    """Tokens that a request need not compute, and the blocks that hold them, one tuple a group.

    `copies` are (group, source block, index in the table): blocks that it must own, filled from another's.
    """

    length: int
    blocks: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, int, int], ...] = ()


def peak_blocks(keeps: Keeps, tokens: int, prompt: int, block_size: int, max_num_batched_tokens: int) -> int:
    """The most blocks that a sequence of `tokens`, of which `prompt` are its prompt, holds at once.

    A window forgets, but a chunk is written whole.
    """
    most = -(-keeps.most(tokens, prompt) // block_size)
    if keeps.window is None:
        return most
    behind = -(-(keeps.window + max_num_batched_tokens) // block_size) + 1
    return min(most, -(-keeps.sinks // block_size) + behind)


def _front(table: Sequence[int]) -> int:
    """How many blocks a table has before the null blocks."""
    return next((i for i, block in enumerate(table) if not block), len(table))


class BlockManager:
    """One pool a cache group; in a request, the tables of all groups are equally long.

    `windows` says how many tokens each group's attention looks back, None for all; of those that look back on all, the
    layout `keeps` what it does. Blocks wholly behind a window, or beyond a budget's slots, are freed while a request
    runs, and replaced by the null block.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool,
        max_num_batched_tokens: int,
        keeps: Keeps = ALL,
    ):
        if not windows or len(windows) != len(num_blocks):
            raise ValueError(f"{len(windows)} windows and {len(num_blocks)} pools: there must be one of each a group")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size {block_size} is not a power of two")
        if min(num_blocks) < 2:
            raise ValueError(f"num_blocks {list(num_blocks)}: a group needs the null block and one more")
        if any(w is not None and w < 1 for w in windows):
            raise ValueError(f"windows {list(windows)} must be at least 1 token, or None")
        self.windows, self.num_blocks, self.block_size = tuple(windows), tuple(num_blocks), block_size
        self.caching, self.max_num_batched_tokens = enable_prefix_caching, max_num_batched_tokens
        self.layout_keeps = keeps
        self.keeps = by_window(keeps, windows)
        self.sinks = [self.ceil(k.sinks) for k in self.keeps]  # blocks
        self.forgets = any(k.window or k.budget for k in self.keeps)
        # where the device chooses what stays, chunks end at cuts, and no block is another request's
        self.cuts = keeps if any(k.budget for k in self.keeps) else None
        if self.cuts and enable_prefix_caching:
            raise ValueError(f"enable_prefix_caching=True: under {keeps} a block does not follow from its prefix")
        self.evict: Callable[[BlockPool], int] | None = None
        self.hasher = Hasher(block_size)
        self.clear()

    def clear(self) -> None:
        """Starts from pools that nobody has used."""
        self.pools = [BlockPool(n, group) for group, n in enumerate(self.num_blocks)]
        self.set_evict(self.evict)

    def set_evict(self, evict: Callable[[BlockPool], int] | None) -> None:
        """Has every pool ask which free block to use next; None: the one freed first."""
        self.evict = evict
        for pool in self.pools:
            pool.evict = evict

    def ceil(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def peak(self, group: int, tokens: int, prompt: int) -> int:
        """The most blocks a sequence of this length, of which `prompt` tokens are its prompt's, holds at once."""
        return peak_blocks(self.keeps[group], tokens, prompt, self.block_size, self.max_num_batched_tokens)

    def too_small(self, tokens: int, prompt: int) -> int | None:
        """The first group whose whole pool cannot hold a sequence of this length; None if all can."""
        groups = range(len(self.pools))
        return next((g for g in groups if self.peak(g, tokens, prompt) > self.num_blocks[g] - 1), None)

    def usage(self) -> float:
        """The used part, 0 to 1, of the fullest group."""
        return max(1 - len(p.free) / (p.num_blocks - 1) for p in self.pools)

    def lookup(self, r: Request) -> Hit:
        """The longest prefix that every group still holds, in whole blocks.

        What is to be read of the request, and its last token, is left to compute. A window group needs only its last
        blocks. Changes no pool.
        """
        if not self.caching or r.params.skip_reading_prefix_cache:
            return Hit(0, ((),) * len(self.pools))
        self.hasher.extend(r)
        length, before = r.most_hit // self.block_size, -1
        if len(self.pools) == 1 and self.keeps[0].window is None:
            blocks = self.pools[0].find_first(r.hashes[:length])
            return Hit(len(blocks) * self.block_size, (tuple(blocks),))
        while length != before:
            before = length
            for group in range(len(self.pools)):
                length = self._longest(group, r.hashes, length)
        tables = []
        for pool, keeps, sinks in zip(self.pools, self.keeps, self.sinks):
            first = 0 if keeps.window is None else max(0, length - self.ceil(keeps.window - 1))
            needed = (i < sinks or i >= first for i in range(length))
            tables.append(tuple(pool.holder[h + pool.suffix] if n else 0 for h, n in zip(r.hashes, needed)))
        return Hit(length * self.block_size, tuple(tables))

    def _longest(self, group: int, hashes: list[bytes], limit: int) -> int:
        """The largest number of blocks, up to limit, after which a sequence of these hashes can go on in this group."""
        pool, window, sinks = self.pools[group], self.keeps[group].window, self.sinks[group]
        whole = limit if window is None else min(limit, sinks)
        found = len(pool.find_first(hashes[:whole]))
        limit = limit if found == whole else found
        if window is None:
            return limit
        need, run, end = self.ceil(window - 1), 0, limit
        for i in range(limit - 1, -1, -1):
            if run == need:
                break
            if pool.find(hashes[i]) is None:
                run, end = 0, i
            else:
                run += 1
        return end

    def fork(self, r: Request, source: Request) -> Hit | None:
        """All but the last prompt token, from a running sibling that has computed them in an earlier step.

        The block in which the last prompt token lies is copied, those before it are shared. None if the sibling's
        window has moved on.
        """
        length = len(r.prompt) - 1
        last, partial = divmod(length, self.block_size)
        tables = []
        for table, keeps, sinks in zip(source.blocks, self.keeps, self.sinks):
            oldest = 0 if keeps.window is None else max(0, length - keeps.window + 1) // self.block_size
            sinks = min(sinks, oldest)
            if 0 in table[oldest : last + (partial > 0)]:
                return None
            tables.append((*table[:sinks], *(0,) * (oldest - sinks), *table[oldest:last]))
        copies = tuple((g, table[last], last) for g, table in enumerate(source.blocks)) if partial else ()
        return Hit(length, tuple(tables), copies)

    def admit(self, r: Request, hit: Hit, upto: int, spare: int) -> bool:
        """Gives a request the hit's blocks and new ones for its tokens below `upto`.

        False, and nothing changed, unless all it is known to need (not only this chunk) fits now and leaves `spare`
        blocks of each group.
        """
        for group, pool in enumerate(self.pools):
            held = [b for b in hit.blocks[group] if b]
            # a hit on a free block takes that block out of the free ones
            revived = [pool.refs[b] for b in held].count(0)
            most = self.peak(group, len(r.tokens), len(r.prompt))
            new = max(most - len(held), self._used(group, r, upto) - len(hit.blocks[group]))
            if new > len(pool.free) - revived - spare:
                return False
        r.blocks, r.computed, r.registered = [list(b) for b in hit.blocks], hit.length, len(hit.blocks[0])
        for pool, table in zip(self.pools, r.blocks):
            pool.share(b for b in table if b)
        for group, (pool, table) in enumerate(zip(self.pools, r.blocks)):
            table += [pool.take() for _ in range(self._used(group, r, upto) - len(table))]
            table += [0] * (self.ceil(upto) - len(table))
        return True

    def _used(self, group: int, r: Request, upto: int) -> int:
        """Blocks of its table that are in use, from the front, when its tokens below `upto` are computed."""
        return self.ceil(self.keeps[group].slots(upto, len(r.prompt)))

    def missing(self, r: Request, upto: int) -> int:
        """Blocks that it needs of the neediest group for its tokens below `upto`."""
        if not self.cuts:
            return self.ceil(upto) - len(r.blocks[0])
        groups = enumerate(zip(self.keeps, r.blocks))
        # what a cut leaves unused is free only once the request itself goes on
        return max(0, *(self._used(g, r, upto) - (_front(t) if k.budget else len(t)) for g, (k, t) in groups))

    def reserve(self, r: Request, upto: int, writes: list[TableWrite]) -> bool:
        """Makes room for tokens below `upto`; False if a group has too few free blocks. Adds what changed to `writes`.

        First frees what lies behind the window. A step in flight may still read those blocks: harmless, because
        whoever gets them writes in a later step.
        """
        assert r.row is not None
        if self.forgets:
            self._leave_behind(r, writes)
        length = self.ceil(upto)
        if length <= len(r.blocks[0]) and not self.cuts:
            return True
        used, have = [length] * len(self.pools), [len(r.blocks[0])] * len(self.pools)
        if self.cuts:
            by_budget = [g for g, k in enumerate(self.keeps) if k.budget]
            for g in by_budget:
                used[g], have[g] = self._used(g, r, upto), self._cut(g, r, upto, writes)
        if any(n - m > len(pool.free) for n, m, pool in zip(used, have, self.pools)):
            return False
        for group, (pool, table, first, end) in enumerate(zip(self.pools, r.blocks, have, used)):
            new = [pool.take() for _ in range(end - first)]
            if new:
                writes.append(TableWrite(group, r.row, first, tuple(new)))
                table[first:end] = new
            table += [0] * (length - len(table))
        return True

    def _cut(self, group: int, r: Request, upto: int, writes: list[TableWrite]) -> int:
        """Frees what a budget's cut has left unused, and returns how many blocks there still are."""
        assert r.row is not None
        table = r.blocks[group]
        have, used = _front(table), self._used(group, r, upto)
        if used < have:
            self.pools[group].release(reversed(table[used:have]))
            table[used:have] = [0] * (have - used)
            writes.append(TableWrite(group, r.row, used, (0,) * (have - used)))
        return min(have, used)

    def _leave_behind(self, r: Request, writes: list[TableWrite]) -> None:
        assert r.row is not None
        for group, (keeps, sinks) in enumerate(zip(self.keeps, self.sinks)):
            if keeps.window is None:
                continue
            table = r.blocks[group]
            # one token more than the next query sees: a fork computes the last prompt token again
            end = start = max(0, r.computed - keeps.window) // self.block_size
            while start > sinks and table[start - 1]:
                start -= 1
            if start < end:
                self.pools[group].release(table[i] for i in range(end - 1, start - 1, -1))
                table[start:end] = [0] * (end - start)
                writes.append(TableWrite(group, r.row, start, (0,) * (end - start)))

    def register(self, r: Request) -> None:
        """Lets others hit the blocks that are full of known tokens and scheduled to be computed."""
        full = min(r.computed, len(r.tokens)) // self.block_size
        if self.caching:
            self.hasher.extend(r)
            new = slice(r.registered, full)
            for pool, table in zip(self.pools, r.blocks):
                pool.register(table[new], r.hashes[new])
        r.registered = full

    def release(self, r: Request) -> None:
        """Takes back all blocks of a request, which then has computed nothing. Its tail is evicted before its head."""
        for pool, table in zip(self.pools, r.blocks):
            pool.release(b for b in reversed(table) if b)
        r.blocks, r.computed, r.registered = [], 0, 0

    def reset(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while blocks are in use."""
        if any(len(pool.free) < pool.num_blocks - 1 for pool in self.pools):
            return False
        for pool in self.pools:
            pool.forget_all()
        return True

    def dump(self) -> dict[str, Any]:
        """Its whole state as a JSON-able value."""
        return {
            "windows": list(self.windows),
            "num_blocks": list(self.num_blocks),
            "block_size": self.block_size,
            "enable_prefix_caching": self.caching,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "keeps": vars(self.layout_keeps).copy(),
            "pools": [pool.dump() for pool in self.pools],
        }

    @staticmethod
    def load(value: dict[str, Any]) -> BlockManager:
        """The manager that was dumped."""
        made_of: dict[str, Any] = {name: v for name, v in value.items() if name not in ("pools", "keeps")}
        blocks = BlockManager(**made_of, keeps=Keeps(**value["keeps"]))
        for pool, v in zip(blocks.pools, value["pools"]):
            pool.restore(v)
        return blocks
