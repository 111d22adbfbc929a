"""Which tiles few rows want, on this GPU: the products of the two benchmark shapes, against cuBLAS and small kernels.

    python benchmarks/few_rows.py [--rows 1 16 64] [--out few_rows.json] [--write kernels_triton/few_rows_table.py]

A graph holds as many products, each with a weight of its own, as are more than the caches hold. Prints microseconds a
product: cuBLAS with its norm, gate and sum apart, then the best tilings; an error is relative to float64.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
from cuda_graph import graph_us

from octavo.kernels_triton import few_rows, few_rows_kernels, few_rows_table
from octavo.kernels_triton.arrivals import counters
from octavo.kernels_triton.early import early
from octavo.kernels_triton.few_rows import Tiling
from octavo.kernels_triton.ops import TorchOps

# name: depth, width, norm, gate, add
PRODUCTS = {
    "8b qkv": (4096, 6144, True, False, False),
    "8b out": (4096, 4096, False, False, True),
    "8b gate_up": (4096, 28672, True, True, False),
    "8b down": (14336, 4096, False, False, True),
    "0.6b qkv": (1024, 4096, True, False, False),
    "0.6b out": (2048, 1024, False, False, True),
    "0.6b gate_up": (1024, 6144, True, True, False),
    "0.6b down": (3072, 1024, False, False, True),
}
MEMORY = 500e6  # bytes of weights in one graph
PROCESSES = 15
PROCESSORS = 132
RESIDENT_BYTES = 8 << 20  # of a weight that are asked for ahead: a part of the cache of the device
MOST = {1: 4, 16: 16, 64: 64}  # up to how many rows what was measured at so many is used
LEAST_GAIN = 0.97  # of cuBLAS's time: what is not faster by so much is left to it


def tilings(depth: int, width: int, gate: bool, num_rows: int) -> list[Tiling]:
    """What is tried: enough programs for the device, and not too many."""
    end, found = width // 2 if gate else width, []
    rows = 64 if num_rows > 16 else 16
    for columns, splits in product((32, 64, 128), (1, 2, 4, 8)):
        programs = -(-end // columns) * splits
        if not 0.6 * PROCESSORS <= programs <= 5 * PROCESSORS or (gate and columns == 128):
            continue
        deep = 128 if rows == 16 and columns < 128 else 64
        if depth // splits < 2 * deep:
            continue
        stages = 3 if rows == 64 and gate else 4
        resident = min(programs, 2 * PROCESSORS) * columns * 2 * (1 + gate)
        ahead = min(depth // splits, RESIDENT_BYTES // resident)
        ahead = 1 << max(0, ahead.bit_length() - 1)
        warps = 8 if rows == 64 and columns == 128 else 4
        found.append(Tiling(rows, columns, deep, splits, warps, stages, ahead))
        if splits == 1 or columns == 64:
            found.append(found[-1]._replace(ahead=0))
    return found


def warm(depth: int, width: int, norm: bool, gate: bool, add: bool, tile: Tiling) -> None:
    """Compiles one variant into Triton's cache, as a launch would."""
    half = torch.bfloat16
    parts = (torch.float32, torch.int32) if tile.splits > 1 else (half, half)
    constants = few_rows.constants_of(depth, width, gate, add, tile)
    few_rows_kernels.product.warmup(
        *(half,) * 4, *parts, 1, depth, grid=(1,), **constants, **early(torch.device("cuda"), 1)
    )


def jobs(rows: list[int]) -> list[tuple]:
    return list(dict.fromkeys(
        (*shape, tile) for shape in PRODUCTS.values() for r in rows for tile in tilings(shape[0], shape[1], shape[3], r)
    ))  # fmt: skip


