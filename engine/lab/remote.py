"""An object in a process of its own: two array libraries in one would fight over the memory of a GPU."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..child import GONE, Caught, Child, portable


class Remote:
    """What module.function(*arguments) returns, made in a process of its own. `call` asks it, one call at a time.

    What goes over the pipes is pickled. The process starts to make it at once; the first call waits for that.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        self.child = Child(__name__, "serve")
        weakref.finalize(self, Child.close, self.child)
        self.child.commands.send((make.__module__, make.__name__, arguments))
        self.made = False

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result, or the attribute of that name. Raises what is raised there."""
        self.wait()
        # of one that is gone, the answer says so
        with contextlib.suppress(*GONE):
            self.child.commands.send((method, arguments))
        return self._answer()

    def wait(self) -> None:
        """Returns once it is made. Raises what making it raises."""
        if not self.made:
            self._answer()
            self.made = True

    def close(self) -> None:
        self.child.close()

    def _answer(self) -> Any:
        try:
            value, error = self.child.results.recv()
        except GONE:
            raise RuntimeError(f"the process has ended with exit status {self.child.kill()}") from None
        if error is not None:
            raise error
        return value


def serve(commands: Connection, results: Connection) -> None:
    """The life of the process: makes one object, then answers calls until its commands end."""
    held: Any = None
    try:
        while True:
            message, value = commands.recv(), None
            with Caught() as caught:
                if held is None:
                    module, function, arguments = message
                    held = getattr(importlib.import_module(module), function)(*arguments)
                else:
                    name, arguments = message
                    found = getattr(held, name)
                    value = found(*arguments) if callable(found) else found
            results.send((value, None if caught.error is None else portable(caught.error)))
    except GONE:
        return
