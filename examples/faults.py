"""Faults of the kinds that are hard to find, each planted into an engine that is otherwise right.

    octavo crosscheck smollm2 --against oracle,torch:cpu,examples/faults.py:wrong_rope

A function for --against gets `make`, which makes what a name stands for ("torch:cpu", "jax:reference"), with engine
arguments of yours if you like, and returns it, changed: docs/find_a_numerical_fault.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.engine.lab.plant import change_layer, change_plans
from octavo.engine.plan import Plan, Transfer
from octavo.models.interface import Rope
from octavo.models.layouts import Int8


def wrong_rope(make: Callable[..., Any], name: str = "torch:cpu") -> Any:
    """Layer 7 turns its queries and keys by angles that are 2 % too small."""

    def change(layer: Callable) -> Callable:
        def wrong(w: Any, cache: Any, x_TE: Any, step: Any, spec: Any, ops: Any, layout: Any) -> Any:
            freqs = {name: rope.inv_freq_D * 0.98 for name, rope in step.ropes.items()}
            ropes = {name: Rope(f, *ops.rope_table(step.positions_T, f)) for name, f in freqs.items()}
            return layer(w, cache, x_TE, replace(step, ropes=ropes), spec, ops, layout)

        return wrong

    engine = make(name)
    change_layer(engine, 7, change)
    return engine


def wrong_rope_jax(make: Callable[..., Any]) -> Any:
    """The same on JAX."""
    return wrong_rope(make, "jax:cpu")


def wrong_epsilon(make: Callable[..., Any]) -> Any:
    """The norms of layer 12 add 1e-4 to the mean square, and not what the config says."""

    def change(layer: Callable) -> Callable:
        return lambda *args: layer(*args, eps=1e-4)

    engine = make("torch:cpu")
    change_layer(engine, 12, change)
    return engine


def wrong_block(make: Callable[..., Any]) -> Any:
    """The third entry of the first request's block table names the block of the second."""

    def change(plan: Plan) -> Plan:
        def wrong(blocks: tuple[int, ...]) -> tuple[int, ...]:
            return (*blocks[:2], blocks[1], *blocks[3:])

        first = {c.row for c in plan.chunks if c.request_id == "0"}
        writes = [
            replace(w, blocks=wrong(w.blocks)) if w.row in first and w.index == 0 and len(w.blocks) > 2 else w
            for w in plan.table_writes
        ]
        return replace(plan, table_writes=tuple(writes))

    engine = make("torch:cpu")
    change_plans(engine, change)
    return engine


def stale_block(make: Callable[..., Any]) -> Any:
    """Whoever hits cached blocks finds in the last of them what another block holds."""
    engine = make("torch:cpu")
    block_size = engine.runner.block_size

    def change(plan: Plan) -> Plan:
        stale = []
        for a in plan.admitted:
            hits = a.num_computed // block_size
            if hits > 1:
                table = next(w.blocks for w in plan.table_writes if (w.group, w.row, w.index) == (0, a.row, 0))
                stale.append(Transfer(0, table[0], table[hits - 1]))
        return replace(plan, transfers=(*plan.transfers, *stale))

    change_plans(engine, change)
    return engine


def wrong_scale(make: Callable[..., Any]) -> Any:
    """The int8 layout of layer 5 keeps scales of its second kv head's keys that are 2 % too large."""

    class Wrong(Int8):
        def attention(self, ops: Any, cache: Any, parts: Any, step: Any, spec: Any) -> Any:
            return super().attention(WrongOps(ops), cache, parts, step, spec)

    class WrongOps:
        def __init__(self, ops: Any):
            self.ops = ops

        def __getattr__(self, name: str) -> Any:
            return getattr(self.ops, name)

        def rope_write(self, q: Any, new: Any, *rest: Any) -> Any:
            scale_TK, xp = new["k_scale"], self.ops.xp
            head_K = self.ops.arange(scale_TK.shape[1], like=rest[-1].blocks_T)
            return self.ops.rope_write(q, new | {"k_scale": xp.where(head_K == 1, scale_TK * 1.02, scale_TK)}, *rest)

    engine = make("torch:reference", layout="int8")
    wrong = Wrong(engine.runner.block_size)
    change_layer(engine, 5, lambda layer: lambda *args: layer(*args[:-1], wrong))
    return engine