def measure(name: str, num_rows: int) -> list[tuple[float, str, float]]:
    depth, width, norm, gate, add = PRODUCTS[name]
    count = max(4, min(48, int(MEMORY / (depth * width * 2))))
    g = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    weights, x = [random(depth, width) * depth**-0.5 for _ in range(count)], random(num_rows, depth)
    end, ops = width // (1 + gate), TorchOps()
    scale, rest = torch.rand(depth, device="cuda", generator=g).to(torch.bfloat16) + 0.5, random(num_rows, end)
    shaped = [w.view(depth, 2, -1) if gate else w for w in weights]
    x64, w64 = x.double(), weights[0].double()
    if norm:
        x64 = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale.double()
    want = x64 @ w64
    if gate:
        want = torch.nn.functional.silu(want[:, :end]) * want[:, end:]
    want = want + rest.double() if add else want
    found = []

    def error(out: torch.Tensor) -> float:
        return float((out.double() - want).norm() / want.norm())

    counters(x.device)
    scratch = rest.clone()

    def plain(w: torch.Tensor) -> torch.Tensor:
        h = ops.rms_norm(x, scale, 1e-5) if norm else x
        if add:
            return scratch.addmm_(h, w.view(depth, -1))
        y = h @ w.view(depth, -1)
        return ops.gated_mlp_act(y.view(num_rows, 2, -1)) if gate else y

    def own(tile: Tiling, add: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
        return few_rows.product(ops.rms_norm(x, scale, 1e-5) if norm else x, w, tile, gate, add)

    us = graph_us([partial(plain, w) for w in shaped])
    found.append((us, "cuBLAS", 0.0))
    for tile in tilings(depth, width, gate, num_rows):
        poison = torch.full((num_rows, end), float("nan"), device="cuda", dtype=torch.bfloat16)
        del poison
        off = error(own(tile, rest.clone() if add else None, weights[0]))
        us = graph_us([partial(own, tile, scratch if add else None, w) for w in weights])
        found.append((us, str(tuple(tile)), off))
    return found


def table(kept: dict[str, list], rows: list[int], device: str) -> str:
    """kernels_triton/few_rows_table.py with what was best; the entries of other devices stay."""
    own: dict[int, dict] = {}
    for (name, (depth, width, _, gate, _)), num_rows in product(PRODUCTS.items(), rows):
        us, best, _ = min(kept[f"{name} x {num_rows}"])
        plain = next(us for us, tile, _ in kept[f"{name} x {num_rows}"] if tile == "cuBLAS")
        chosen = None if best == "cuBLAS" or us > LEAST_GAIN * plain else best
        own.setdefault(MOST[num_rows], {})[depth, width, gate] = chosen
    source = Path(few_rows_table.__file__).read_text()
    lines = [source[: source.index("TABLE")] + "TABLE: dict = {"]
    for place, rules in (few_rows_table.TABLE | {device: own}).items():
        lines += [f'    "{place}": {{']
        for most, rule in rules.items():
            lines += [
                f"        {most}: {{",
                *(f"            {shape}: {tile}," for shape, tile in rule.items()),
                "        },",
            ]
        lines += ["    },"]
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("few_rows.json"))
    args = parser.parse_args()
    work = jobs(args.rows)
    if args.compile is not None:
        for job in work[args.compile :: PROCESSES]:
            warm(*job)
        return
    started = time.time()
    own = [sys.executable, __file__, "--rows", *map(str, args.rows), "--compile"]
    for p in [subprocess.Popen([*own, str(i)]) for i in range(PROCESSES)]:
        p.wait()
    print(len(work), "variants compiled,", round(time.time() - started), "s", flush=True)
    if args.only_compile:
        return
    kept, rows = {}, [int(n) for n in args.rows]
    for name, num_rows in product(PRODUCTS, rows):
        depth, width = PRODUCTS[name][:2]
        found = measure(name, num_rows)
        torch.cuda.empty_cache()
        kept[f"{name} x {num_rows}"] = sorted(found)
        args.out.write_text(json.dumps(kept, indent=0))
        ours = sorted(f for f in found if f[1] != "cuBLAS")
        print(f"{name} x {num_rows}: floor {depth * width * 2 / 4.2e6:.1f}, cuBLAS {found[0][0]:.1f};",
              "; ".join(f"{us:.1f} {tile}" for us, tile, _ in ours[:3]), f"; worst error {max(f[2] for f in ours):.1e}",
              flush=True)  # fmt: skip
    if args.write:
        args.write.write_text(table(kept, args.rows, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
