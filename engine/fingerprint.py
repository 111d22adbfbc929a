"""What a program is, as a hash: equal ones in two processes compute the same. Knows octavo's own code, as it is loaded.

Code is hashed and not files, so that what somebody has changed in this process is seen: a function put in another's
place, a constant. What comes from elsewhere (a user's layout, processor or model, or a function of a notebook's put in
one of octavo's place) has no hash: UnknownCode.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

ROOT = __name__.rsplit(".", 2)[0]
# whose version is part of the key elsewhere
LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "math", "operator", "functools", "typing")
# what programs are traced through: everything in these may be in a program
ROOMS = tuple(f"{ROOT}.{room}." for room in ("models", "kernels_pallas", "sharding"))
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))

# what the rooms import beside: none of a user's
OTHERS = frozenset(sys.stdlib_module_names) | {"einops", "flax", "torch"}

MOST_ONCE = 32
_ONCE: dict[int, tuple[Any, str]] = {}


class UnknownCode(Exception):
    """A value with code that is not octavo's."""


def fingerprint(x: Any) -> str:
    """The hash of a value: data, a function with what it holds on to, or an object of octavo's.

    Raises UnknownCode for what holds other code.
    """
    h = hashlib.sha256()
    for part in _parts(x, frozenset()):
        h.update(part)
        h.update(b"\0")
    return h.hexdigest()


def of_program(fn: Any, *about: Any) -> str:
    """The hash of a function with what partial() has given it, and of what it is made with.

    Models are large, and given to several: each is hashed once.
    """
    parts: list[Any] = [about]
    while isinstance(fn, functools.partial):
        parts.append(([_once(x) for x in fn.args], {name: _once(x) for name, x in sorted(fn.keywords.items())}))
        fn = fn.func
    return fingerprint((fn, parts))


def _once(x: Any) -> str:
    if id(x) not in _ONCE:
        if len(_ONCE) >= MOST_ONCE:
            _ONCE.clear()
        # held, so that nothing else gets its id
        _ONCE[id(x)] = x, fingerprint(x)
    return _ONCE[id(x)][1]


@dataclasses.dataclass
class _Seen:
    """What was in the rooms when they were hashed, held so that nothing else gets its id; and what came of it."""

    values: list[Any]
    digest: str | UnknownCode


_LAST = [_Seen([], "")]


def loaded_code() -> str:
    """The hash of all code that programs are traced through, as it is in this process now.

    Cheap where all is as it was: programs are made one by one, and each asks. Raises UnknownCode where somebody has put
    code in there that is not octavo's.
    """
    rooms, last = (vars(module) for _, module in _modules()), _LAST[0]
    now = [x for room in rooms for name, value in room.items() if name[:2] != "__" for x in _reached(value)]
    if len(now) != len(last.values) or not all(map(operator.is_, now, last.values)):
        last = _LAST[0] = _Seen(now, _hash_of_rooms())
    if isinstance(last.digest, UnknownCode):
        raise UnknownCode(*last.digest.args)
    return last.digest


def _hash_of_rooms() -> str | UnknownCode:
    h = hashlib.sha256()
    try:
        for name, module in _modules():
            for attribute, x in _own(module):
                h.update(f"{name}.{attribute}".encode())
                for part in _shallow(x):
                    h.update(part)
    except UnknownCode as code:
        return code
    return h.hexdigest()


def _reached(x: Any) -> Iterator[Any]:
    """A value, what its containers hold, and what a class of octavo's has."""
    yield x
    if isinstance(x, Mapping):
        inside: Iterable[Any] = (*x.keys(), *x.values())
    elif isinstance(x, list | tuple | set | frozenset):
        inside = tuple(x)
    elif isinstance(x, type) and x.__module__.startswith(f"{ROOT}."):
        yield from vars(x).values()
        return
    else:
        return
    for y in inside:
        yield from _reached(y)


def rooms() -> list[str]:
    """The loaded modules whose code may be in a program."""
    names = (name for name in sorted(sys.modules) if name.startswith(f"{ROOT}."))
    return [name for name in names if name.startswith(ROOMS) or (".engine." in name and name.endswith("_jax"))]


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name in rooms():
        yield name, sys.modules[name]


def _own(x: Any) -> list[tuple[str, Any]]:
    """What somebody wrote into a module or class, and not what Python keeps there."""
    found = [(name, y) for name, y in vars(x).items() if isinstance(y, FunctionType) or not name.startswith("__")]
    return sorted(found, key=lambda item: item[0])


