"""Tools of the laboratory: they look at what an engine did, and do it again."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .certifying import certify as certify
    from .comparing import compare as compare
    from .crosschecking import crosscheck as crosscheck
    from .explaining import explain as explain
    from .layouts import measure_layouts as measure_layouts
    from .replaying import replay as replay

HOME = {
    "certify": "certifying",
    "compare": "comparing",
    "crosscheck": "crosschecking",
    "explain": "explaining",
    "measure_layouts": "layouts",
    "replay": "replaying",
}


def __getattr__(name: str) -> Any:
    """A tool, imported when it is first asked for: the command line would wait for all of them."""
    if name not in HOME:
        raise AttributeError(f"octavo.engine.lab has no {name!r}: its tools are {', '.join(HOME)}")
    return getattr(import_module(f".{HOME[name]}", __name__), name)
