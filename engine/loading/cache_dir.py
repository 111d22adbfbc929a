"""Where octavo keeps the files that it fetched or made, and which of them it takes for its own: the one place that
reads OCTAVO_CACHE."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: $OCTAVO_CACHE, else octavo in the user's cache folder. It need not exist yet."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def is_ours(stat: os.stat_result) -> bool:
    """Whether what a file holds can only be from this user or the system: a program that is loaded can do anything."""
    return os.name != "posix" or (stat.st_uid in (0, os.geteuid()) and not stat.st_mode & 0o022)


def is_offline() -> bool:
    """True if OCTAVO_OFFLINE=1: nothing may be fetched."""
    return os.environ.get("OCTAVO_OFFLINE", "0") not in ("", "0")
