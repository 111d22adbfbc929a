"""Triton's hash of itself, asked for once, by whoever needs it first. Imports no torch."""

from __future__ import annotations

import threading

from triton.runtime.cache import triton_key

ASKING = threading.Lock()


def hash_triton() -> None:
    """Has Triton read its 400 MB. It remembers, but does not lock: threads that ask at once would each read them."""
    with ASKING:
        triton_key()
