"""What stands around the products of a decode step: norms of heads, rope, writes, attention.

    python benchmarks/decode_layer.py

Graphs of as many layers as the shapes have, each with keys and values of its own, on this GPU, in bfloat16;
microseconds a layer. "apart": splits are put together by a launch of its own. "within": by decode. "within 128": by
decode, and a split has at least 128 keys. Every way is held against float64. Below 20 s of the GPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda_graph import graph_us

from octavo.kernels_triton import fused, triton_attention
from octavo.kernels_triton.ahead import rehearsal
from octavo.kernels_triton.arrivals import counters
from octavo.models.interface import AttentionSpec, Rope, Step

DEVICE, HALF, DIM, BLOCK = torch.device("cuda", 0), torch.bfloat16, 128, 16
# name: layers, kv heads, queries a head, whether heads are normed
SHAPES = {"0.6b": (28, 8, 2, True), "8b": (32, 8, 4, False), "30b-a3b": (48, 4, 8, True)}
POOL = 1 + 256 * 4096 // BLOCK  # blocks: as much as the largest steps need, and more than a cache holds
# rows, context, width of the tables in tokens
CASES = tuple((rows, context, 4352) for rows in (1, 8, 64) for context in (200, 640, 4096)) + ((256, 1000, 4352),)
LONG = ((1, 32768, 32768), (8, 8192, 8192))  # of 8b alone


class Way(NamedTuple):
    """Whether splits are put together within decode, and their keys at least where the device is not busy."""

    within: bool = True
    least: int = triton_attention.LEAST_KEYS


WAYS = {"apart": Way(within=False), "within": Way(), "within 128": Way(least=128)}


class Bench:
    """One shape, with pools for the most rows and the longest context."""

    def __init__(self, name: str, num_blocks: int):
        self.name = name
        self.layers, self.heads, self.group, self.normed = SHAPES[name]
        self.spec = AttentionSpec(self.heads, self.group, DIM, DIM, DIM**-0.5)
        pool = (num_blocks, BLOCK, self.heads, DIM)
        self.k, self.v = (torch.randn(pool, device=DEVICE, dtype=HALF) for _ in range(2))
        self.blocks = torch.randperm(num_blocks - 1, device=DEVICE, dtype=torch.int32) + 1
        self.q_scale, self.k_scale = (torch.rand(DIM, device=DEVICE).to(HALF) + 0.5 for _ in range(2))

    def qkv(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn((num_tokens, self.heads, self.group + 2, DIM), device=DEVICE, dtype=HALF)
        return x[:, :, :-2], x[:, :, -2], x[:, :, -1]

    def step(self, rows: int, context: int, width: int, layer: int) -> Step:
        """Of so many sequences of one length, whose blocks are this layer's own as far as there are enough."""
        need = -(-context // BLOCK)
        at = (layer * rows * need + torch.arange(rows * need, device=DEVICE)) % len(self.blocks)
        tables = torch.zeros((rows, width // BLOCK), dtype=torch.int32, device=DEVICE)
        tables[:, :need] = self.blocks[at].view(rows, need)
        place = torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        none, offsets = place[:0], place % BLOCK
        return Step(none, place, none, none, tables[:, need - 1].contiguous(), offsets, place + 1, starts, tables,
                    True, {}, {})  # fmt: skip

    def layer(self, qkv: tuple[torch.Tensor, ...], rope: Rope, step: Step) -> tuple[torch.Tensor, ...]:
        """Queries as attention gets them, and its result."""
        q, k, v = qkv
        norm = (self.q_scale, self.k_scale, 1e-6) if self.normed else None
        q = fused.rope_write(q, k, v, rope, self.k, self.v, "n p k d", step, norm)
        plan = triton_attention.plan(step, self.spec, BLOCK)
        return q, triton_attention.attend(q, self.k, self.v, "n p k d", step, self.spec, None, plan)

    def error(self, calls: list[Callable[[], Any]], step: Step, context: int) -> float:
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


def use(way: Way) -> None:
    triton_attention.sums_within, triton_attention.LEAST_KEYS = lambda programs, device: way.within, way.least


def cases(name: str, num_blocks: int, measured: bool) -> Iterator[tuple[str, dict[str, float], float]]:
    """For each step: microseconds a layer of every way, and the worst error."""
    bench = Bench(name, num_blocks)
    for rows, context, width in CASES + (LONG if name == "8b" else ()):
        if not measured:
            # which kernels there are is a matter of rows and width
            context = min(context, 200)
        qkv, rope = bench.qkv(rows), rope_of(rows)
        steps = [bench.step(rows, context, width, n) for n in range(bench.layers if measured else 1)]
        found, worst = {}, 0.0
        for label, way in WAYS.items():
            use(way)
            calls = [partial(bench.layer, qkv, rope, step) for step in steps]
            if measured:
                (_, one), (_, other) = calls[0](), calls[0]()
                assert torch.equal(one, other), f"{name}, {label}, {rows} x {context}: two runs differ"
                worst = max(worst, bench.error(calls, steps[0], context))
                found[label] = graph_us(calls)
            else:
                calls[0]()
        yield f"{name} {rows} x {context}", found, worst
    use(Way())


def main() -> None:
    started, found = time.time(), {}
    counters(DEVICE)
    with rehearsal(DEVICE):
        for name in SHAPES:
            list(cases(name, 1 + 64 * 200, False))
    print("compiled after", round(time.time() - started), "s", flush=True)
    lines = []
    for name in SHAPES:
        for label, us, worst in cases(name, POOL, True):
            found[label] = {"us": us, "error": worst}
            of_ways = (f"{way} {x:.2f}" for way, x in us.items())
            lines.append(f"{label}: {'; '.join(of_ways)}; error {worst:.1e}")
        torch.cuda.empty_cache()
    assert not counters(DEVICE).any(), "a launch left its counters"
    out = Path(os.environ.get("OUT", Path(__file__).parent)) / "decode_layer.json"
    out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "found": found}, indent=0))
    print("\n".join(lines))
    print("in all", round(time.time() - started), "s")


if __name__ == "__main__":
    main()
