"""Compiled programs called as XLA's runtime takes them: flat lists of arrays in, arrays out.

The call of a compiled program looks at type, shape and sharding of every argument, to find at each step what is in hand
already: with the three hundred arrays of a step that is half of what a call costs the host (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import itemgetter
from typing import Any

import jax


def direct(compiled: Any) -> Callable[[list[Any]], Any]:
    """What runs a program on the leaves of its arguments, all arrays on its one device, and returns what it returns.

    Nobody checks them: they must be as those that it was compiled for. No result is of a weak type.
    """
    inner = compiled._executable
    call, consts = inner.unsafe_call, compiled._params.const_args
    execute, unflatten = compiled.runtime_executable().execute_sharded, compiled.out_tree.unflatten
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        # a user's layout or processor prints: JAX has to do its part
        return lambda leaves: compiled(*compiled.in_tree.unflatten(leaves)[0])
    num = len(consts) + compiled.in_tree.num_leaves
    # what a program does not read is no parameter of it
    reads = [i in inner._kept_var_idx for i in range(num)]
    takes_all = all(reads)

    def run(leaves: list[Any]) -> Any:
        given = [*consts, *leaves] if consts else leaves
        found = execute(given if takes_all else list(compress(given, reads)))
        return unflatten([x for (x,) in found.disassemble_into_single_device_arrays()])

    return run


def lister(tree: Any) -> Callable[[Any], Any]:
    """What lists the leaves of trees with the structure of this one, in jax.tree's order.

    jax.tree sorts the names of every dict anew, which is most of what flattening a model's weights takes.
    """
    if type(tree) is dict and len(tree) > 1 and jax.tree_util.all_leaves(tree.values()):
        return itemgetter(*sorted(tree))
    if type(tree) is dict:
        return _of_parts([(name, lister(tree[name])) for name in sorted(tree)])
    if type(tree) in (list, tuple):
        return _of_parts([(i, lister(x)) for i, x in enumerate(tree)])
    return jax.tree.leaves


def _of_parts(parts: list[tuple[Any, Callable[[Any], Any]]]) -> Callable[[Any], list]:
    def leaves(found: Any) -> list:
        out: list[Any] = []
        for place, part in parts:
            out += part(found[place])
        return out

    return leaves
