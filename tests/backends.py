"""Which backends the tests run on: those installed here. `pytest --backends` says which ones have to be."""

from __future__ import annotations

from octavo.engine.backend import installed_backends

BACKENDS = installed_backends()
