"""The embedded model for tests. Nothing here fetches it: a test that needs it fails where it is not in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.loading.aliases import ALIASES, cached_path, is_verified


def embedded_model() -> Path:
    """The verified GGUF file of SmolLM2-135M-Instruct."""
    path = cached_path("smollm2")
    if not is_verified(path, ALIASES["smollm2"].sha256):
        pytest.fail(f"{path} is not there: run `python -m octavo.engine.loading.fetch smollm2` once")
    return path
