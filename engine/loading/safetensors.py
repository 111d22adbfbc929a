"""Tensors of .safetensors files, as views of the mapped files (huggingface/safetensors, "Format").

A reader of our own, because the library's copies each tensor and its errors name neither the file nor the bytes.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .source import Stored, shards_of_index

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class SafetensorsFile:
    """A mapped file: its header, and its tensors as views. `metadata` is what the writer added about itself."""

    path: Path
    header: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    data: np.ndarray  # uint8, after the header

    def get(self, name: str) -> np.ndarray:
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        return self.data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def open_safetensors(path: Path) -> SafetensorsFile:
    """Maps a file. Raises ValueError naming it, and the bytes expected and found, if it is truncated or corrupt."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise ValueError(f"{path}: expected a safetensors header of at least 8 bytes, found a file of {size} bytes")
        # a private map: nobody writes to it, but torch warns of arrays that are not writable
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    length = int(data[:8].view("<u8")[0])
    if length > min(size - 8, MAX_HEADER):
        raise ValueError(
            f"{path}: expected a safetensors header of {length} bytes (limit {MAX_HEADER}), "
            f"found {size - 8}: the file is truncated or corrupt"
        )
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        for name, entry in header.items():
            _check_entry(path, name, entry, size - 8 - length)
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the safetensors header is corrupt: {error!r}") from error
    return SafetensorsFile(path, header, metadata, data[8 + length :])


def _check_entry(path: Path, name: str, entry: dict[str, Any], size: int) -> None:
    if entry["dtype"] not in DTYPES:
        raise NotImplementedError(f"{path}: tensor {name!r} is {entry['dtype']}; supported are {', '.join(DTYPES)}")
    begin, end = entry["data_offsets"]
    count = np.dtype(DTYPES[entry["dtype"]]).itemsize
    for length in entry["shape"]:
        count *= length
    if begin < 0 or end - begin != count:
        shape = entry["shape"]
        raise ValueError(f"{path}: tensor {name!r} of shape {shape} needs {count} bytes, not those {begin} to {end}")
    if end > size:
        raise ValueError(
            f"{path}: expected tensor {name!r} in bytes {begin} to {end} of the data, "
            f"found {size} bytes: the file is truncated"
        )


@dataclass(frozen=True)
class SafetensorsSource:
    """The tensors of one or several files."""

    files: tuple[SafetensorsFile, ...]
    identity: None = None

    @cached_property
    def _where(self) -> dict[str, SafetensorsFile]:
        return {name: file for file in self.files for name in file.header}

    def names(self) -> list[str]:
        return list(self._where)

    def get(self, name: str) -> np.ndarray:
        return self._where[name].get(name)

    def nbytes(self, name: str) -> int:
        return self.stored(name).num_bytes

    def stored(self, name: str) -> Stored:
        entry = self._where[name].header[name]
        begin, end = entry["data_offsets"]
        return Stored(name, tuple(entry["shape"]), entry["dtype"], end - begin)


def source_of_folder(folder: Path) -> SafetensorsSource:
    """The tensors of a model folder: those that the index lists, else of model.safetensors, else of the only file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        where = shards_of_index(index)
        source = SafetensorsSource(tuple(open_safetensors(path) for path in sorted(set(where.values()))))
        absent = [name for name in where if name not in source.names()]
        if absent:
            raise ValueError(f"{index} names tensors that its files do not hold: {', '.join(absent)}")
        return source
    if single.exists():
        return SafetensorsSource((open_safetensors(single),))
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise ValueError(f"{folder}: expected {index.name}, {single.name} or one .safetensors file, found {found}")
    return SafetensorsSource((open_safetensors(files[0]),))
