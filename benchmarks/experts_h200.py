"""Mixtures of experts alone, on one H200: right against float64, and how fast beside what memory and products allow.

    python benchmarks/experts_h200.py [--sweep] [--tokens 64 ...]

The shape is Qwen3-30B-A3B's. Bounds: bytes of the experts that somebody chose at 4.3 TB/s, operations at 790 TFLOP/s.
With --sweep: every cut of experts_cuts.py, beside what the engine takes, and then both products' best together. Figures
go to $OUT/experts_h200.json, or beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_graph import graph_us
from experts_cuts import CUTS
from triton.runtime.errors import OutOfResources

from octavo.kernels_triton import expert_blocks, expert_router
from octavo.kernels_triton import expert_kernels as kernels
from octavo.kernels_triton.ahead import rehearsal
from octavo.kernels_triton.ops import TorchOps
from octavo.models import moe
from octavo.models.interface import Routing

X, C, E, F = 128, 8, 2048, 768
TOKENS = (1, 8, 64, 128, 256, 830, 1536, 8192)
COPIES = 6  # of the weights: what a processor's cache holds must not be read again
BANDWIDTH, OPERATIONS = 4.3e12, 790e12
NEAR = 2e-2  # of the largest number: how far bfloat16 of two cuts may lie apart
ROUNDS = 3  # of a sweep
FEW = (1, 2, 8, 16)  # tokens, of the router
PAIRS = (64, 512, 2048, 4096, 6640, 65536)  # of the sorting
DTYPES, CHECKED = (torch.bfloat16, torch.float32), (1, 7, 64, 300, 3000)  # tokens, against float64
DEVICE = torch.device("cuda", 0)


def make(num_tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(num_tokens)
    x = torch.randn((num_tokens, E), device=DEVICE).to(dtype)
    weights, ids = torch.rand((num_tokens, X), device=DEVICE).topk(C)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def make_weights(dtype: torch.dtype, copies: int = COPIES) -> list[tuple[Any, Any]]:
    up = torch.randn((X, E, 2, F), device=DEVICE, dtype=dtype) * E**-0.5
    down = torch.randn((X, F, E), device=DEVICE, dtype=dtype) * F**-0.5
    return [(up.clone(), down.clone()) for _ in range(copies)]


def exact(x: Any, weights: Any, ids: Any, up: Any, down: Any) -> Any:
    """A few rows in float64."""
    out = torch.zeros((len(x), E), dtype=torch.float64, device=DEVICE)
    for t in range(len(x)):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            both = torch.einsum("e,exf->xf", x[t].double(), up[expert].double())
            out[t] += weight * (torch.nn.functional.silu(both[0]) * both[1]) @ down[expert].double()
    return out


class Layer:
    """The experts of a layer on so many tokens, with each copy of the weights."""

    def __init__(self, num_tokens: int, layers: list[tuple[Any, Any]]):
        self.layers, self.num_tokens = layers, num_tokens
        self.x, self.weights, self.ids = make(num_tokens, layers[0][0].dtype)

    def one(self, sizes: Any, copy: int = 0) -> torch.Tensor:
        x = self.x
        return kernels.experts(x, self.weights, self.ids, *self.layers[copy], x, x.dtype, sizes)

    def us(self, sizes: Any = None) -> float:
        return graph_us([partial(self.one, sizes, copy) for copy in range(COPIES)])

    def figures(self, us: float) -> dict[str, Any]:
        used = len(self.ids.unique())
        size, work = used * 3 * E * F * 2, 2 * self.ids.numel() * 3 * E * F
        return {
            "us": round(us, 1), "GB/s": round(size / us / 1e3), "TFLOP/s": round(work / us / 1e6, 1),
            "bound_us": round(max(size / BANDWIDTH, work / OPERATIONS) * 1e6, 1), "experts": used,
        }  # fmt: skip


def check(dtype: torch.dtype) -> dict[int, float]:
    """The greatest error beside the largest number, by tokens; with padding, and an expert that most of them chose."""
    ((up, down),) = make_weights(dtype, 1)
    found = {}
    for num_tokens in CHECKED:
        x, weights, ids = make(num_tokens, dtype)
        ids[num_tokens // 2 :, 0] = 5
        ids[num_tokens - num_tokens // 3 :] = X
        out = kernels.experts(x, weights, ids, up, down, x, torch.float32) - x.float()
        assert not out[num_tokens - num_tokens // 3 :].any() and out.isfinite().all()
        some = slice(0, max(1, num_tokens - num_tokens // 3), max(1, num_tokens // 8))
        want = exact(x[some], weights[some], ids[some], up, down)
        found[num_tokens] = ((out[some] - want).abs().max() / want.abs().max()).item()
    return found


def cuts_of(num_tokens: int) -> tuple[Any, dict[str, Any]]:
    """(what the engine takes, {product: other cuts, each beside the engine's or the first of its rows})."""
    usual = kernels.product_sizes(num_tokens * C, X, 2)
    pairs: dict[str, list[Any]] = {"up": [], "down": []}
    for rows, ups, downs in CUTS[num_tokens]:
        up, down = (kernels.Sizes(rows, *cut) for cut in (ups[0], downs[0]))
        if usual[0].rows == rows:
            up, down = usual
        pairs["up"] += [(kernels.Sizes(rows, *cut), down) for cut in ups]
        pairs["down"] += [(up, kernels.Sizes(rows, *cut)) for cut in downs]
    return usual, pairs


def sweep(layer: Layer) -> dict[str, Any]:
    """Microseconds of each cut, of those that are right; and of the best two of a size together."""
    (usual, pairs), times = cuts_of(layer.num_tokens), {}
    want = layer.one(usual)
    for sizes in dict.fromkeys([usual, *pairs["up"], *pairs["down"]]):
        try:
            got = layer.one(sizes)
        except OutOfResources as error:
            print("refused", sizes, error, flush=True)
            continue
        wrong = ((got - want).abs().max() / want.abs().max()).item()
        if wrong < NEAR:
            times[sizes] = float("inf")
        else:
            print("WRONG", wrong, sizes, flush=True)
    # in turns: a card that grows warm slows whatever comes last
    for sizes in ROUNDS * list(times):
        times[sizes] = min(times[sizes], layer.us(sizes))
    best = []
    for rows in {both[0].rows for both in times}:
        each = [min((b for b in times if b[0].rows == rows and b in [*pairs[k], usual]), key=times.__getitem__)[i]
                for i, k in enumerate(pairs)]  # fmt: skip
        best.append(tuple(each))
        times[best[-1]] = min(layer.us(best[-1]) for _ in range(ROUNDS))
    top = min(best, key=times.__getitem__)
    found: dict[str, Any] = {
        "usual": [list(map(list, usual)), round(times[usual], 1)],
        "best": [list(map(list, top)), round(times[top], 1)],
    }
    for i, product in enumerate(pairs):
        known = sorted((b for b in pairs[product] if b in times), key=times.__getitem__)
        found[product] = {json.dumps(b[i]): round(times[b], 1) for b in known}
    return found


def route_few(num_tokens: int, at_once: bool) -> Callable[[], None]:
    """20 times norm, logits and choice, in one launch or apart."""
    x, ops, routing = make(num_tokens, torch.bfloat16)[0], TorchOps(), Routing(C, normalise=True)
    norm, real = (torch.ones(E, device=DEVICE, dtype=x.dtype), 1e-6), torch.ones(num_tokens, device=DEVICE).bool()
    routers = [torch.randn((X, E), device=DEVICE).to(x.dtype) for _ in range(20)]

    def run() -> None:
        for router in routers:
            if at_once:
                expert_router.choose(x, norm, router, routing, None, real)
            else:
                moe.choose(x, norm, router, routing, None, real, ops)

    return run


def sort(num_pairs: int, counted: bool) -> Callable[[], None]:
    """20 sorts, by counting chunks or by comparing."""
    ids = make(num_pairs // C, torch.bfloat16)[2]

    def run() -> None:
        before = expert_blocks.MOST_PAIRS
        expert_blocks.MOST_PAIRS = 0 if counted else 1 << 30
        for _ in range(20):
            expert_blocks.sort_pairs(ids, X, 16)
        expert_blocks.MOST_PAIRS = before

    return run


def small() -> dict[str, Any]:
    """{what: {size: runs}} of what stands around the products."""
    return {
        "router at once": {n: route_few(n, True) for n in FEW},
        "router apart": {n: route_few(n, False) for n in FEW},
        "sort by counting": {n: sort(n, True) for n in PAIRS},
        # comparing all with all ends somewhere
        "sort by comparing": {n: sort(n, False) for n in PAIRS if n < 10000},
    }


def compile_all(layers: list[tuple[Any, Any]], tokens: list[int], swept: bool) -> None:
    """Every kernel of what follows, side by side."""
    with rehearsal(DEVICE):
        for dtype in DTYPES:
            ((up, down),) = make_weights(dtype, 1)
            for num_tokens in CHECKED:
                x, weights, ids = make(num_tokens, dtype)
                kernels.experts(x, weights, ids, up, down, x, torch.float32)
        for runs in small().values():
            for run in runs.values():
                run()
        for num_tokens in tokens:
            layer = Layer(num_tokens, layers)
            usual, pairs = cuts_of(num_tokens)
            for sizes in [usual, *(pairs["up"] + pairs["down"] if swept else [])]:
                layer.one(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, choices=TOKENS)
    args = parser.parse_args()
    out, start = Path(os.environ.get("OUT", Path(__file__).parent)) / "experts_h200.json", time.monotonic()
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.monotonic() - start:5.1f} s", name, json.dumps(value), flush=True)

    layers = make_weights(torch.bfloat16)
    compile_all(layers, args.tokens, args.sweep)
    keep("compiled", round(time.monotonic() - start, 1))
    for dtype in DTYPES:
        keep(f"error {dtype}", check(dtype))
    for name, runs in small().items():
        keep(name, {n: round(graph_us([run]) / 20, 2) for n, run in runs.items()})
    made = {n: Layer(n, layers) for n in args.tokens}
    for num_tokens, layer in made.items():
        keep(f"{num_tokens} tokens", layer.figures(layer.us()))
    for num_tokens, layer in made.items() if args.sweep else ():
        keep(f"sweep {num_tokens}", sweep(layer))
    for num_tokens in args.tokens if args.sweep else ():
        usual, best = (found[f"sweep {num_tokens}"][k] for k in ("usual", "best"))
        print(f"{num_tokens:5} tokens: {usual[1]} us, best {best[1]}: {best[0]}")


if __name__ == "__main__":
    main()
