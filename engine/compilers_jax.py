"""Processes that make a start's programs beside each other, and keep them on disk, where this process finds them.

Tracing and lowering hold the GIL and are most of a cold start (decision 030). A process makes the same Runner, with
shapes for arrays, and compiles its share of the programs. Whatever goes wrong there, the programs are made here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import jax
import jax.numpy as jnp

from ..models.interface import ArraySpec, map_tree
from .child import GONE, Caught, Child, pickled
from .collector import Paused
from .fingerprint import rooms
from .precompile_jax import Call, prepared
from .recipe import Recipe
from .resident_jax import Resident
from .saved_jax import Saved, configuration

log = logging.getLogger("octavo")

MOST = 8  # processes
EACH = 3 << 29  # bytes of the GPU that must be free for one: it takes a third of them
LEAST = 16  # programs: fewer are made before processes are up
THREADS = 2  # of each process, that compile
NICE = 5  # this process's own work goes first
PATIENCE = 120  # seconds without news, after which what is missing is made here


@dataclass(frozen=True)
class Job:
    """What a process is to make."""

    recipe: Recipe
    options: dict[str, Any]  # of its backend
    keys: dict[int, str]  # of the programs, by their places among the calls
    modules: tuple[str, ...]  # loaded where it was written: their code is in the keys
    configuration: dict[str, Any]  # of JAX


def missing(calls: Sequence[Call]) -> dict[int, str]:
    """The keys of programs that could be kept on disk and are not there, by their places."""
    found = {}
    for place, (program, args) in enumerate(calls):
        held = program.program if isinstance(program, Resident) else program
        if isinstance(held, Saved) and (key := held.missing(*args)):
            found[place] = key
    return found


class Compilers:
    """The processes, at work."""

    def __init__(self, recipe: Recipe, options: dict[str, Any], keys: dict[int, str], num: int) -> None:
        self.places, self.children, places = set(keys), [], list(keys)
        # what is no plain value is a default, or leads to other keys
        config = {name: x for name, x in configuration().items() if isinstance(x, str | int | float | None)}
        for n in range(num):
            share = {place: keys[place] for place in places[n::num]}
            job = pickled(Job(recipe, options, share, tuple(rooms()), config), "a process that compiles")
            child = Child(__name__, "serve")
            self.children.append(child)
            child.commands.send_bytes(job)

    def made(self) -> Iterator[int]:
        """The places of programs that are on disk, as they come. Ends the processes."""
        try:
            working: list[Any] = [child.results for child in self.children]
            while working:
                ready = wait(working, PATIENCE)
                if not ready:
                    log.warning("processes that compile have said nothing for %d s: this one goes on alone", PATIENCE)
                    return
                for results in ready:
                    yield from self._news(results, working)
        finally:
            for child in self.children:
                child.close()

    def _news(self, results: Any, working: list[Any]) -> Iterator[int]:
        """What one of them has to say. One that has ended works no more."""
        try:
            news = results.recv()
        except GONE:
            working.remove(results)
            return
        if isinstance(news, str):
            log.warning("a process that compiles has ended, and this one does its work: %s", news)
        else:
            yield news


def serve(commands: Connection, results: Connection) -> None:
    """The process: takes a Job, tells the places of programs as they are kept, and what went wrong."""
    job = pickle.loads(commands.recv_bytes())
    os.nice(NICE)
    # whoever asked may be gone
    with contextlib.suppress(*GONE):
        with Caught() as caught:
            for place in made(job):
                results.send(place)
        if caught.error:
            results.send(f"{type(caught.error).__name__}: {caught.error}")


def made(job: Job) -> Iterator[int]:
    """Makes the programs of a job; the place of each as it is on disk."""
    own = configuration()
    for name, value in job.configuration.items():
        if own.get(name) != value:
            jax.config.update(name, value)
    for name in job.modules:
        importlib.import_module(name)
    from .runner import Runner

    backend = shapes_backend(job.options)
    weights = map_tree(backend.zeros, job.recipe.model.weights)
    runner = Runner(backend, job.recipe.model, job.recipe.layout, weights, **job.recipe.arguments)
    calls = list(runner.every_call())
    found = missing(calls)
    if others := [place for place, key in job.keys.items() if found.get(place, key) != key]:
        raise RuntimeError(f"{len(others)} of {len(job.keys)} programs are others here: the surroundings differ")
    with Paused(), ThreadPoolExecutor(THREADS) as pool:
        jobs = {pool.submit(prepared(*calls[place])): place for place in job.keys}
        for done in as_completed(jobs):
            done.result()
            yield jobs[done]


def shapes_backend(options: dict[str, Any]) -> Any:
    """A backend that makes shapes where arrays are asked for."""
    from .backend_jax import JaxBackend

    class ShapesBackend(JaxBackend):
        def zeros(self, spec: ArraySpec) -> Any:
            dtype = jnp.dtype(spec.dtype or self.dtype)
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=self.sharding(spec))

    return ShapesBackend(**options)
