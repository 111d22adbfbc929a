"""The cache of converted weights: every leaf as it is placed, in one safetensors file, so that a start only maps it.

A file's name is made of its checkpoint's identity, the dtype, and a digest of the model's leaves and of how they are
arranged: what would hold other numbers has another name. The header holds a checksum a leaf; a file that fails one, or
is cut short, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from ...models.interface import ModelSpec
from .cache_dir import cache_dir
from .safetensors import DTYPES, open_safetensors
from .tree import Leaf, leaves_of

log = logging.getLogger(__name__)

CONVERTER = 1  # raise it when the same file would be converted to other numbers
ABANDONED = 3600  # seconds without a write
DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class CorruptError(ValueError):
    """A file of converted weights is not what its header, or its name, says."""


def converted_dir() -> Path:
    return cache_dir() / "converted"


def converted_path(identity: str, model: ModelSpec, dtype: str) -> Path:
    """Where the weights of a checkpoint, converted for a model, are or will be kept."""
    digest = hashlib.sha256(f"converter {CONVERTER}".encode())
    for leaf in _stored(leaves_of(model, dtype)):
        digest.update(f"{leaf.path} {leaf.spec.shape} {leaf.dtype} {leaf.source}\n".encode())
    digest.update(repr(sorted(model.pattern_sizes.items())).encode())
    return converted_dir() / f"{identity}-{dtype}-{digest.hexdigest()[:8]}.safetensors"


def open_converted(path: Path) -> Callable[[Leaf], np.ndarray]:
    """A function from a leaf to its value, a view of the mapped file. It raises CorruptError if a checksum differs."""
    try:
        file = open_safetensors(path)
    except ValueError as error:
        raise CorruptError(str(error)) from error

    def read(leaf: Leaf) -> np.ndarray:
        entry = file.header.get(leaf.path)
        if entry is None or tuple(entry["shape"]) != leaf.spec.shape or DTYPES[entry["dtype"]] != leaf.dtype:
            raise CorruptError(f"{path}: expected {leaf.path} {leaf.spec.shape} {leaf.dtype}, found {entry}")
        value = file.get(leaf.path)
        if (found := checksum(value)) != file.metadata.get(leaf.path):
            raise CorruptError(f"{path}: checksum of {leaf.path} is {found}, expected {file.metadata.get(leaf.path)}")
        return value

    return read


@contextmanager
def keeping(path: Path, leaves: list[Leaf]) -> Iterator[Callable[[Leaf, np.ndarray], np.ndarray]]:
    """Gives a function that writes a leaf's value and returns it; call it in the order of `leaves`.

    The file appears under its name only when the block ends without an error, in place of older ones for the same
    checkpoint and dtype. Where the cache folder cannot be written or is full, nothing is kept and a warning says so.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
    except OSError as error:
        log.warning("converted weights are not kept, so every start will convert: %s", error)
        yield lambda leaf, value: value
        return
    try:
        with open(handle, "wb") as file:
            with _Appender(file, _header(leaves, {})) as appender:
                yield appender.append
            if appender.error:
                log.warning("converted weights are not kept, so every start will convert: %s", appender.error)
                # closing writes what is left, and fails again
                with suppress(OSError):
                    file.close()
                os.unlink(partial)
                return
            file.seek(0)
            file.write(_header(leaves, appender.sums))
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    _remove_leftovers(path)


def _remove_leftovers(path: Path) -> None:
    """Deletes what else there is of the checkpoint and dtype: older files, and what a killed process left half-written.

    A half-written file that is younger than ABANDONED may still be another process's.
    """
    for other in path.parent.glob(path.name[: -len("12345678.safetensors")] + "*"):
        with suppress(FileNotFoundError):
            if other != path and (other.suffix != ".partial" or time.time() - other.stat().st_mtime > ABANDONED):
                other.unlink()


def checksum(x: np.ndarray) -> str:
    """The CRC-32 of the array's bytes, in 8 hex digits."""
    return f"{zlib.crc32(x.reshape(-1).view(np.uint8).data):08x}"


class _Appender:
    """Writes values behind the caller's back, one at a time, so that at most two are held.

    A disk that is full ends the writing, not the caller: `error` tells.
    """

    def __init__(self, file: IO[bytes], header: bytes):
        self.file = file
        self.sums: dict[str, str] = {}
        self.error: OSError | None = None
        self.thread = ThreadPoolExecutor(1)
        self.last = self.thread.submit(self._write, header)

    def __enter__(self) -> _Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()
        self.last.result()

    def append(self, leaf: Leaf, value: np.ndarray) -> np.ndarray:
        self.last.result()
        self.last = self.thread.submit(self._keep, leaf.path, value)
        return value

    def _keep(self, path: str, value: np.ndarray) -> None:
        self.sums[path] = checksum(value)
        self._write(value.reshape(-1).view(np.uint8).data)

    def _write(self, data: bytes | memoryview) -> None:
        if self.error:
            return
        try:
            self.file.write(data)
            self.file.flush()
        except OSError as error:
            self.error = error


def _header(leaves: list[Leaf], sums: dict[str, str]) -> bytes:
    """The safetensors header. Its length does not depend on the sums, which are known last."""
    header: dict = {"__metadata__": {leaf.path: sums.get(leaf.path, "0" * 8) for leaf in _stored(leaves)}}
    at = 0
    for leaf in _stored(leaves):
        offsets = [at, at + leaf.nbytes]
        header[leaf.path] = {"dtype": DTYPE_NAMES[leaf.dtype], "shape": leaf.spec.shape, "data_offsets": offsets}
        at += leaf.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _stored(leaves: list[Leaf]) -> list[Leaf]:
    """Leaves that come from the checkpoint, and not from the model itself."""
    return [leaf for leaf in leaves if leaf.names]
