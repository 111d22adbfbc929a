"""Compiles programs before they are called. Tracing and lowering hold the GIL: one thread does them, others compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from .collector import Paused
from .resident_jax import Resident
from .saved_jax import Held

Call = tuple[Any, tuple]  # a program, and its arguments


class Elsewhere(Protocol):
    """Others that make programs and keep them on disk."""

    places: set[int]  # of the programs among the calls

    def made(self) -> Iterator[int]:
        """The places of those that are there, as they come; perhaps not all."""
        ...


def precompile(calls: Sequence[Call], is_tuned: Callable[[tuple], bool], elsewhere: Elsewhere | None = None) -> None:
    """Compiles or loads each program for its arguments, without running it.

    What is tuned comes first and is compiled one by one: it is measured, and nothing else is compiled here meanwhile.
    But the others are lowered meanwhile, which takes one core. What others make `elsewhere` is loaded as it comes.
    """
    left, known = set(elsewhere.places) if elsewhere else set(), set()
    # an eighth of tracing was the collector's, who finds nothing
    with Paused(), ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(os.cpu_count()) as pool:
        tuned = [alone.submit(prepared(*call)) for call in calls if is_tuned(call[1])]
        waiting: list[Future] = []

        def start(*jobs: Callable[[], Any]) -> None:
            waiting.extend(pool.submit(_behind, tuned, job) for job in jobs)

        for place, (program, args) in enumerate(calls):
            start(*renewals(program, args, known))
            if not is_tuned(args) and place not in left:
                start(prepared(program, args))
        for place in elsewhere.made() if elsewhere else ():
            left.discard(place)
            start(prepared(*calls[place]))
        for place in sorted(left):
            start(prepared(*calls[place]))
        for one in (*tuned, *waiting):
            one.result()


def prepared(program: Any, args: tuple) -> Callable[[], Any]:
    """Lowers a program for these arguments, if it is not on disk; what compiles or loads it."""
    inner = program.program if isinstance(program, Resident) else program
    return program.prepare(*args) if isinstance(inner, Held) else program.lower(*args).compile


def renewals(program: Any, args: tuple, known: set[Any]) -> list[Callable[[], Any]]:
    """The same of what a later call with other numbers will run beside this program, of kinds not yet known."""
    return program.renewals(known, *args) if isinstance(program, Resident) else []


def _behind(first: Sequence[Future], job: Callable[[], Any]) -> None:
    wait(first)
    job()
