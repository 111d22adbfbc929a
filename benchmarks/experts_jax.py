"""Mixtures of experts on JAX alone, on one H200: Mosaic GPU's kernels beside those lowered through Triton.

    python benchmarks/experts_jax.py [--tokens 830 8192] [--sweep]

The shape is Qwen3-30B-A3B's. Each way is held to the dense reference's float32 on a few tokens, then timed: the layer
(sort, two products, sum), and of Mosaic's the products alone. With --sweep: Mosaic's other cuts too. Figures go to
$OUT/experts_jax.json, or beside this file. Where Mosaic's win, experts.MOSAIC_ROWS is to be the rows an expert (tokens
/ 16) from which they do.
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

import jax
import jax.numpy as jnp

from octavo.kernels_pallas import expert_kernels, experts, mosaic_experts
from octavo.kernels_pallas.mosaic_experts import Sizes

X, C, E, F = 128, 8, 2048, 768
TOKENS = (830, 1536, 4096, 8192)
COPIES = 4  # of the weights: what a processor's cache holds must not be read again
OTHERS = (Sizes(64, 64, 4), Sizes(64, 128, 2), Sizes(128, 64, 5), Sizes(128, 128, 3))
ROUNDS = 8  # each way in turn: a card that grows warm slows whatever comes last
CHECKED = 16  # tokens
NEAR = 2e-2  # of the largest number


def make(num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, weights and ids, as a router that favours nobody would."""
    one, two = jax.random.split(jax.random.key(num_tokens))
    weights, ids = jax.lax.top_k(jax.random.uniform(two, (num_tokens, X)), C)
    return jax.random.normal(one, (num_tokens, E), jnp.bfloat16), weights / weights.sum(-1, keepdims=True), ids


def make_layers() -> list[tuple[jax.Array, jax.Array]]:
    def normal(seed: int, shape: tuple[int, ...], size: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.bfloat16(size**-0.5)

    return [(normal(2 * i, (X, E, 2, F), E), normal(2 * i + 1, (X, F, E), F)) for i in range(COPIES)]


def error(way: Callable[..., jax.Array], x: Any, weights: Any, ids: Any, layer: tuple[Any, Any]) -> float:
    """The greatest, beside the largest number."""
    some = slice(0, None, max(1, len(x) // CHECKED))
    want = jax.jit(experts.reference)(x[some], weights[some], ids[some], *layer)
    got = jax.jit(way)(x, weights, ids, *layer)[some]
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each copy, {name: the least of some rounds}."""
    best = {name: float("inf") for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            # several: the host's share is a part of one
            jax.block_until_ready([run() for _ in range(4)][-1])
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6 / 4 / COPIES)
    return best


def measure(num_tokens: int, layers: list[tuple[Any, Any]], swept: bool) -> dict[str, Any]:
    given = make(num_tokens)
    usual = mosaic_experts.product_sizes(num_tokens * C, X)
    cuts = [usual, *(s for s in OTHERS if swept and s != usual)]
    names = {f"mosaic {'x'.join(map(str, s))}": s for s in cuts}
    ways = {"triton": expert_kernels.experts}
    ways |= {name: partial(mosaic_experts.experts, sizes=s) for name, s in names.items()}
    errors = {name: error(way, *given, layers[0]) for name, way in ways.items()}
    assert max(errors.values()) < NEAR, errors

    def layer(way: Callable[..., jax.Array]) -> Callable[[], Any]:
        program = jax.jit(lambda given, layers: [way(*given, *one).astype(jnp.bfloat16) for one in layers])
        return lambda: program(given, layers)

    def alone(sizes: Sizes, gated: bool) -> Callable[[], Any]:
        rows = jax.jit(partial(mosaic_experts.lay_out, num_experts=X, rows=sizes.rows))(given[2])
        x = given[0][rows.token_R][:, : E if gated else F]
        options = {"gated": gated, "sizes": sizes, "interpret": None, "num_programs": 132}
        product = jax.jit(lambda x, rows, ws: [mosaic_experts.product(x, w, rows=rows, **options) for w in ws])
        ws = [up.reshape(X, E, 2 * F) if gated else down for up, down in layers]
        return lambda: product(x, rows, ws)

    runs = {name: layer(way) for name, way in ways.items()}
    runs |= {f"{name}, {k}": alone(s, k == "up") for name, s in names.items() for k in ("up", "down")}
    work = 2 * num_tokens * C * E * F
    parts = {"up": 2, "down": 1}
    return {
        name: {
            "us": round(us, 1),
            "TFLOP/s": round(work * parts.get(name.split(", ")[-1], 3) / us / 1e6, 1),
            **({"error": round(errors[name], 5)} if name in errors else {}),
        }
        for name, us in timed(runs).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    out, found = Path(os.environ.get("OUT", Path(__file__).parent)) / "experts_jax.json", {}
    layers = make_layers()
    for num_tokens in args.tokens:
        found[num_tokens] = measure(num_tokens, layers, args.sweep)
        out.write_text(json.dumps(found, indent=1) + "\n")
    for num_tokens, ways in found.items():
        for name, figures in ways.items():
            print(f"{num_tokens:6} {name:26}", json.dumps(figures))


if __name__ == "__main__":
    main()
