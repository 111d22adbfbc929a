"""Compiled programs kept on disk as executables, so that the next start loads them and traces nothing.

XLA's own cache spares compiling, and wants a program lowered to look it up: for a whole warm-up tracing and lowering
are most of what is left. Here a program is found by what it is made of (`.key`): all code as it is loaded, the model,
shapes, versions, options, the machine. That names the executable (`.program`), which goes by its lowered text, so that
a change of code that comes to the same program compiles nothing (decision 030).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable

from .fingerprint import UnknownCode, loaded_code, of_program
from .loading.cache_dir import is_ours

log = logging.getLogger("octavo")

LOADED = "/octavo/saved/loaded"  # what JAX's listeners are told, and the seconds it took
MOST_BYTES = 8 << 30  # of all files together; what was not used for longest goes first
YOUNG = 60  # seconds for which a file stays, as somebody may be writing it
CANNOT_LOAD = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, KeyError, IndexError,
    jax.errors.JaxRuntimeError,
)  # fmt: skip
UNKNOWN: Mapping[int, Any] = {}
CANNOT_SAVE = ValueError, TypeError, NotImplementedError, pickle.PicklingError, jax.errors.JaxRuntimeError


class Lowers(Protocol):
    """A program that can be lowered, and run as compiled."""

    def lower(self, *args: Any) -> Any: ...

    def notes(self, *args: Any) -> Any:
        """What `bound` must know beside the executable that was lowered for these arguments; picklable."""
        ...

    def bound(self, compiled: Any, notes: Any) -> Callable[[tuple], Any]:
        """What runs that executable on arguments of its kind."""
        ...


class Jitted:
    """A jitted program without static arguments."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def lower(self, *args: Any) -> Any:
        return self.program.lower(*args)

    def notes(self, *args: Any) -> None:
        """Nothing."""

    def bound(self, compiled: Any, notes: Any) -> Callable[[tuple], Any]:
        return lambda args: compiled(*args)


class Held:
    """A program by kind of call, each compiled once.

    A kind is the structure, shapes and dtypes of the arguments but `steady`, which are always alike. The executables
    are held here: beside programs that were loaded, `jit` does not find again what it was asked to compile ahead
    (docs/LOG.md).
    """

    def __init__(self, program: Lowers, steady: tuple[int, ...]) -> None:
        self.program, self.steady = program, frozenset(steady)
        self.ready: dict[Any, Callable[[tuple], Any]] = {}  # by kind

    def __call__(self, *args: Any, kinds: Mapping[int, Any] = UNKNOWN) -> Any:
        """`kinds`: of arguments, by their places, where they are known."""
        kind = self._kind(args, kinds)
        run = self.ready.get(kind)
        if run is None:
            self.prepare(*args)()
            run = self.ready[kind]
        return run(args)

    def lower(self, *args: Any) -> Any:
        """As of the program."""
        return self.program.lower(*args)

    def prepare(self, *args: Any) -> Callable[[], None]:
        """Lowers the program for these arguments, if it must be. Returns the rest: it may run in a thread."""
        kind = self._kind(args)
        return self._begun(kind, args) if kind not in self.ready else lambda: None

    def _begun(self, kind: Any, args: tuple) -> Callable[[], None]:
        lowered, notes = self.program.lower(*args), self.program.notes(*args)

        def compile() -> None:
            self._keep(kind, lowered.compile(), notes)

        return compile

    def _keep(self, kind: Any, compiled: Any, notes: Any) -> None:
        self.ready[kind] = self.program.bound(compiled, notes)

    def _kind(self, args: tuple, kinds: Mapping[int, Any] = UNKNOWN) -> Any:
        varying = (i for i in range(len(args)) if i not in self.steady)
        return tuple(kinds[i] if i in kinds else kind_of(*jax.tree.flatten(args[i])) for i in varying)


class Saved(Held):
    """A program each kind of which comes from disk, or is compiled and put there.

    `what` is the hash of the program, `environment` what else of the process compilers look at.
    """

    def __init__(
        self, program: Lowers, what: str, steady: tuple[int, ...], folder: Path, environment: Any = None
    ) -> None:
        super().__init__(program, steady)
        self.what, self.folder, self.environment = what, folder, environment
        self.keys: dict[Any, str] = {}  # by kind: of what was looked for and is not made yet

    def missing(self, *args: Any) -> str | None:
        """The key of the program for these arguments, if it could be kept and is not there."""
        kind = self._kind(args)
        if kind in self.ready:
            return None
        try:
            self.keys[kind] = self._key(args)
        except UnknownCode:
            return None
        name = read(self.folder / f"{self.keys[kind]}.key")
        return None if name and self._file(name).exists() else self.keys[kind]

    def _begun(self, kind: Any, args: tuple) -> Callable[[], None]:
        try:
            key = self.folder / f"{self.keys.pop(kind, None) or self._key(args)}.key"
        except UnknownCode as code:
            log.info("code of %s is in octavo's place: what is traced through it is not kept", code)
            return super()._begun(kind, args)
        name = read(key)
        if name is None or not self._file(name).exists():
            return self._lowered(kind, key, args)

        def load() -> None:
            data = read(self._file(name))
            found = loaded(data) if data else None
            if found is None:
                self._lowered(kind, key, args)()
            else:
                self._keep(kind, *found)

        return load

    def _lowered(self, kind: Any, key: Path, args: tuple) -> Callable[[], None]:
        lowered = self.program.lower(*args)
        notes = self.program.notes(*args)
        trees = str(lowered.in_tree), str(lowered.out_tree)
        name = _hash(lowered.as_text(), trees, notes, self.environment, surroundings())

        def compile() -> None:
            data = read(self._file(name))
            found = loaded(data) if data else None
            if found is None:
                compiled, data = compiled_anew(lowered, notes)
                found = compiled, notes
                if data:
                    write(self._file(name), data)
            if data:
                write(key, name)
            self._keep(kind, *found)

        return compile

    def _file(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}.program"

    def _key(self, args: tuple) -> str:
        avals = [(str(jax.tree.structure(x)), [_aval(leaf) for leaf in jax.tree.leaves(x)]) for x in args]
        return _hash(self.what, self.environment, loaded_code(), surroundings(), avals).hex()


