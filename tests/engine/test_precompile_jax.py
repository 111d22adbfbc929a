"""What is compiled before it is called: in which order, and in which threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.engine.precompile_jax import precompile


class Program:
    """A jitted program that notes what is done with it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []

    def lower(self, n: int) -> Any:
        self._note("lower", n)
        return self.Lowered(lambda: self._note("compile", n))

    def _note(self, what: str, n: int) -> None:
        if what == "compile" and n < 0:
            time.sleep(0.05)
        self.done.append((what, n, threading.get_ident()))

    class Lowered:
        def __init__(self, compile: Callable[[], None]) -> None:
            self.compile = compile


def test_what_is_tuned_is_compiled_alone_while_the_others_are_lowered() -> None:
    program, here = Program(), threading.get_ident()
    precompile([(program, (n,)) for n in (1, -1, 2, -2, 3)], lambda args: args[0] < 0)
    lowered = [(n, thread) for what, n, thread in program.done if what == "lower"]
    assert lowered == [(n, here) for n in (-1, -2, 1, 2, 3)]
    compiled = [n for what, n, _ in program.done if what == "compile"]
    assert compiled[:2] == [-1, -2] and sorted(compiled[2:]) == [1, 2, 3]
    # lowering did not wait for what is slow
    assert program.done.index(("lower", 3, here)) < min(
        i for i, (what, n, _) in enumerate(program.done) if (what, n) == ("compile", -2)
    )
    assert here not in {thread for what, _, thread in program.done if what == "compile"}


def test_what_others_do_not_make_is_lowered_here() -> None:
    class Others:
        def __init__(self) -> None:
            self.places = {0, 2, 3}

        def made(self) -> Iterator[int]:
            # all that is nobody else's has been lowered by now
            assert [n for what, n, _ in program.done if what == "lower"] == [11]
            yield 2

    program = Program()
    precompile([(program, (n,)) for n in (10, 11, 12, 13)], lambda args: False, Others())
    assert [n for what, n, _ in program.done if what == "lower"] == [11, 12, 10, 13]
    assert sorted(n for what, n, _ in program.done if what == "compile") == [10, 11, 12, 13]


def test_what_fails_to_compile_says_so() -> None:
    class Failing(Program):
        def _note(self, what: str, n: int) -> None:
            if what == "compile":
                raise MemoryError("no room")

    for n in (1, -1):
        with pytest.raises(MemoryError, match="no room"):
            precompile([(Failing(), (n,))], lambda args: args[0] < 0)
