"""What a layer of a decode step of one sequence takes on this GPU: its kernels in their order, all layers in one graph.

    python benchmarks/one_row.py [--model 8b] [--rows 1] [--context 200 4096] [--cut down False 32 512 2 16]

In bfloat16, each layer with weights, keys and values of its own, so that waiting and early launches count, which a
product alone does not show. Prints microseconds a layer: as other rows go ("old"), with the products of columns.py
and with lone_token.py too ("now"), then with each given Cut in the place of the table's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cuda_graph import graph_us
from decode_layer import Bench, rope_of

from octavo.kernels_triton import columns, lone_token
from octavo.kernels_triton.ahead import rehearsal
from octavo.kernels_triton.arrivals import counters
from octavo.kernels_triton.columns import Cut
from octavo.kernels_triton.ops import TorchOps
from octavo.kernels_triton.products import Twofold

DEVICE, DIM, WIDTH, BLOCKS = torch.device("cuda", 0), 128, 4352, 1 + 64 * 200
SIZES = {"0.6b": (1024, 3072), "8b": (4096, 14336)}  # hidden, mlp
NAMES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class Way:
    """How each product is cut (None: as other rows are), and whether attention is one launch."""

    cuts: dict[str, Cut | None]
    lone: bool


class Layers:
    """All layers of a shape, and a step of some rows."""

    def __init__(self, model: str, rows: int, context: int):
        self.bench, self.rows, (hidden, mlp) = Bench(model, BLOCKS), rows, SIZES[model]
        heads, group = self.bench.heads, self.bench.group
        self.shapes = {
            "qkv": ("te,ekxd->tkxd", (hidden, heads, group + 2, DIM)),
            "out": ("tkgd,kgde->te", (heads, group, DIM, hidden)),
            "gate_up": ("te,exf->txf", (hidden, 2, mlp)),
            "down": ("tf,fe->te", (mlp, hidden)),
        }
        self.depths = {"qkv": hidden, "out": heads * group * DIM, "gate_up": hidden, "down": mlp}
        self.weights = [{name: self.weight(name) for name in NAMES} for _ in range(self.bench.layers)]
        self.norm = (torch.rand(hidden, device=DEVICE).bfloat16() + 0.5, 1e-5)
        self.x, self.rope = torch.randn(rows, hidden, device=DEVICE).bfloat16(), rope_of(rows)
        self.steps = [self.bench.step(rows, context, WIDTH, n) for n in range(self.bench.layers)]
        self.ops, heads_normed = TorchOps(), (self.bench.q_scale, self.bench.k_scale, 1e-6)
        self.heads_norm = heads_normed if self.bench.normed else None

    def weight(self, name: str) -> Twofold:
        depth, shape = self.depths[name], self.shapes[name][1]
        return Twofold.of(torch.randn(shape, device=DEVICE).mul_(depth**-0.5 / 4).bfloat16(), depth)

    def table(self) -> dict[str, Cut | None]:
        """How this device cuts the products."""

        def cut(name: str) -> Cut | None:
            width = self.weights[0][name].numel() // self.depths[name]
            return columns.cut_of(self.rows, self.depths[name], width, name == "gate_up", DEVICE)

        return {name: cut(name) for name in NAMES}

    def product(self, name: str, n: int, x: torch.Tensor, way: Way, add: torch.Tensor | None) -> torch.Tensor:
        (spec, shape), w, cut = self.shapes[name], self.weights[n][name], way.cuts[name]
        norm, gate, x = None if add is not None else self.norm, name == "gate_up", x.reshape(self.rows, -1)
        if cut is None:
            # a plain weight is not for columns.py
            x = x.view(self.rows, *shape[: len(spec.split(",")[0]) - 1])
            return self.ops.einsum(spec, x, w.view(shape), (None,), norm=norm, gate=gate, add=add)
        plain = w.view(self.depths[name], -1)
        return columns.product(x, w.turned if cut.turned else plain, cut, norm, gate, add)

    def layer(self, x: torch.Tensor, n: int, way: Way) -> torch.Tensor:
        shape = (self.rows, self.bench.heads, self.bench.group + 2, DIM)
        qkv = self.product("qkv", n, x, way, None).view(shape)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if way.lone:
            pools = {"k": self.bench.k, "v": self.bench.v}
            a = lone_token.attend(
                q, {"k": k, "v": v}, self.rope, pools, "n p k d", self.steps[n], self.bench.spec, self.heads_norm
            )
        else:
            _, a = self.bench.layer((q, k, v), self.rope, self.steps[n])
        x = self.product("out", n, a, way, x)
        return self.product("down", n, self.product("gate_up", n, x, way, None), way, x)

    def run(self, way: Way) -> torch.Tensor:
        x = self.x.clone()
        for n in range(self.bench.layers):
            x = self.layer(x, n, way)
        return x


def ways(layers: Layers, tried: list[list[str]]) -> dict[str, Way]:
    table, lone = layers.table(), layers.rows == 1
    found = {"old": Way(dict.fromkeys(NAMES), False), "products": Way(table, False), "now": Way(table, lone)}
    for name, turned, *numbers in tried:
        cut = Cut(turned == "True", *map(int, numbers))
        found[f"{name} {tuple(cut)}"] = Way(table | {name: cut}, lone)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, nargs="+", default=[200])
    parser.add_argument("--cut", nargs=6, action="append", default=[], metavar=("NAME", *Cut._fields))
    args: Any = parser.parse_args()
    counters(DEVICE)
    for context in args.context:
        layers = Layers(args.model, args.rows, context)
        tried, own = ways(layers, args.cut), columns.CUTS.pop(torch.cuda.get_device_name(), {})
        columns.cut_of.cache_clear()
        with rehearsal(DEVICE):
            for way in tried.values():
                layers.layer(layers.x.clone(), 0, way)
        want = layers.run(tried["old"])
        for label, way in tried.items():
            off = float((layers.run(way) - want).norm() / want.norm())
            us = graph_us([partial(layers.run, way)]) / layers.bench.layers
            print(f"{context} {label}: {us:.2f} us a layer; {off:.1e} from old", flush=True)
        columns.CUTS[torch.cuda.get_device_name()] = own
        columns.cut_of.cache_clear()
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
