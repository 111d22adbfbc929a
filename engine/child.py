"""A Python process of our own, reached through two pipes.

Not `multiprocessing.Process`: that runs the user's script again in the child, which goes wrong in a script without
`if __name__ == "__main__"` (decision 014). Only the pipes are from there.
"""

from __future__ import annotations

import importlib
import io
import pickle
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from .errors import OctavoError

CODE = (
    "import sys; sys.path[:] = sys.argv[5:]; from importlib import import_module; "
    "import_module(sys.argv[1]).run(*sys.argv[2:5])"
)
# a connection whose other end is gone says so in one of these ways
GONE = (EOFError, OSError)


class Caught:
    """A context that keeps an error instead of passing it on: for work done for somebody else, who is to be told.

    The only place that does, and it does not for the ends of a process.
    """

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return error is not None and not isinstance(error, SystemExit | GeneratorExit)


class Child:
    """A process that runs `module.function(commands, results)`, and this end of its pipes.

    It has a session of its own, so Ctrl-C at the terminal is this process's affair. It should leave when its `commands`
    end, which they do when this process does, however that ends.
    """

    def __init__(self, module: str, function: str):
        theirs_in, self.commands = Pipe(duplex=False)
        self.results, theirs_out = Pipe(duplex=False)
        fds = (theirs_in.fileno(), theirs_out.fileno())
        arguments = [__name__, module, function, f"{fds[0]},{fds[1]}", *sys.path]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # stdout may be a file of results
                stdout=2,
                start_new_session=True,
            )
        finally:
            theirs_in.close()
            theirs_out.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> int:
        """Ends it if it has not ended, and waits for that. Returns its exit status, negative for a signal."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def wait(self, seconds: float) -> int:
        """Gives it time to end by itself, then ends it. Returns its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def close(self) -> None:
        """Ends it, and closes this end of the pipes."""
        self.kill()
        self.commands.close()
        self.results.close()


def run(module: str, function: str, fds: str) -> None:
    """The child's main function."""
    reads, writes = map(int, fds.split(","))
    commands, results = Connection(reads, writable=False), Connection(writes, readable=False)
    getattr(importlib.import_module(module), function)(commands, results)


def pickled(message: Any, where: str) -> bytes:
    """What is to be sent to `where`, another process. Raises ValueError for what cannot be sent."""
    try:
        return pickle.dumps(message, protocol=5)
    except (pickle.PickleError, TypeError, AttributeError) as error:
        raise ValueError(f"this cannot be sent to {where}: {error}") from error


def unpickled(data: bytes, where: str) -> Any:
    """What another process sent to `where`, this one. Raises ValueError for what cannot be read here."""
    with Caught() as caught:
        return pickle.loads(data)
    raise ValueError(
        f"this cannot be read in {where}: {caught.error}. Classes and functions of the script itself belong in a module"
    )


class Elsewhere(pickle.Unpickler):
    """Reads as a process does whose __main__ is another."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "__main__":
            raise AttributeError(f"{global_name} is of the script itself, which is not run there")
        return super().find_class(module_name, global_name)


def check_elsewhere(data: bytes, where: str) -> None:
    """Raises ValueError for what a process of our own cannot read."""
    try:
        Elsewhere(io.BytesIO(data)).load()
    except AttributeError as error:
        raise ValueError(f"this cannot be read in {where}: {error}; it belongs in a module") from error


def portable(error: BaseException) -> BaseException:
    """The error as it can be sent to another process, with its traceback as a note if it is none of a user's.

    One that does not survive pickling becomes a RuntimeError of the same words.
    """
    if not isinstance(error, ValueError | NotImplementedError | OctavoError):
        error.add_note("in another process:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PickleError, TypeError, AttributeError, ImportError, ValueError, KeyError, IndexError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
