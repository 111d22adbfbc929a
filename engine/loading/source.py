"""What a checkpoint's tensors are to the loader: names, and one numpy array at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Stored:
    """A tensor as its file holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # or quantisation, in the words of the file's format
    num_bytes: int


class TensorSource(Protocol):
    """Tensors under their Hugging Face names.

    `identity` names the content for the cache of converted weights; None means that reading is as fast as that cache.
    """

    @property
    def identity(self) -> str | None: ...

    def names(self) -> list[str]: ...

    def get(self, name: str) -> np.ndarray:
        """The tensor; perhaps a read-only view of a mapped file."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes of what `get` returns."""
        ...

    def stored(self, name: str) -> Stored:
        """What the file says about the tensor, without reading it."""
        ...


def shards_of_index(index: Path) -> dict[str, Path]:
    """Tensor name -> file, from a *.index.json. Raises ValueError naming the shards that are not there."""
    try:
        names = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: expected JSON with a weight_map from tensor to file ({error!r})") from error
    missing = sorted({file for file in names.values() if not (index.parent / file).exists()})
    if missing:
        raise ValueError(f"{index} names files that are not in its folder: {', '.join(missing)}")
    return {name: index.parent / file for name, file in names.items()}
