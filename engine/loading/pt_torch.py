"""Tensors of pytorch_model*.bin files. Only torch can read them; it unpickles tensors and nothing else."""

from __future__ import annotations

import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from .source import Stored, shards_of_index


@dataclass(frozen=True)
class PtSource:
    """The tensors of one or several mapped files."""

    tensors: dict[str, torch.Tensor]
    identity: None = None

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> np.ndarray:
        x = self.tensors[name].detach()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def nbytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def stored(self, name: str) -> Stored:
        x = self.tensors[name]
        return Stored(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), x.nbytes)


def source_of_folder(folder: Path) -> PtSource:
    """The tensors of a model folder: of all files that the index lists, else of pytorch_model.bin."""
    index, single = folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin"
    if index.exists():
        files = sorted(set(shards_of_index(index).values()))
    elif single.exists():
        files = [single]
    else:
        raise ValueError(f"{folder}: expected {index.name} or {single.name}, found neither")
    return PtSource({name: x for file in files for name, x in _open(file).items()})


def _open(path: Path) -> dict[str, torch.Tensor]:
    # files from before torch 1.6 are no zip archives, and cannot be mapped
    mapped = zipfile.is_zipfile(path)
    try:
        tensors = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError, struct.error) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is truncated, corrupt or no torch file: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise ValueError(f"{path}: expected a dict of tensors by name, found {type(tensors).__name__}")
    return tensors
