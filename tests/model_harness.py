"""Runs a model's functions on a backend without the engine: all logits at once, or through the cache in chunks."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from oracle import Host

from octavo.engine.loading.safetensors import source_of_folder
from octavo.engine.loading.weights import load_weights
from octavo.engine.runner import cache_specs, empty_cache
from octavo.models import step
from octavo.models.interface import Array, ArraySpec, CacheState, Fuse, ModelSpec, StepInput, map_tree
from octavo.models.layouts.paged import TokenMajor


def read_checkpoint(model: ModelSpec, folder: Path) -> dict[str, Any]:
    """The weights tree as numpy, from safetensors."""
    return load_weights(model, source_of_folder(folder), Host())  # pyright: ignore[reportArgumentType]


def random_weights(model: ModelSpec, seed: int = 0, scale: float = 0.2) -> dict[str, Any]:
    """A weights tree as numpy. Norm scales are random too: ones would hide a forgotten one."""
    rng = np.random.default_rng((seed, zlib.crc32(model.name.encode())))

    def one(spec: ArraySpec, source: Fuse | np.ndarray) -> np.ndarray:
        if spec.init == "host":
            assert isinstance(source, np.ndarray)
            return source
        x = rng.uniform(0.5, 1.5, spec.shape) if spec.init == "ones" else rng.normal(0, scale, spec.shape)
        return x.astype(np.float32)

    return map_tree(one, model.weights, model.checkpoint)


def all_logits(model: ModelSpec, weights: dict[str, Any], backend: Any, ids: list[int]) -> np.ndarray:
    """[T, V]: teacher-forced, the whole sequence in one step."""

    def program(w: dict, cache: CacheState, inputs: StepInput, *, ops: Any) -> tuple[Array, CacheState]:
        x_TE, cache = step.run_layers(w, cache, inputs, ops=ops, model=model, layout=layout)
        return model.unembed(w, x_TE, ops), cache

    layout = TokenMajor()
    run = backend.compile(program, ("weights", "cache", "inputs"), ("logits", "cache"), consumes="cache")
    cache, tables = cache_with(model, layout, backend, ids)
    return backend.read(run(place(model, weights, backend), cache, step_input(tables, len(ids)))[0])


def chunked_logits(
    model: ModelSpec, weights: dict[str, Any], backend: Any, ids: list[int], chunk: int
) -> tuple[list[int], np.ndarray]:
    """Positions, and the logits after them: the last of each chunk of a sequence that passes through the cache."""

    def program(w: dict, cache: CacheState, inputs: StepInput, *, ops: Any) -> tuple[Array, CacheState]:
        hidden_RE, cache = forward(w, cache, inputs, ops=ops)
        return model.unembed(w, hidden_RE, ops), cache

    layout = TokenMajor()
    forward = partial(step.forward, model=model, layout=layout, max_num_seqs=1)
    run = backend.compile(program, ("weights", "cache", "inputs"), ("logits", "cache"), consumes="cache")
    placed, (cache, tables), rows = place(model, weights, backend), cache_with(model, layout, backend, ids), []
    positions = [min(start + chunk, len(ids)) - 1 for start in range(0, len(ids), chunk)]
    for start, last in zip(range(0, len(ids), chunk), positions, strict=True):
        logits_RV, cache = run(placed, cache, step_input(tables, last + 1 - start, padded=chunk))
        rows.append(backend.read(logits_RV)[0])
    return positions, np.stack(rows)


def place(model: ModelSpec, weights: dict[str, Any], backend: Any) -> dict[str, Any]:
    return map_tree(lambda spec, x: backend.place_weight(x, spec), model.weights, weights)


def cache_with(model: ModelSpec, layout: TokenMajor, backend: Any, ids: list[int]) -> tuple[CacheState, tuple]:
    """A cache whose row 0 knows the ids, and block tables long enough; blocks are handed out in falling order."""
    num_blocks = -(-len(ids) // layout.block_size)
    specs = cache_specs(model, layout, [num_blocks + 1] * len(model.groups), 1, len(ids))
    cache = empty_cache(specs, backend)
    tokens = np.stack([ids, np.zeros_like(ids)]).astype(np.int32)
    rows = cache.rows | {"tokens": backend.place(tokens, specs.rows["tokens"])}
    return CacheState(cache.groups, rows), tuple(
        np.arange(num_blocks, 0, -1, dtype=np.int32)[None] for _ in model.groups
    )


def step_input(tables: tuple, num_tokens: int, padded: int | None = None) -> StepInput:
    starts = np.array([0, num_tokens], np.int32)
    return StepInput(np.zeros(1, np.int32), starts, tables, padded or num_tokens, decode=False)
