"""Where octavo keeps the files that it fetched or made: the one place that reads OCTAVO_CACHE."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: $OCTAVO_CACHE, else octavo in the user's cache folder. It need not exist yet."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def is_offline() -> bool:
    """True if OCTAVO_OFFLINE=1: nothing may be fetched."""
    return os.environ.get("OCTAVO_OFFLINE", "0") not in ("", "0")
