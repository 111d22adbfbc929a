"""What cublasLt knows for the products of the two benchmark shapes, beside what torch launches, on this GPU.

    python benchmarks/products_lt.py [--rows 64 896] [--products "8b down"] [--known FILE ...] [--out FILE]
    python benchmarks/products_lt.py --write FILE ... (kernels_triton/cublas_table.py from such results, no GPU needed)

A graph holds as many products, each with a weight of its own, as are more than the caches hold; those behind which a
residual is added are with beta = 1. Prints microseconds a product. Tried is whatever the heuristic names for any of
NUMBERS of rows, with workspaces and without; with --known what was near the best in those results, and what it names
for the same rows. (Its neighbours with other tiles, clusters, splits and variants were tried too, a thousand a product:
none was better.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_graph import graph_of

from octavo.kernels_triton import cublas_table
from octavo.kernels_triton.cublas import ATTRIBUTES, Config, Found, Plan, call, library

# name: depth, width, add
PRODUCTS = {
    "8b qkv": (4096, 6144, False),
    "8b out": (4096, 4096, True),
    "8b gate_up": (4096, 28672, False),
    "8b down": (14336, 4096, True),
    "8b unembed": (4096, 128256, False),
    "0.6b qkv": (1024, 4096, False),
    "0.6b out": (2048, 1024, True),
    "0.6b gate_up": (1024, 6144, False),
    "0.6b down": (3072, 1024, True),
    "0.6b unembed": (1024, 151936, False),
}
MEMORY = 300e6  # bytes of weights in one graph
WORKSPACES = (0, 4 << 20, 32 << 20, 64 << 20)
NUMBERS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 4096, 8192)
BURN = 20e3  # microseconds of work before a comparison: the clock settles
NEAR = 1.03  # of the best
LEAST_TILE = 8  # rows
LEAST_GAIN = 0.985  # of torch's time: what is not faster by so much is left to it


def config_of(found: Found) -> Config:
    values = []
    for attribute, size in ((0, 4), *ATTRIBUTES.values()):
        value, written = c_uint32(), c_size_t()
        call("MatmulAlgoConfigGetAttribute", byref(found.algo), attribute, byref(value), c_size_t(size), byref(written))
        values.append(value.value)
    return Config(*values)


def named(plan: Plan, workspace: int) -> list[Config]:
    """What the heuristic names, best first by its own estimate."""
    pref, found, count, size = c_void_p(), (Found * 100)(), c_int(), c_uint64(workspace)
    call("MatmulPreferenceCreate", byref(pref))
    call("MatmulPreferenceSetAttribute", pref, 1, byref(size), c_size_t(8))
    w, x, out = plan.parts
    call("MatmulAlgoGetHeuristic", plan.handle, plan.desc, w, x, out, out, pref, 100, found, byref(count))
    call("MatmulPreferenceDestroy", pref)
    return [config_of(f) for f in found[: count.value] if f.state == 0]


def by_torch(x: torch.Tensor, out: torch.Tensor, add: bool, turned: bool, w: torch.Tensor) -> torch.Tensor:
    plain = w.t() if turned else w
    return out.addmm_(x, plain) if add else torch.mm(x, plain, out=out)


class Case:
    """One product with its weights, for any number of rows."""

    def __init__(self, name: str, most: int, known: Iterable[Config]):
        # as the engine keeps them: the embeddings' table is [vocab, embed]
        self.name, self.turned = name, name.endswith("unembed")
        self.depth, self.width, self.add = PRODUCTS[name]
        self.g = torch.Generator("cuda").manual_seed(1)
        count = max(3, min(64, round(MEMORY / (self.depth * self.width * 2))))
        shape = (self.width, self.depth) if self.turned else (self.depth, self.width)
        self.weights = [self.random(*shape) * self.depth**-0.5 for _ in range(count)]
        self.x, self.out = self.random(most, self.depth), self.random(most, self.width)
        self.known = dict.fromkeys(known) or self.named(NUMBERS)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g, device="cuda", dtype=torch.bfloat16)

    def plan(self, rows: int) -> Plan:
        return Plan(rows, self.depth, self.width, self.depth, not self.turned, torch.device("cuda", 0))

    def named(self, numbers: Iterable[int]) -> dict[Config, None]:
        found: dict[Config, None] = {}
        for rows in numbers:
            plan = self.plan(rows)
            for size in WORKSPACES:
                found.update(dict.fromkeys(named(plan, size)))
        return found

    def measure(self, rows: int) -> dict[str, Any]:
        plan, x, out = self.plan(rows), self.x[:rows], self.out[:rows]
        weights = self.weights[:2] if rows > 2048 else self.weights
        plain = graph_of([partial(by_torch, x, out, self.add, self.turned, w) for w in weights])
        graphs: dict[Config | None, Callable[[int], float]] = {None: plain}
        quick, made = {}, {}
        self.burn(plain)
        for each in self.named([rows]) | self.known:
            found = plan.found(each)
            if found is None or found.workspace > WORKSPACES[-1]:
                continue
            try:
                graph = graph_of([partial(plan.launch, found, x, w, out, self.add) for w in weights])
            except RuntimeError as error:
                print("   ", each, error)
                continue
            quick[each], made[each], graphs[each] = graph(1), found, graph
            for slow in sorted(quick, key=quick.__getitem__)[6:]:
                graphs.pop(slow, None)
        self.burn(plain)
        # in turns, so that a clock that changes meets all of them
        taken: dict[Config | None, list[float]] = {k: [] for k in graphs}
        for _ in range(4 if rows > 2048 else 8):
            for k, graph in graphs.items():
                taken[k].append(graph(1))
        us = {k: statistics.median(x) for k, x in taken.items()}
        torch_us = us.pop(None)
        best = min((k for k in us if k is not None), key=us.__getitem__)
        want = by_torch(x, out.zero_(), False, self.turned, weights[0]).float()
        plan.launch(made[best], x, weights[0], out.fill_(float("nan")), False)
        return {
            "torch": torch_us, "best": us[best], "config": best, "tried": len(quick),
            "workspace": made[best].workspace, "off": float((out.float() - want).norm() / want.norm()),
            "near": [[*k, round(x, 2)] for k, x in us.items() if k is not None],
        }  # fmt: skip

    def burn(self, graph: Callable[[int], float]) -> None:
        spent = 0.0
        while spent < BURN:
            spent += graph(1) * len(self.weights)


def floor_of(depth: int, width: int, rows: int) -> float:
    return max(depth * width * 2 / 4.3e6, 2 * rows * depth * width / 800e6)


def near_ones(runs: list[dict[str, Any]], name: str) -> list[Config]:
    """What was near the best for that product, whatever the rows."""
    return [
        Config(*config)
        for run in runs
        for key, r in run.items()
        if key.startswith(name + " x ")
        for *config, us in r["near"]
        if us <= NEAR * r["best"]
    ]


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs, as cards differ: times relative to torch's, in the mean; what a run did not keep is no gain."""
    whole: dict[str, Any] = {}
    for key in dict.fromkeys(key for r in results for key in r if " x " in key):
        runs = [r[key] for r in results if key in r]
        found = [{Config(*config): us / r["torch"] for *config, us in r["near"]} for r in runs]
        near = [[*c, statistics.mean(f.get(c, 1.0) for f in found)] for c in dict.fromkeys(c for f in found for c in f)]
        whole[key] = {"torch": 1.0, "best": min(n[-1] for n in near), "near": near}
    return whole


