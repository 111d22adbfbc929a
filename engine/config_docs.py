"""Writes docs/engine_arguments.md: python -m octavo.engine.config_docs > docs/engine_arguments.md"""

from __future__ import annotations

from typing import Any

from .arguments import ALIASES, LATER, WORKING

HEAD = """# Engine arguments

Made by `python -m octavo.engine.config_docs`; do not edit. `LLM(model, **arguments)` and the command line take
these. None means the default. An unknown name is an error.

| Argument | Type | Default | Meaning |
|---|---|---|---|"""

ALIAS_HEAD = """
## Other names

| Name | Means |
|---|---|"""

LATER_HEAD = """
## Known, and not supported yet

These values are accepted, since they ask for nothing; any other raises NotImplementedError.

| Argument | Accepted | Belongs to |
|---|---|---|"""


def markdown() -> str:
    """docs/engine_arguments.md."""
    working = [f"| `{a.name}` | {a.kind} | {_shown(a.default)} | {a.doc} |" for a in WORKING]
    aliases = [f"| `{old}` | `{name}` |" for old, name in ALIASES.items()]
    later = [f"| `{a.name}` | {', '.join(map(_shown, (a.default, *a.harmless)))} | {a.feature} |" for a in LATER]
    return "\n".join([HEAD, *working, ALIAS_HEAD, *aliases, LATER_HEAD, *later, ""])


def _shown(value: Any) -> str:
    return f"`{value!r}`"


if __name__ == "__main__":
    print(markdown(), end="")
