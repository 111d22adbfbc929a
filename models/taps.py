"""Taps: what ops return inside the compiled step, kept by name for whoever compares. Nothing is kept unasked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .interface import Array
from .layers import HIDDEN, WHOLE

NORMS = ("rms_norm", "add_rms_norm")  # of hidden rows, unless they have more than two axes
TAPPED = ("rms_norm", "add_rms_norm", "qk_norm", "rope", "attention", "gated_mlp_act", "show", "route")


class Taps:
    """The arrays that the patterns ask for ("layer.7.*", "*.attention"), in the order in which they were made."""

    def __init__(self, patterns: Sequence[str]):
        self.patterns = tuple(patterns)
        self.found: dict[str, Array] = {}

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def keep(self, name: str, value: Array) -> None:
        """Keeps a wanted array. A second one of the same name is "name.1", and so on."""
        if self.wants(name):
            count = sum(known == name or known.startswith(f"{name}.#") for known in self.found)
            self.found[f"{name}.#{count}" if count else name] = value

    def keep_hidden(self, name: str, rows: Array, ops: Any) -> None:
        """Keeps wanted hidden rows, of all tokens."""
        if self.wants(name):
            self.keep(name, ops.constrain(rows, HIDDEN, WHOLE))


class TappedOps:
    """ops that show Taps what they return, as "prefix.name".

    An op on a weight has the weight's name ("layer.7.qkv"), another its own ("layer.7.attention"); what comes twice is
    "layer.7.rope" and then "layer.7.rope.#1". The sum that add_rms_norm makes is "residual"; of rope_write there are
    "rope" (the queries) and, as they are found in the cache, "rope.k" and "rope.v"; of route "experts" (ids) and
    "experts.weights".
    """

    def __init__(self, ops: Any, taps: Taps, prefix: str, weights: Mapping[str, Any]):
        self.ops, self.taps, self.prefix = ops, taps, prefix
        self.names = {id(w): name for name, w in weights.items()}

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name not in TAPPED:
            return op

        def tapped(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            for part, value in self._parts(name, args, out):
                self._keep(part, value, HIDDEN if name in NORMS and value.ndim == 2 else WHOLE)
            return out

        return tapped

    def einsum(
        self, spec: str, x: Array, w: Array, *, norm: Any = None, gate: bool = False, add: Any = None, **axes: Any
    ) -> Array:
        """The ops that a product may have within it, one by one, so that each of them shows.

        The first sum of a layer is "residual"; its last is what the layer returns, and shows as that.
        """
        x = self.constrain(self.rms_norm(x, *norm), HIDDEN, WHOLE) if norm else x
        y = self.ops.einsum(spec, x, w, **axes)
        self._keep(self.names.get(id(w), "einsum"), y, axes["out"])
        y = self.gated_mlp_act(y) if gate else y
        if add is None:
            return y
        total = add + y
        if f"{self.prefix}.residual" not in self.taps.found:
            self._keep("residual", total, axes["out"])
        return total

    def router(self, fn: Callable, *args: Any) -> tuple[Array, Array, Array]:
        """The ops that may be one, one by one, so that each of them shows."""
        return fn(*args, self)

    def attend_new(self, fn: Callable, *args: Any) -> tuple[Array, Any]:
        """The ops that may be one, one by one, so that each of them shows."""
        return fn(*args, self)

    def moe(self, *args: Array, add: Array) -> Array:
        """What the experts make of the rows, and the sum with what it is added to."""
        y = self.ops.moe(*args, add=None)
        self._keep("moe", y, HIDDEN)
        return add + y

    def rope_write(
        self, q: Array, new: dict[str, Array], rope: Any, pools: Any, order: str, step: Any, norm: Any = None
    ) -> tuple[Array, Any]:
        """Norms first, so that they show; then the queries, and keys and values as they are found in the cache."""
        if norm is not None:
            q, k = self.qk_norm(q, new["k"], *norm)
            new = new | {"k": k}
        q, pools = self.ops.rope_write(q, new, rope, pools, order, step)
        at = tuple({"n": step.blocks_T, "p": step.offsets_T}.get(a, slice(None)) for a in order.split()[:-1])
        for part, x in {"rope": q, **{f"rope.{name}": pool[at] for name, pool in pools.items()}}.items():
            self._keep(part, x, WHOLE)
        return q, pools

    def _keep(self, part: str, value: Array, axes: tuple[str | None, ...]) -> None:
        """Keeps a wanted array; of hidden rows, those of all tokens."""
        if axes[:1] == HIDDEN[:1]:
            self.taps.keep_hidden(f"{self.prefix}.{part}", value, self.ops)
        else:
            self.taps.keep(f"{self.prefix}.{part}", value)

    def _parts(self, name: str, args: tuple, out: Any) -> list[tuple[str, Array]]:
        """What there is to keep of an op's result."""
        whose = [self.names[id(x)] for x in args if id(x) in self.names] or [name]
        if name == "show":
            return [(args[0], out)]
        if name == "add_rms_norm":
            return [("residual", out[0]), (whose[0], out[1])]
        if name == "qk_norm":
            return list(zip(whose, out, strict=True))
        if name == "route":
            return [("experts", out[1]), ("experts.weights", out[0])]
        return [(whose[0], out)]
