"""Which blocks of one cache group are free, shared or remembered. Block 0 is the null block and never handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .block_hashes import size_of


class BlockPool:
    """One group's blocks: a free queue (evicted from its front), reference counts, and the keys of full blocks.

    Several blocks may hold the same content, each for its own request; `find` names the one registered first.
    """

    def __init__(self, num_blocks: int, group: int = 0):
        self.num_blocks = num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        # the group is a part of the key: one content has other K/V in another group
        self.suffix = size_of(group)
        self.key_of: dict[int, bytes] = {}
        self.holder: dict[bytes, int] = {}
        self.duplicates: dict[bytes, list[int]] = {}
        self.evict: Callable[[BlockPool], int] | None = None  # names the free block that is used next

    def take(self) -> int:
        """A free block, from now on used once. What it held is forgotten (evicted)."""
        if self.evict is None:
            block, _ = self.free.popitem(last=False)
        else:
            block = self.evict(self)
            if not isinstance(block, int) or block not in self.free:
                raise ValueError(f"evict(pool) named block {block!r}, which is not free: one of pool.free is right")
            del self.free[block]
        if block in self.key_of:
            self._forget(block)
        self.refs[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Uses each block once more; a free one leaves the free queue."""
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                del self.free[block]
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Uses each block once less. Give them in the order in which they may be evicted.

        Free blocks without a key go to the front of the queue, to be reused at once, those with one to its end.
        """
        refs, free, key_of = self.refs, self.free, self.key_of
        for block in blocks:
            assert refs[block] > 0, f"block {block} is released more often than it was taken"
            refs[block] -= 1
            if refs[block] == 0:
                free[block] = None
                if block not in key_of:
                    free.move_to_end(block, last=False)

    def register(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Lets `find` see what blocks hold, or are scheduled to hold, but for the null block and registered ones."""
        key_of, holder, suffix = self.key_of, self.holder, self.suffix
        for block, digest in zip(blocks, digests, strict=True):
            if not block or block in key_of:
                continue
            key_of[block] = key = digest + suffix
            if holder.setdefault(key, block) != block:
                self.duplicates.setdefault(key, []).append(block)

    def find(self, digest: bytes) -> int | None:
        return self.holder.get(digest + self.suffix)

    def find_first(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the first of these, up to the first that nobody holds."""
        suffix = self.suffix
        found: list[Any] = list(map(self.holder.get, [digest + suffix for digest in digests]))
        return found[: found.index(None)] if None in found else found

    def forget_all(self) -> None:
        """Empties the prefix cache; the order of the free queue stays."""
        self.key_of, self.holder, self.duplicates = {}, {}, {}

    def _forget(self, block: int) -> None:
        key = self.key_of.pop(block)
        others = self.duplicates.get(key, [])
        if self.holder[key] != block:
            others.remove(block)
        elif others:
            self.holder[key] = others.pop(0)
        else:
            del self.holder[key]
        if key in self.duplicates and not others:
            del self.duplicates[key]

    def dump(self) -> dict[str, Any]:
        """Its whole state as a JSON-able value."""
        holders = [[key.hex(), [block, *self.duplicates.get(key, [])]] for key, block in self.holder.items()]
        refs = [[block, n] for block, n in enumerate(self.refs) if n]
        return {"free": list(self.free), "refs": refs, "holders": holders}

    def restore(self, value: dict[str, Any]) -> None:
        """Takes over a dumped state; the number of blocks must be the same."""
        self.free = OrderedDict.fromkeys(value["free"])
        self.refs = [0] * self.num_blocks
        for block, n in value["refs"]:
            self.refs[block] = n
        self.forget_all()
        for text, blocks in value["holders"]:
            key = bytes.fromhex(text)
            self.holder[key] = blocks[0]
            if blocks[1:]:
                self.duplicates[key] = blocks[1:]
            self.key_of.update(dict.fromkeys(blocks, key))
