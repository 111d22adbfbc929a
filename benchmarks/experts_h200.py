"""Mixtures of experts alone, on one H200: right against float64, and how fast beside what memory and products allow.

    python benchmarks/experts_h200.py [--sweep]

The shape is Qwen3-30B-A3B's. Bounds: bytes of the experts that somebody chose at 4.3 TB/s, operations at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from typing import Any

import torch

from octavo.kernels_triton import expert_kernels as kernels

X, C, E, F = 128, 8, 2048, 768
TOKENS = (1, 8, 64, 256, 1024, 8192)
COPIES = 6  # of the weights: what a processor's cache holds must not be read again
BANDWIDTH, OPERATIONS = 4.3e12, 790e12
Sizes = kernels.Sizes
# tokens to try with: rows of a block, and (columns, depth, warps, stages) of the first and of the second product
SWEEP = {
    (1,): (
        16,
        [(32, 128, 4, 4), (32, 128, 2, 4), (32, 64, 4, 6), (32, 256, 4, 2), (32, 64, 2, 6)],
        [(64, 128, 4, 4), (64, 64, 4, 6), (64, 128, 2, 4), (64, 256, 4, 2)],
    ),
    (64, 256): (
        16,
        [
            (64, 64, 4, 4),
            (128, 32, 4, 4),
            (128, 32, 4, 5),
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (64, 64, 2, 4),
            (128, 32, 8, 5),
        ],
        [(128, 64, 4, 4), (128, 64, 4, 3), (256, 32, 4, 4), (128, 32, 4, 5), (256, 64, 8, 3)],
    ),
    (1024,): (64, [(64, 64, 4, 4), (128, 64, 8, 3)], [(128, 64, 4, 4), (256, 64, 8, 3)]),
    (8192,): (
        128,
        [(128, 64, 8, 3), (64, 64, 8, 4), (128, 64, 8, 4)],
        [(128, 64, 8, 4), (256, 64, 8, 3), (128, 64, 8, 3)],
    ),
}


def make(num_tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(num_tokens)
    x = torch.randn((num_tokens, E), device="cuda").to(dtype)
    weights, ids = torch.rand((num_tokens, X), device="cuda").topk(C)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def make_weights(dtype: torch.dtype) -> list[tuple[Any, Any]]:
    up = torch.randn((X, E, 2, F), device="cuda", dtype=dtype) * E**-0.5
    down = torch.randn((X, F, E), device="cuda", dtype=dtype) * F**-0.5
    return [(up.clone(), down.clone()) for _ in range(COPIES)]


def exact(x: Any, weights: Any, ids: Any, up: Any, down: Any) -> Any:
    """A few rows in float64."""
    out = torch.zeros((len(x), E), dtype=torch.float64, device="cuda")
    for t in range(len(x)):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            both = torch.einsum("e,exf->xf", x[t].double(), up[expert].double())
            out[t] += weight * (torch.nn.functional.silu(both[0]) * both[1]) @ down[expert].double()
    return out


def microseconds(run: Any, times: int = 5) -> float:
    """Of one call, from a CUDA graph that holds one for each copy of the weights."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / times / COPIES


def measure(num_tokens: int, layers: list[tuple[Any, Any]], sizes: Any = None) -> dict[str, Any]:
    x, weights, ids = make(num_tokens, layers[0][0].dtype)

    def run() -> None:
        for up, down in layers:
            kernels.experts(x, weights, ids, up, down, x, x.dtype, sizes)

    us, used = microseconds(run), len(ids.unique())
    size, work = used * 3 * E * F * 2, 2 * ids.numel() * 3 * E * F
    return {
        "us": round(us, 1), "GB/s": round(size / us / 1e3), "TFLOP/s": round(work / us / 1e6, 1),
        "bound_us": round(max(size / BANDWIDTH, work / OPERATIONS) * 1e6, 1), "experts": used,
    }  # fmt: skip


def check(dtype: torch.dtype) -> dict[int, float]:
    """The greatest error beside the largest number, by tokens; with padding, and an expert that most of them chose."""
    up, down = make_weights(dtype)[0]
    found = {}
    for num_tokens in (1, 7, 64, 300, 3000):
        x, weights, ids = make(num_tokens, dtype)
        ids[num_tokens // 2 :, 0] = 5
        ids[num_tokens - num_tokens // 3 :] = X
        out = kernels.experts(x, weights, ids, up, down, x, torch.float32) - x.float()
        assert not out[num_tokens - num_tokens // 3 :].any() and out.isfinite().all()
        some = slice(0, max(1, num_tokens - num_tokens // 3), max(1, num_tokens // 8))
        want = exact(x[some], weights[some], ids[some], up, down)
        found[num_tokens] = ((out[some] - want).abs().max() / want.abs().max()).item()
    return found


def compile_one(cut: tuple[Any, Any]) -> None:
    """Leaves the kernels of a cut in Triton's cache."""
    x, weights, ids = make(1, torch.bfloat16)
    up, down = (torch.empty(s, device="cuda", dtype=x.dtype) for s in ((X, E, 2, F), (X, F, E)))
    kernels.experts(x, weights, ids, up, down, x, x.dtype, cut)


def sweep(layers: list[tuple[Any, Any]]) -> None:
    """Prints microseconds by how one of the two products is cut while the other is as it is, and the best of each."""
    tries = {}
    for tokens, (rows, ups, downs) in SWEEP.items():
        up, down = Sizes(rows, *ups[0]), Sizes(rows, *downs[0])
        tries[tokens] = [(Sizes(rows, *cut), down) for cut in ups], [(up, Sizes(rows, *cut)) for cut in downs]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_one, [cut for both in tries.values() for cuts in both for cut in cuts], chunksize=1)
    for tokens, both in tries.items():
        best = []
        for i, cuts in enumerate(both):
            times = {cut: sum(measure(n, layers, cut)["us"] for n in tokens) for cut in cuts}
            print("sweep", tokens, ("up", "down")[i], {tuple(c[i]): round(t, 1) for c, t in times.items()}, flush=True)
            best.append(tuple(min(times, key=lambda cut: times[cut])[i]))
        print("best", tokens[0], json.dumps(best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    for dtype in (torch.bfloat16, torch.float32):
        print("error", dtype, json.dumps(check(dtype)), flush=True)
    layers = make_weights(torch.bfloat16)
    for num_tokens in TOKENS:
        print(num_tokens, json.dumps(measure(num_tokens, layers)), flush=True)
    if args.sweep:
        sweep(layers)


if __name__ == "__main__":
    main()