def rules_of(rows: dict[int, dict[str, Any]]) -> dict[int, Config | None]:
    """For each product the next larger one's choice if it is as good, and then in one rule."""
    rules: dict[int, Config | None] = {}
    last: Config | None = None
    for n in sorted(rows, reverse=True):
        r = rows[n]
        good = {Config(*config): us for *config, us in r["near"] if us <= 1.01 * r["best"]}
        if r["best"] > LEAST_GAIN * r["torch"]:
            chosen = None
        else:
            chosen = last if last in good else min(good, key=good.__getitem__)
        if not rules or chosen != last:
            rules[n] = chosen
        last = chosen
    first = min(rules)
    if min(rows) > LEAST_TILE and rules[first]:
        # fewer rows than were measured are torch's, but for those that the same tile holds
        rules[min(rows) - 1] = None
    return dict(sorted(rules.items()))


def write_table(runs: list[dict[str, Any]]) -> None:
    """kernels_triton/cublas_table.py with what was best; the entries of other devices stay."""
    own, results = {}, merged(runs)
    for name, (depth, width, add) in PRODUCTS.items():
        rows = {int(key.split()[-1]): r for key, r in results.items() if key.startswith(name + " x ")}
        rules = rules_of(rows) if rows else {}
        if any(rules.values()):
            own[depth, width, not name.endswith("unembed"), add] = rules
    path = Path(cublas_table.__file__)
    source = path.read_text()
    lines = [source[: source.index("TABLE")] + "TABLE: dict = {"]
    for place, products in (cublas_table.TABLE | {(runs[0]["device"], runs[0]["version"]): own}).items():
        lines += [f'    ("{place[0]}", {place[1]}): {{']
        for shape, rules in products.items():
            configs = [f"            {n}: {None if c is None else tuple(c)}," for n, c in rules.items()]
            lines += [f"        {shape}: {{", *configs, "        },"]
        lines += ["    },"]
    path.write_text("\n".join([*lines, "}", ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 896, 8192])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--known", type=Path, nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--out", type=Path, default=Path("products_lt.json"))
    parser.add_argument("--write", type=Path, nargs="+")
    args = parser.parse_args()
    earlier = [r for path in args.write or args.known for r in json.loads(path.read_text())]
    if args.write:
        return write_table(earlier)
    began = time.time()
    torch.mm(*(torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16),) * 2)
    kept: dict[str, Any] = {"device": torch.cuda.get_device_name(), "version": library().cublasLtGetVersion()}
    print(*kept.values(), torch.__version__)
    for name in args.products:
        all_rows = [r for r in args.rows if r <= 256 or not name.endswith("unembed")]
        case = Case(name, max(all_rows), near_ones(earlier, name))
        for rows in all_rows:
            if time.time() - began > args.seconds:
                print("no time for", name, rows)
                continue
            r = kept[f"{name} x {rows}"] = case.measure(rows)
            args.out.write_text(json.dumps([kept], indent=0))
            print(f"{name:12} x{rows:5}: floor {floor_of(case.depth, case.width, rows):7.1f} torch {r['torch']:7.1f}"
                  f" best {r['best']:7.1f} ({1 - r['best'] / r['torch']:5.1%}, of {r['tried']}) {tuple(r['config'])}"
                  f" workspace {r['workspace'] >> 10} kB, off {r['off']:.0e}", flush=True)  # fmt: skip
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