def saved(
    program: Lowers, fn: Any, about: Any, steady: tuple[int, ...], folder: Path | None, environment: Any
) -> Saved | None:
    """The program kept in that folder. None: without one, or where fn holds code of others, whose changes nobody sees.

    `about` is what makes the program beside fn.
    """
    if folder is None:
        return None
    try:
        return Saved(program, of_program(fn, about), steady, folder, environment)
    except UnknownCode as code:
        log.info("a program with code of %s is traced at every start", code)
        return None


class _Hits(threading.local):
    """How many programs this thread has had from XLA's cache."""

    num = 0


@functools.cache
def _hits() -> _Hits:
    found = _Hits()

    def count(event: str, **kwargs: Any) -> None:
        found.num += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(count)
    return found


def compiled_anew(lowered: Any, notes: Any) -> tuple[Any, bytes | None]:
    """The program compiled, and what is to be kept of it.

    None of one that came out of XLA's cache: on a CPU it has lost its code once it is serialised again (docs/LOG.md).
    """
    hits = _hits()
    before = hits.num
    compiled = lowered.compile()
    if hits.num != before:
        return compiled, None
    try:
        return compiled, pickle.dumps((*serialize_executable.serialize(compiled), notes))
    except CANNOT_SAVE as error:
        log.warning("a program cannot be kept for the next start: %s", error)
        return compiled, None


def loaded(data: bytes) -> tuple[Any, Any] | None:
    """A program and its notes; None, with a warning, if it cannot be loaded."""
    began = time.perf_counter()
    try:
        *program, notes = pickle.loads(data)
        here = jax.local_devices()[:1]
        compiled = serialize_executable.deserialize_and_load(*program, execution_devices=here)
        jax.monitoring.record_event_duration_secs(LOADED, time.perf_counter() - began)
        return compiled, notes
    except CANNOT_LOAD as error:
        log.warning("a program on disk cannot be loaded and is made anew: %s", error)
        return None


def surroundings() -> list[Any]:
    """What else decides how a program comes out: versions, devices, options."""
    devices = jax.local_devices()
    client = devices[0].client
    here = [(d.id, d.device_kind) for d in devices]
    config = [(name, repr(value)) for name, value in configuration().items()]
    versions = jax.__version__, jaxlib.version.__version__, platform.python_version(), np.__version__
    return [versions, client.platform, client.platform_version, here, config, _host()]


def configuration() -> dict[str, Any]:
    """JAX's, as it is now. Where programs are kept makes no other program."""
    return {name: getattr(jax.config, name, None) for name in sorted(jax.config.values) if "cache" not in name}


@functools.cache
def _host() -> tuple[Any, ...]:
    """The CPU: programs for it use what it has, as many threads too."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine(), platform.processor(), os.cpu_count()
    flags = {line for line in info.read_text().splitlines() if line.startswith(("flags", "model name", "Features"))}
    return platform.machine(), sorted(flags), os.cpu_count()


def _hash(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def kind_of(leaves: list, structure: Any) -> Any:
    """What a program is compiled for, of an argument."""
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _aval(x: Any) -> tuple[str, ...]:
    return str(x.shape), str(x.dtype), str(getattr(x, "weak_type", False))


def read(path: Path) -> bytes | None:
    """What was written; None if nothing was, it is broken, or not from us."""
    try:
        with path.open("rb") as file:
            if not is_ours(os.fstat(file.fileno())):
                log.warning("%s is another user's, or others may write it: it is made anew", path)
                return None
            data = file.read()
    except OSError:
        return None
    check, data = data[:32], data[32:]
    if hashlib.sha256(data).digest() != check:
        log.warning("%s is broken and made anew", path)
        return None
    # the system's, or gone since: it has been read
    with contextlib.suppress(OSError):
        os.utime(path)
    return data


def write(path: Path, data: bytes) -> None:
    """Keeps data, whole or not at all."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # only for this user
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(name, path)
    except OSError as error:
        log.warning("a program cannot be kept for the next start: %s", error)
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return
    _prune(path.parent)


@functools.cache
def _prune(folder: Path) -> None:
    """Once a process, as others may: removes what was not used for longest, if there is too much."""
    stats = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            stats[entry.path] = entry.stat()
    kept, now = 0, time.time()
    for path, stat in sorted(stats.items(), key=lambda item: item[1].st_mtime, reverse=True):
        kept += stat.st_size
        if kept > MOST_BYTES and now - stat.st_mtime > YOUNG:
            with contextlib.suppress(OSError):
                os.unlink(path)
