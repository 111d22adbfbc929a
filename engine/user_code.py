"""A user's own classes, from a file: my_policy.py:MyPolicy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def named_in_file(where: str) -> Any:
    """What FILE.py:NAME names, as it is. Raises ValueError if there is no such thing."""
    file, _, name = where.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{where!r} is not FILE.py:NAME")
    if not Path(file).exists():
        raise ValueError(f"{where!r}: there is no file {file}")
    # a name that no installed module has
    spec = importlib.util.spec_from_file_location(f"octavo_user_code.{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look up annotations that are strings
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{where!r}: {file} has no {name}")
    return getattr(module, name)


def function_in_file(where: str) -> Any:
    """The same, of a function. Raises ValueError for what cannot be called."""
    found = named_in_file(where)
    if not callable(found):
        raise ValueError(f"{where!r} is {found!r}: a function is right")
    return found


def load_object(where: str) -> Any:
    """What FILE.py:NAME names; a class is called without arguments. Raises ValueError if there is no such thing."""
    found = named_in_file(where)
    return found() if isinstance(found, type) else found
