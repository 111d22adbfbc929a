"""From what a user calls a model to its config, tokenizer and tensors."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..json_file import read_json
from ..tokenizer import Tokenizer, load_tokenizer
from . import safetensors
from .aliases import ALIASES, fetch
from .gguf import read_gguf
from .gguf_config import config_from_gguf
from .gguf_names import gguf_source
from .source import TensorSource

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


@dataclass(frozen=True)
class Checkpoint:
    """A model as found. Its tensors are not read yet."""

    path: Path  # a folder or a .gguf file
    load_format: str  # as resolved: never "auto"
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_source: Path | Mapping[str, Any]  # a folder, or the metadata of a GGUF file
    source: TensorSource | None  # None for load_format "dummy"

    @property
    def tensors(self) -> TensorSource:
        if self.source is None:
            raise ValueError(f"{self.path} was opened with load_format 'dummy': it has no tensors")
        return self.source

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_source)


def open_model(
    model: str | Path,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    download_dir: str | Path | None = None,
) -> Checkpoint:
    """Finds a model: an alias ("smollm2"), a folder, a .gguf file or a hub id, tried in this order.

    `tokenizer` names another folder, .gguf file or hub id to take the tokenizer from. `hf_overrides` replaces entries
    of the config. Files are fetched to `download_dir`, by default to octavo's cache folder or the hub's. "auto" takes
    safetensors if there are any, else .bin files. Raises ValueError saying what was looked for and where.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    path = find_model(model, load_format, revision, download_dir)
    if path.is_dir():
        checkpoint = _open_folder(path, load_format)
    else:
        checkpoint = _open_gguf(path, load_format, ALIASES[str(model)].sha256 if str(model) in ALIASES else None)
    checkpoint = replace(checkpoint, hf_config=checkpoint.hf_config | dict(hf_overrides or {}))
    if tokenizer is None:
        return checkpoint
    source = find_model(tokenizer, "dummy", None, download_dir)
    return replace(checkpoint, tokenizer_source=source if source.is_dir() else read_gguf(source).metadata)


def find_model(model: str | Path, load_format: str, revision: str | None, download_dir: str | Path | None) -> Path:
    """The folder or .gguf file of a model, fetched if need be."""
    name, path = str(model), Path(model).expanduser()
    local = name in ALIASES or path.exists()
    if local and revision is not None:
        kind = "an alias" if name in ALIASES else "a path"
        raise ValueError(f"revision {revision!r} is for hub ids; {name!r} is {kind}")
    if name in ALIASES:
        return fetch(name, Path(download_dir) if download_dir else None)
    if path.is_dir() or (path.exists() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ValueError(f"model {name!r} is a file, but not a .gguf file; pass the folder that holds config.json")
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"model {name!r}: there is no such file or folder (looked at {path.absolute()})")
    # its library takes a tenth of a start, and files of one's own do not need it
    from .hub import hub_folder

    return hub_folder(name, load_format, revision, download_dir)


def _open_folder(folder: Path, load_format: str) -> Checkpoint:
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format == "gguf" or (load_format == "auto" and ggufs and not (folder / "config.json").exists()):
        if len(ggufs) != 1:
            raise ValueError(f"{folder}: expected one .gguf file, found {', '.join(f.name for f in ggufs) or 'none'}")
        return _open_gguf(ggufs[0], "gguf", None)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected config.json, found {', '.join(sorted(p.name for p in folder.iterdir()))}")
    if load_format == "auto":
        load_format = "safetensors" if any(folder.glob("*.safetensors")) else "pt"
    generation = folder / "generation_config.json"
    return Checkpoint(
        path=folder,
        load_format=load_format,
        hf_config=read_json(folder / "config.json"),
        generation_config=read_json(generation) if generation.exists() else {},
        tokenizer_source=folder,
        source=_source_of_folder(folder, load_format),
    )


def _source_of_folder(folder: Path, load_format: str) -> TensorSource | None:
    if load_format == "dummy":
        return None
    if load_format == "safetensors":
        return safetensors.source_of_folder(folder)
    if not any(folder.glob("*.bin")):
        raise ValueError(f"{folder}: expected .safetensors or .bin files (load_format {load_format!r}), found none")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"{folder}: .bin files need torch, which is not installed: install it, or use safetensors")
    from .pt_torch import source_of_folder

    return source_of_folder(folder)


def _open_gguf(path: Path, load_format: str, sha256: str | None) -> Checkpoint:
    if load_format not in ("auto", "gguf", "dummy"):
        raise ValueError(f"load_format {load_format!r} does not fit {path}: 'gguf', 'auto' and 'dummy' do")
    file = read_gguf(path)
    config = config_from_gguf(file)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: config[key] for key in ids if config[key] is not None}
    return Checkpoint(
        path=path,
        load_format="dummy" if load_format == "dummy" else "gguf",
        hf_config=config,
        generation_config=generation,
        tokenizer_source=file.metadata,
        source=None if load_format == "dummy" else gguf_source(file, gguf_identity(path, sha256)),
    )


def gguf_identity(path: Path, sha256: str | None) -> str:
    """A name for the content of a file, for the cache of converted weights.

    Of a user's file, which may be large, path, size and time stand for the content.
    """
    if sha256 is None:
        stat = path.stat()
        sha256 = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    return f"{path.stem}-{sha256[:12]}"
