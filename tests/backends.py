"""Which backends the tests run on: those installed here. `pytest --backends` says which ones have to be."""

from __future__ import annotations

from octavo.engine.backend import installed_backends

BACKENDS = installed_backends()

# arguments of an engine where one backend is enough: torch's threads spin, to the harm of whatever else runs
QUIET = {"backend": "torch", "threads": 1} if "torch" in BACKENDS else {}
