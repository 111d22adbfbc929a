"""Which blocks of one cache group are free, shared or remembered. Block 0 is the null block and never handed out."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = hashlib.sha256(b"octavo: nothing precedes the first block").digest()


class BlockKey(NamedTuple):
    """Everything the K/V of one full block depend on. Equal keys, equal content.

    `extra` holds what is not a token, tagged by kind ("salt"; later "lora", "mm"), so that two kinds never collide.
    """

    parent: bytes  # digest of the block before it, or ROOT
    tokens: tuple[int, ...]
    extra: tuple[tuple[str, bytes], ...] = ()

    def digest(self) -> bytes:
        """The sha256 of an encoding in which every part is fixed in size or preceded by its size."""
        return digest_of(self.parent, _size(len(self.tokens)) + array("i", self.tokens).tobytes(), self.extra)


def digest_of(parent: bytes, tokens: bytes, extra: tuple[tuple[str, bytes], ...]) -> bytes:
    """The digest of a BlockKey whose tokens are encoded already, their number first."""
    for tag, value in extra:
        name = tag.encode()
        tokens += _size(len(name)) + name + _size(len(value)) + value
    return hashlib.sha256(parent + tokens).digest()


def digests_of(
    parent: bytes, tokens: Sequence[int], size: int, extra: Callable[[int], tuple[tuple[str, bytes], ...]]
) -> Iterator[bytes]:
    """The digests of the full blocks that tokens make behind `parent`; extra(i) is what the i-th has beside tokens."""
    data, head, width = array("i", tokens).tobytes(), _size(size), size * array("i").itemsize
    for i in range(len(tokens) // size):
        parent = digest_of(parent, head + data[i * width : (i + 1) * width], extra(i))
        yield parent


class BlockPool:
    """One group's blocks: a free queue (evicted from its front), reference counts, and the keys of full blocks.

    Several blocks may hold the same content, each for its own request; `find` names the one registered first.
    """

    def __init__(self, num_blocks: int, group: int = 0):
        self.num_blocks = num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        # the group is a part of the key: one content has other K/V in another group
        self.suffix = _size(group)
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

    def share(self, block: int) -> None:
        """Uses a block once more; a free one leaves the free queue."""
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Uses each block once less. Give them in the order in which they may be evicted.

        Free blocks without a key go to the front of the queue, to be reused at once, those with one to its end.
        """
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is released more often than it was taken"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if block not in self.key_of:
                    self.free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """Lets `find` see what a block holds, or is scheduled to hold. Does nothing for a registered one."""
        if block in self.key_of:
            return
        key = digest + self.suffix
        self.key_of[block] = key
        if key in self.holder:
            self.duplicates.setdefault(key, []).append(block)
        else:
            self.holder[key] = block

    def find(self, digest: bytes) -> int | None:
        return self.holder.get(digest + self.suffix)

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


def _size(n: int) -> bytes:
    return n.to_bytes(4, "little")
