"""Programs through which only what changes goes: the rest of what they consume is only read, and is no result.

An array that goes in and comes out costs the host four times what one costs that is only read, and a step has dozens
that it does not change, or that its kernels change in place (decision 022).

And a result at another address than the last time costs more than all of them: XLA then looks through its whole CUDA
graph for what to write anew, and the GPU is sent that graph again. So a large program leaves its results where the last
ones were, and what is returned are copies, made by a program of their own (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .direct_jax import direct, lister

Same = tuple[bool, ...]  # of the leaves of what is consumed: whether they come back as they went in
Kept = tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes of results that always lie at the same place


class Narrow:
    """fn(*args) -> outs as jitted programs that take args[at] for good and return it as outs[back] (None: alone).

    What changes is seen by tracing, and may be more for another structure of the arguments `kinds`. `options(args)` are
    XLA's. With `copy` (x -> x elsewhere) the other results stay at their place, and what is returned is copied from it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        at: int,
        back: int | None,
        kinds: tuple[int, ...],
        options: Callable[[tuple], dict[str, Any]],
        copy: Callable[[jax.Array], jax.Array] | None = None,
    ) -> None:
        self.fn, self.at, self.back, self.kinds, self.options, self.copy = fn, at, back, kinds, options, copy
        self.kept: dict[Any, Kept] = {}
        self.same: dict[Any, Same] = {}
        self.tree: Any = None
        self.programs: dict[Any, Any] = {}

    def _whole(self, out: tuple, same: Same, staying: list, tree: Any) -> Any:
        """A program's results, with all that was consumed in its place."""
        consumed = tree.unflatten(merged(same, out[self.back or 0], staying))
        return consumed if self.back is None else (*out[: self.back], consumed, *out[self.back + 1 :])

    def lower(self, *args: Any) -> Any:
        """As of the jitted program."""
        leaves, self.tree = jax.tree.flatten(args[self.at])
        kind, kept = self._kind(args), ()
        if self.copy or not self.same:
            out = jax.eval_shape(lambda *xs: self._look(kind, xs), *args)
            if self.copy:
                found = jax.tree.leaves(self._others(out))
                kept = self.kept[kind, _shapes(args, self.kinds)] = tuple((x.shape, x.dtype.name) for x in found)
        same, options = self._same_of(kind), self.options(args)
        key = tuple(options.items())
        if key not in self.programs:
            jitted = jax.jit(self._run, static_argnums=0, donate_argnums=(1, 2), compiler_options=options or None)
            self.programs[key] = jitted
        changing, others = self._split(same, leaves, args)
        places = [jax.ShapeDtypeStruct(*each, sharding=changing[0].sharding) for each in kept]
        try:
            return self.programs[key].lower(same, changing, places, *others)
        except MoreChanges as found:
            self.same[kind] = found.same
            return self.lower(*args)

    def notes(self, *args: Any) -> tuple[Same, Kept]:
        """What a program lowered for these arguments does not change, and leaves in place: `bound` must know."""
        kind = self._kind(args)
        return self._same_of(kind), self.kept.get((kind, _shapes(args, self.kinds)), ())

    def bound(self, compiled: Any, notes: tuple[Same, Kept]) -> Callable[[tuple], Any]:
        """What calling this returns, by a program that was compiled from what `lower` gave."""
        (same, kept), run, at, flatten = notes, direct(compiled), self.at, jax.tree.flatten
        changes, places, copy = [not stays for stays in same], [], self.copy
        before: Callable[[tuple], Any] | None = None  # lists the arguments before what is consumed: the weights

        def call(args: tuple) -> Any:
            nonlocal before
            before = before or lister(args[:at])
            leaves, tree = flatten(args[at])
            staying, changing = list(compress(leaves, same)), list(compress(leaves, changes))
            others = [*before(args[:at]), *staying, *flatten(args[at + 1 :])[0]]
            if copy and (not places or places[0].is_deleted()):
                # the first call, or one behind a call that failed
                places[:] = [jax.device_put(np.zeros(*each), changing[0].sharding) for each in kept]
            out = run([*changing, *places, *others])
            if copy:
                places[:], results = flatten(self._others(out))
                out = self._with_others(out, results.unflatten(map(copy, places)))
            return self._whole(out, same, staying, tree)

        return call

    def _others(self, out: tuple) -> list:
        """Results but what was consumed."""
        return [] if self.back is None else [*out[: self.back], *out[self.back + 1 :]]

    def _with_others(self, out: tuple, others: list) -> tuple:
        return (*others[: self.back], out[self.back or 0], *others[self.back :])

    def _kind(self, args: tuple) -> Any:
        return tuple(jax.tree.structure(args[i]) for i in self.kinds)

    def _same_of(self, kind: Any) -> Same:
        # another kind changes the same, as far as one knows
        return self.same.get(kind) or next(iter(self.same.values()))

    def _split(self, same: Same, leaves: list, args: tuple) -> tuple[list, list]:
        """What changes, and all arguments with only what stays."""
        others = list(args)
        others[self.at] = [x for x, stays in zip(leaves, same, strict=True) if stays]
        return [x for x, stays in zip(leaves, same, strict=True) if not stays], others

    def _look(self, kind: Any, args: tuple) -> Any:
        out = self.fn(*args)
        self.same[kind] = stays_of(args[self.at], out if self.back is None else out[self.back])
        return out

    def _run(self, same: Same, changing: list, places: list, *others: Any) -> tuple:
        """fn, with what stays left out of the results, and the others put at their places."""
        args = list(others)
        args[self.at] = self.tree.unflatten(merged(same, changing, others[self.at]))
        out = self.fn(*args)
        after = out if self.back is None else out[self.back]
        found = stays_of(args[self.at], after)
        if any(stays and not really for stays, really in zip(same, found, strict=True)):
            raise MoreChanges(found)
        changed = [x for x, stays in zip(jax.tree.leaves(after), same, strict=True) if not stays]
        if places:
            leaves, tree = jax.tree.flatten(self._others(out))
            # XLA drops the choice, and keeps that a result is to lie where an argument was
            leaves = [jnp.where(False, place, x) for place, x in zip(places, leaves, strict=True)]
            out = self._with_others(out, tree.unflatten(leaves))
        return (changed,) if self.back is None else (*out[: self.back], changed, *out[self.back + 1 :])


class MoreChanges(Exception):
    """A program changes more than was thought: what really stays."""

    def __init__(self, same: Same) -> None:
        self.same = same


def stays_of(before: Any, after: Any) -> Same:
    """Which leaves are the very same."""
    return tuple(x is y for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def merged(same: Same, changing: list, staying: list) -> list:
    """All leaves in their order."""
    sources = iter(changing), iter(staying)
    return [next(sources[stays]) for stays in same]


def copied(x: jax.Array) -> jax.Array:
    """x at another address, if compiled."""
    # as in `renewed`
    return x | False if x.dtype == bool else x + np.zeros((), x.dtype)


def _shapes(args: tuple, places: tuple[int, ...]) -> Any:
    return tuple((x.shape, x.dtype) for i in places for x in jax.tree.leaves(args[i]))
