"""What the K/V of full blocks depend on, as chains of digests: the keys of the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .request import Request

ROOT = hashlib.sha256(b"octavo: nothing precedes the first block").digest()
MOST_REMEMBERED = 64  # sequences

Extra = tuple[tuple[str, bytes], ...]


class BlockKey(NamedTuple):
    """Everything the K/V of one full block depend on. Equal keys, equal content.

    `extra` holds what is not a token, tagged by kind ("salt"; later "lora", "mm"), so that two kinds never collide.
    """

    parent: bytes  # digest of the block before it, or ROOT
    tokens: tuple[int, ...]
    extra: Extra = ()

    def digest(self) -> bytes:
        """The sha256 of an encoding in which every part is fixed in size or preceded by its size."""
        return digest_of(self.parent, size_of(len(self.tokens)) + encoded(self.tokens), self.extra)


def size_of(n: int) -> bytes:
    """A size, encoded."""
    return n.to_bytes(4, "little")


def encoded(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def digest_of(parent: bytes, block: bytes, extra: Extra) -> bytes:
    """The digest of a BlockKey whose tokens are encoded already, their number first."""
    text = b"".join(size_of(len(part)) + part for tag, value in extra for part in (tag.encode(), value))
    return hashlib.sha256(parent + block + text).digest()


def digests_of(parent: bytes, data: bytes, size: int, extras: Sequence[Extra]) -> list[bytes]:
    """The digests of the full blocks, of `size` encoded tokens, that follow `parent`.

    `extras` are what the first ones depend on beside tokens.
    """
    sha256, head, width, found = hashlib.sha256, size_of(size), size * 4, []
    end = len(data) // width * width
    for i, extra in enumerate(extras[: end // width]):
        parent = digest_of(parent, head + data[i * width : (i + 1) * width], extra)
        found.append(parent)
    for at in range(len(found) * width, end, width):
        parent = sha256(parent + head + data[at : at + width]).digest()
        found.append(parent)
    return found


def extra_keys(request: Request, index: int) -> Extra:
    """What the K/V of its index-th block depend on beside tokens. A block's digest reaches all later ones."""
    keys = []
    if index == 0 and request.cache_salt is not None:
        keys.append(("salt", request.cache_salt.encode("utf-8", "surrogatepass")))
    if index < len(request.block_digests):
        keys.append(("embeds", request.block_digests[index]))
    return tuple(keys)


class Hasher:
    """Extends the hashes of requests over the blocks that their tokens fill.

    Many requests begin as another did: its hashes are remembered, and digests are made only from where they part.
    """

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        # by the digest of the first block, which has the salt in it: all tokens encoded, and their hashes
        self.remembered: OrderedDict[bytes, tuple[np.ndarray, list[bytes]]] = OrderedDict()

    def extend(self, r: Request) -> None:
        """Gives a request the hashes of all its full blocks."""
        size, first = self.size, len(r.hashes)
        if (first + 1) * size > len(r.tokens):
            return
        if not first and not r.block_digests:
            self._start(r)
            return
        # the salt is the first block's alone
        last = max(len(r.block_digests), r.cache_salt is not None)
        extras = [extra_keys(r, i) for i in range(first, last)]
        parent = r.hashes[-1] if first else ROOT
        r.hashes += digests_of(parent, encoded(r.tokens[first * size :]), size, extras)

    def _start(self, r: Request) -> None:
        size, data = self.size, encoded(r.tokens)
        r.hashes += digests_of(ROOT, data[: size * 4], size, [extra_keys(r, 0)])
        start, tokens = r.hashes[0], np.frombuffer(data, np.int32)
        if (before := self.remembered.get(start)) is not None:
            r.hashes += before[1][1 : num_alike(tokens, before[0]) // size]
        known = len(r.hashes)
        r.hashes += digests_of(r.hashes[-1], data[known * size * 4 :], size, ())
        # what has grown since is of no use: nobody compares tokens that were not there
        self.remembered[start] = tokens, r.hashes
        self.remembered.move_to_end(start)
        if len(self.remembered) > MOST_REMEMBERED:
            self.remembered.popitem(last=False)


def num_alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many of their first elements are the same."""
    most = min(len(a), len(b))
    differ = a[:most] != b[:most]
    return int(differ.argmax()) if differ.any() else most
