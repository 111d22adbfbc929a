"""Reads GGUF files (llama.cpp's format, ggml/docs/gguf.md): metadata, and where each tensor's bytes lie."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_quants import TYPE_NAMES, nbytes_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's place in the file. `shape` is in numpy's order (GGUF writes the fastest axis first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.type_id]


@dataclass(frozen=True)
class GGUFFile:
    """A mapped GGUF file. Arrays that `raw` returns are views of the map and keep it open."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray  # the whole file, uint8

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8, as rows: [..., bytes of one row of the fastest axis]."""
        t = self.tensors[name]
        return self.data[t.offset : t.offset + t.nbytes].reshape(*t.shape[:-1], -1)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parses the header of a GGUF file and maps the rest.

    Raises ValueError, naming the file and the bytes expected and found, if it is truncated or not what it says;
    NotImplementedError for a version or a tensor type that octavo does not read.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise ValueError(f"{path}: expected a GGUF header of at least 24 bytes, found a file of {size} bytes")
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    cursor = _Cursor(path, data)
    try:
        metadata, infos = _read_header(cursor)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a string before byte {cursor.at} is not UTF-8: the file is corrupt") from error
    return GGUFFile(path, metadata, _place_tensors(cursor, metadata, infos), data)


class _Cursor:
    """A position in the header that refuses to leave the file."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.bytes, self.at = path, data.data, 0

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self.bytes):
            raise ValueError(
                f"{self.path}: expected {count} more bytes of GGUF header at byte {self.at}, "
                f"found {len(self.bytes) - self.at}: the file is truncated or corrupt"
            )
        piece = self.bytes[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: metadata type {kind} before byte {self.at} is unknown: the file is corrupt")
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            code = SCALARS[kind]
            values = self.take(count * struct.calcsize("<" + code))
            return np.frombuffer(values, np.dtype(code).newbyteorder("<")).tolist()
        if kind == ARRAY:
            raise NotImplementedError(f"{self.path}: an array of arrays in the metadata at byte {self.at}")
        # every other element has at least a length, so a corrupt count fails here and not after hours
        if count * 8 > len(self.bytes) - self.at:
            raise ValueError(
                f"{self.path}: expected {count} array elements at byte {self.at}, "
                f"found {len(self.bytes) - self.at} bytes: the file is truncated or corrupt"
            )
        return [self.value(kind) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], list[tuple]]:
    magic, version = bytes(cursor.take(4)), cursor.scalar("I")
    if magic != MAGIC:
        raise ValueError(f"{cursor.path}: expected the magic {MAGIC!r}, found {magic!r}: not a GGUF file")
    if version not in VERSIONS:
        raise NotImplementedError(f"{cursor.path}: GGUF version {version} (little endian) is not one of {VERSIONS}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name, rank = cursor.string(), cursor.scalar("I")
        if not 1 <= rank <= 4:
            raise ValueError(f"{cursor.path}: tensor {name!r} has {rank} axes, expected 1 to 4: the file is corrupt")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        if 0 in shape:
            raise ValueError(f"{cursor.path}: tensor {name!r} has shape {shape}: the file is corrupt")
        infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    return metadata, infos


def _place_tensors(cursor: _Cursor, metadata: dict[str, Any], infos: list[tuple]) -> dict[str, GGUFTensor]:
    path, size = cursor.path, len(cursor.bytes)
    if metadata.get("split.count", 1) not in (0, 1):
        raise NotImplementedError(f"{path}: GGUF split in {metadata['split.count']} files: join them with gguf-split")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"{path}: general.alignment is {alignment!r}, expected a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in infos:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name!r} occurs twice: the file is corrupt")
        nbytes = nbytes_of(f"{path}: tensor {name!r}", type_id, shape)
        if start + offset + nbytes > size:
            raise ValueError(
                f"{path}: expected tensor {name!r} in bytes {start + offset} to {start + offset + nbytes}, "
                f"found a file of {size} bytes: it is truncated or corrupt"
            )
        tensors[name] = GGUFTensor(name, shape, type_id, start + offset, nbytes)
    return tensors
