"""What stands around the products of a decode step: norms of heads, rope, writes, attention; before and after.

    python benchmarks/decode_layer.py

Graphs of as many layers as the shapes have, each with keys and values of its own, on this GPU, in bfloat16;
microseconds a layer. "old": norms of q and k and the sum of the splits are launches of their own. "norms": the first is
within rope_write. "least N": the second is within decode too, and a split has at least N keys. Every way of a step is
held against float64. Then rope_write alone over many tokens, by tokens and warps of a program. Below 40 s of the GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.kernels_triton import fused, triton_attention
from octavo.kernels_triton.ahead import rehearsal
from octavo.kernels_triton.arrivals import counters
from octavo.models.interface import AttentionSpec, Rope, Step

DEVICE, HALF, DIM, BLOCK = torch.device("cuda", 0), torch.bfloat16, 128, 16
# name: layers, kv heads, queries a head, whether heads are normed
SHAPES = {"0.6b": (28, 8, 2, True), "8b": (32, 8, 4, False), "30b-a3b": (48, 4, 8, True)}
ROWS, CONTEXTS, MOST = (1, 8, 64, 256), (200, 640, 4096), 4352
LEASTS = (64, 128, 256, 512, 1024)
TOKENS, TILES = (64, 256, 1024, 8192), ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))


class Way(NamedTuple):
    """How a layer is computed: norms of heads apart, splits put together within decode, keys of a split at least."""

    apart: bool = False
    within: bool = True
    least: int = 128
    at_once: int = 8192


def ways_of(rows: int, heads: int) -> dict[str, Way]:
    plain = {"old": Way(apart=True, within=False), "norms": Way(within=False)}
    if triton_attention.num_splits(rows * heads, MOST, DEVICE) == 1:
        return {"old": Way(apart=True, within=False), "new": Way()}
    return plain | {f"least {n}": Way(least=n) for n in LEASTS} | {"128, 2048 at once": Way(at_once=2048)}


class Bench:
    """One shape, with pools for the most rows and the longest context."""

    def __init__(self, name: str, num_blocks: int):
        self.name = name
        self.layers, self.heads, self.group, self.normed = SHAPES[name]
        self.spec = AttentionSpec(self.heads, self.group, DIM, DIM, DIM**-0.5)
        pool = (num_blocks, BLOCK, self.heads, DIM)
        self.k, self.v = (torch.randn(pool, device=DEVICE, dtype=HALF) for _ in range(2))
        self.blocks = torch.randperm(num_blocks - 1, device=DEVICE, dtype=torch.int32) + 1
        self.scales = tuple(torch.rand(DIM, device=DEVICE).to(HALF) + 0.5 for _ in range(2))

    def qkv(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn((num_tokens, self.heads, self.group + 2, DIM), device=DEVICE, dtype=HALF)
        return x[:, :, :-2], x[:, :, -2], x[:, :, -1]

    def step(self, rows: int, context: int, layer: int) -> Step:
        """Of so many sequences of one length, whose blocks are this layer's own as far as there are enough."""
        need = -(-context // BLOCK)
        at = (layer * rows * need + torch.arange(rows * need, device=DEVICE)) % len(self.blocks)
        tables = torch.zeros((rows, MOST // BLOCK), dtype=torch.int32, device=DEVICE)
        tables[:, :need] = self.blocks[at].view(rows, need)
        place = torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        none, offsets = place[:0], place % BLOCK
        return Step(none, place, none, none, tables[:, need - 1].contiguous(), offsets, place + 1, starts, tables,
                    True, {}, {})  # fmt: skip

    def layer(self, way: Way, qkv: tuple[torch.Tensor, ...], rope: Rope, step: Step) -> tuple[torch.Tensor, ...]:
        """Queries as attention gets them, and its result."""
        q, k, v = qkv
        norm = (*self.scales, 1e-6) if self.normed else None
        if way.apart and norm is not None:
            (q, k), norm = fused.qk_norm(q, k, *norm), None
        q = fused.rope_write(q, k, v, rope, self.k, self.v, "n p k d", step, norm)
        plan = triton_attention.plan(step, self.spec, BLOCK)
        return q, triton_attention.attend(q, self.k, self.v, "n p k d", step, self.spec, None, plan)

    def error(self, way: Way, calls: list[Callable[[], Any]], step: Step, context: int) -> float:
        """Of the first sequence of a layer, beside the largest number of float64's."""
        q, out = calls[0]()
        table = step.block_tables_SB[0].long()
        k, v = (x[table].flatten(0, 1)[:context].double() for x in (self.k, self.v))
        weights = torch.einsum("kgd,mkd->kgm", q[0].double() * self.spec.scale, k).softmax(-1)
        want = torch.einsum("kgm,mkd->kgd", weights, v)
        return float((out[0].double() - want).abs().max() / want.abs().max())


def rope_of(num_tokens: int) -> Rope:
    angle = torch.rand((num_tokens, DIM // 2), device=DEVICE) * 6
    return Rope(angle, angle.cos(), angle.sin())


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds a call, from replays of a graph of all."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times, many = [], 1
    for turn in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(many):
            graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / many)
        if turn == 1:
            many = max(1, min(20, int(10_000 / times[1])))
    return statistics.median(times[2:]) / len(calls)


def use(way: Way) -> None:
    triton_attention.WITHIN, triton_attention.LEAST_KEYS = way.within, way.least
    triton_attention.AT_ONCE = way.at_once


def decode(name: str, num_blocks: int, measured: bool) -> Iterator[tuple[str, dict[str, float], float]]:
    """For each number of rows and context: microseconds a layer of every way, and the worst error."""
    bench = Bench(name, num_blocks)
    for rows in ROWS:
        qkv, rope = bench.qkv(rows), rope_of(rows)
        for context in CONTEXTS if measured else CONTEXTS[:1]:
            steps = [bench.step(rows, context, n) for n in range(bench.layers if measured else 1)]
            found, worst = {}, 0.0
            for label, way in ways_of(rows, bench.heads).items():
                use(way)
                calls = [partial(bench.layer, way, qkv, rope, step) for step in steps]
                if measured:
                    worst = max(worst, bench.error(way, calls, steps[0], context))
                    found[label] = graph_us(calls)
                else:
                    calls[0]()
            yield f"{name} {rows} x {context}", found, worst
    use(Way())


def rope_write(name: str, num_blocks: int, measured: bool) -> Iterator[tuple[str, dict[str, float], float]]:
    """For each number of tokens: microseconds of every tile, and of norms and rope_write apart as they were."""
    bench, few, many = Bench(name, num_blocks), fused.FEW, fused.MANY
    norm = (*bench.scales, 1e-6) if bench.normed else None
    for num_tokens in TOKENS:
        (q, k, v), rope = bench.qkv(num_tokens), rope_of(num_tokens)
        slot = torch.randperm((num_blocks - 1) * BLOCK, device=DEVICE, dtype=torch.int32)[:num_tokens] + BLOCK
        none = slot[:0]
        step = Step(none, none, none, none, slot // BLOCK, slot % BLOCK, none, none, none, False, {}, {})

        def old(q: Any = q, k: Any = k, v: Any = v, rope: Any = rope, step: Any = step) -> Any:
            q, k = fused.qk_norm(q, k, *norm) if norm else (q, k)
            return fused.rope_write(q, k, v, rope, bench.k, bench.v, "n p k d", step)

        own = partial(fused.rope_write, q, k, v, rope, bench.k, bench.v, "n p k d", step, norm)
        found = {}
        for label, tile, call in (("old", (1, 1), old), *((f"{t} tokens, {w} warps", (t, w), own) for t, w in TILES)):
            fused.FEW = fused.MANY = tile
            if measured:
                found[label] = graph_us([call] * 28)
            else:
                call()
        yield f"{name} rope_write x {num_tokens}", found, 0.0
    fused.FEW, fused.MANY = few, many


def main() -> None:
    started, found = time.time(), {}
    counters(DEVICE)
    with rehearsal(DEVICE):
        for name in SHAPES:
            list(decode(name, 1 + MOST // BLOCK * ROWS[-1] // 8, False))
            list(rope_write(name, 1 + TOKENS[-1] // BLOCK, False))
    print("compiled after", round(time.time() - started), "s", flush=True)
    lines = []
    for name in SHAPES:
        for part, num_blocks in ((decode, 1 + ROWS[-1] * CONTEXTS[-1] // BLOCK), (rope_write, 1 << 14)):
            for label, us, worst in part(name, num_blocks, True):
                found[label] = {"us": us, "error": worst}
                of_old = (f"{way} {x:.2f}" for way, x in us.items())
                lines.append(f"{label}: {'; '.join(of_old)}" + (f"; error {worst:.1e}" if worst else ""))
            torch.cuda.empty_cache()
    assert not counters(DEVICE).any(), "a launch left its counters"
    out = Path(os.environ.get("OUT", Path(__file__).parent)) / "decode_layer.json"
    out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "found": found}, indent=0))
    print("\n".join(lines))
    print("in all", round(time.time() - started), "s")


if __name__ == "__main__":
    main()
