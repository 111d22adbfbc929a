"""Small inputs that stay on the device, at one address, until they change.

XLA records a step's kernels in a command buffer (a CUDA graph) and writes its hundreds of nodes anew whenever an
argument lies elsewhere than at the last call; that costs the host more than everything else it does in a step
(measured, docs/LOG.md). In a steady decode, rows and query starts do not change at all, and block tables now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .saved_jax import Held, kind_of

RENEWS: dict[str, Any] = {"donate_argnums": 0, "keep_unused": True}  # of jit
LARGEST = 1 << 22  # bytes of an array that is kept: block tables are, a prompt's embeddings are not


class Resident:
    """A program. numpy arrays in the arguments `at` are copied to the device, up to LARGEST only when they differ.

    Each kind of call (structure, shapes) keeps its own copies. The arrays given must not be changed afterwards.
    `renew` is `renewed` as a program. `device` is where they are kept; None: where JAX puts what nobody places.
    """

    def __init__(self, program: Held, at: tuple[int, ...], renew: Held, device: Any = None) -> None:
        self.program, self.at, self.renew = program, at, renew
        self.device = device and jax.sharding.SingleDeviceSharding(device)
        self.kept: dict[Any, list[tuple[np.ndarray, jax.Array] | None]] = {}
        # of arguments all of which is kept: as given last, on the device, its kind
        self.last: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, *args: Any) -> Any:
        given, kinds = list(args), {}
        for i in self.at:
            if i in self.last and self.last[i][0] is args[i]:
                _, given[i], kinds[i] = self.last[i]
            else:
                given[i], kinds[i] = self._settle(i, args[i])
        return self.program(*given, kinds=kinds)

    def lower(self, *args: Any) -> Any:
        """As the program's own."""
        return self.program.lower(*args)

    def prepare(self, *args: Any) -> Callable[[], None]:
        """As the program's own."""
        return self.program.prepare(*args)

    def renewals(self, known: set[Any], *args: Any) -> list[Callable[[], None]]:
        """As `prepare`, of what puts other numbers in the place of these, but for kinds that are `known`."""
        arrays = {(x.shape, x.dtype): x for i in self.at for x in jax.tree.leaves(args[i]) if _is_kept(x)}
        new = [x for kind, x in arrays.items() if kind not in known]
        known.update(arrays)
        return [self.renew.prepare(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.device), x) for x in new]

    def _settle(self, i: int, tree: Any) -> tuple[Any, Any]:
        """The argument with its arrays on the device, and its kind."""
        leaves, structure = jax.tree.flatten(tree)
        kind = kind_of(leaves, structure)
        kept = self.kept.setdefault((i, kind), [None] * len(leaves))
        settled = structure.unflatten([self._settled(kept, j, x) for j, x in enumerate(leaves)])
        self.last.pop(i, None)
        if all(map(_is_kept, leaves)):
            self.last[i] = tree, settled, kind
        return settled, kind

    def _settled(self, kept: list, j: int, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if not _is_kept(x):
            return jax.device_put(x, self.device)
        if kept[j] is None:
            # by way of the program that renews it: its first run is then over as well
            kept[j] = x, self.renew(jax.device_put(x, self.device), x)
        elif kept[j][0] is not x and not (kept[j][0] == x).all():
            kept[j] = x, self.renew(kept[j][1], x)
        return kept[j][1]


def _is_kept(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.nbytes <= LARGEST


def renewed(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` at the address of `old`, compiled with RENEWS."""
    # the sum is what XLA makes a copy of: an output that is an input would be handed through, at its own address
    return new | False if new.dtype == bool else new + np.zeros((), new.dtype)
