"""Programs through which only what changes goes: the rest of what they consume is only read, and is no result.

An array that goes in and comes out costs the host four times what one costs that is only read, and a step has dozens
that it does not change, or that its kernels change in place (decision 022).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import jax

from .direct_jax import direct

Same = tuple[bool, ...]  # of the leaves of what is consumed: whether they come back as they went in


class Narrow:
    """fn(*args) -> outs as jitted programs that take args[at] for good and return it as outs[back] (None: alone).

    What changes is seen by tracing, and may be more for another structure of the arguments `kinds`. `options(args)` are
    XLA's.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        at: int,
        back: int | None,
        kinds: tuple[int, ...],
        options: Callable[[tuple], dict[str, Any]],
    ) -> None:
        self.fn, self.at, self.back, self.kinds, self.options = fn, at, back, kinds, options
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
        kind = self._kind(args)
        if not self.same:
            jax.eval_shape(lambda *xs: self._look(kind, xs), *args)
        same, options = self._same_of(kind), self.options(args)
        key = tuple(options.items())
        if key not in self.programs:
            jitted = jax.jit(self._run, static_argnums=0, donate_argnums=1, compiler_options=options or None)
            self.programs[key] = jitted
        changing, others = self._split(same, leaves, args)
        try:
            return self.programs[key].lower(same, changing, *others)
        except MoreChanges as found:
            self.same[kind] = found.same
            return self.lower(*args)

    def notes(self, *args: Any) -> Same:
        """What a program lowered for these arguments does not change: `bound` must know."""
        return self._same_of(self._kind(args))

    def bound(self, compiled: Any, notes: Same) -> Callable[[tuple], Any]:
        """What calling this returns, by a program that was compiled from what `lower` gave."""
        run, at, flatten = direct(compiled), self.at, jax.tree.flatten
        changes = [not stays for stays in notes]

        def call(args: tuple) -> Any:
            leaves, tree = flatten(args[at])
            staying = list(compress(leaves, notes))
            others = [*flatten(args[:at])[0], *staying, *flatten(args[at + 1 :])[0]]
            return self._whole(run([*compress(leaves, changes), *others]), notes, staying, tree)

        return call

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

    def _run(self, same: Same, changing: list, *others: Any) -> tuple:
        """fn, with what stays left out of the results."""
        args = list(others)
        args[self.at] = self.tree.unflatten(merged(same, changing, others[self.at]))
        out = self.fn(*args)
        after = out if self.back is None else out[self.back]
        found = stays_of(args[self.at], after)
        if any(stays and not really for stays, really in zip(same, found, strict=True)):
            raise MoreChanges(found)
        changed = [x for x, stays in zip(jax.tree.leaves(after), same, strict=True) if not stays]
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