def _shallow(x: Any) -> Iterator[bytes]:
    """What a module's attribute is: all of code and constants, of other objects their kind."""
    if isinstance(x, type):
        _check_no_users(f"{x.__module__}.{x.__qualname__}")
        yield f"type {x.__module__}.{x.__qualname__}".encode()
        if x.__module__.startswith(f"{ROOT}."):
            for name, value in _own(x):
                yield name.encode()
                yield from _shallow(getattr(value, "__func__", getattr(value, "fget", value)))
    elif isinstance(x, ModuleType):
        _check_no_users(x.__name__)
        yield x.__name__.encode()
    else:
        try:
            yield from _parts(x, frozenset())
        except UnknownCode as code:
            _check_no_users(str(code))
            yield f"{type(x).__module__}.{type(x).__qualname__}".encode()


def _check_no_users(name: str) -> None:
    """Raises UnknownCode for what may be a user's, who changes it from one start to the next."""
    root = name.split(".")[0]
    if root not in (ROOT, *LIBRARIES) and root not in OTHERS:
        raise UnknownCode(name)


def _parts(x: Any, above: frozenset[int]) -> Iterator[bytes]:
    """A value's parts, in an order that is the same in every process."""
    if isinstance(x, PLAIN):
        yield f"{type(x).__name__} {x!r}".encode()
        return
    if id(x) in above:
        yield b"again"
        return
    yield f"<{type(x).__module__}.{type(x).__qualname__}".encode()
    inner = above | {id(x)}
    if isinstance(x, CodeType):
        yield from _code(x, inner)
    elif isinstance(x, FunctionType):
        yield from _function(x, inner)
    elif isinstance(x, type | BuiltinFunctionType):
        _check_known(x)
        yield f"{x.__module__}.{x.__qualname__}".encode()
    elif isinstance(x, functools.partial):
        yield from _all((x.func, x.args, x.keywords), inner)
    elif isinstance(x, MethodType):
        yield from _all((x.__func__, x.__self__), inner)
    elif isinstance(x, list | tuple):
        yield from _all(x, inner)
    elif isinstance(x, set | frozenset):
        yield from sorted(fingerprint(y).encode() for y in x)
    elif isinstance(x, Mapping):
        yield from sorted(fingerprint(pair).encode() for pair in x.items())
    elif isinstance(x, np.ndarray):
        yield f"{x.shape} {x.dtype}".encode() + np.ascontiguousarray(x).tobytes()
    elif isinstance(x, np.dtype | np.generic | enum.Enum):
        yield repr(x).encode()
    elif isinstance(x, ModuleType):
        yield x.__name__.encode()
    elif hasattr(x, "__wrapped__"):
        yield from _parts(x.__wrapped__, inner)
    elif dataclasses.is_dataclass(x) or type(x).__module__.startswith(f"{ROOT}."):
        _check_known(type(x))
        yield from _parts(dict(getattr(x, "__dict__", {})) or {f.name: getattr(x, f.name) for f in _fields(x)}, inner)
    else:
        _check_known(x if hasattr(x, "__qualname__") else type(x))
        yield repr(x).encode() if not hasattr(x, "__qualname__") else f"{x.__module__}.{x.__qualname__}".encode()
    yield b">"


def _fields(x: Any) -> tuple[Any, ...]:
    return dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()


def _all(xs: Any, above: frozenset[int]) -> Iterator[bytes]:
    for x in xs:
        yield from _parts(x, above)


def _function(f: FunctionType, above: frozenset[int]) -> Iterator[bytes]:
    _check_known(f)
    yield f"{f.__module__}.{f.__qualname__}".encode()
    if not f.__module__.startswith(f"{ROOT}."):
        return
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            # not assigned yet
            cells.append(None)
    yield from _all((f.__code__, f.__defaults__, f.__kwdefaults__, cells), above)


def _code(code: CodeType, above: frozenset[int]) -> Iterator[bytes]:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    yield code.co_code
    yield repr((code.co_flags, code.co_argcount, code.co_kwonlyargcount, names)).encode()
    yield from _all(code.co_consts, above)


def _check_known(x: Any) -> None:
    module = str(getattr(x, "__module__", None) or type(x).__module__)
    root = module.split(".")[0]
    if not module.startswith(f"{ROOT}.") and root not in LIBRARIES:
        raise UnknownCode(f"{module}.{getattr(x, '__qualname__', x)}")
