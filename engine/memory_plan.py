"""Where the memory goes, computed from specs alone: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..models.interface import ArraySpec, ModelSpec, leaves
from ..models.sampling import row_specs
from .arguments import GIB
from .config import EngineConfig

DEFAULT_CACHE_BYTES = 2 * GIB
# of what max_num_seqs requests of max_model_len need: a default cache beyond it would hardly be reused
USEFUL = 4
# elements of gathered keys that the reference attention has at a time
GATHERED = 1 << 23
# [R, V] arrays that live at a time in the largest head: raw, scaled, bits, weights, noise, and one in the making
HEAD_COPIES = 6


@dataclass(frozen=True)
class GroupPlan:
    """The pool of one cache group."""

    window: int | None  # tokens
    num_layers: int
    block_bytes: int  # one block in all layers of the group, on one device
    num_blocks: int  # the null block included
    blocks_a_request: int  # the most that a request of max_model_len holds
    pool_bytes: int  # on one device


@dataclass(frozen=True)
class MemoryPlan:
    """How much there will be of what. All bytes are those of one device. `dataclasses.asdict` makes it JSON."""

    dtype: str
    num_devices: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int  # tokens
    weights_bytes: int
    rows_bytes: int
    activations_bytes: int  # an estimate: the largest temporaries of the forward and of the head
    cache_bytes: int
    total_bytes: int
    worst_case_cache_bytes: int  # max_num_seqs requests of max_model_len at once
    full_length_requests: float  # how many of max_model_len the cache holds
    largest_max_model_len: int  # tokens of one request that would fit
    groups: tuple[GroupPlan, ...]

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return tuple(g.num_blocks for g in self.groups)


@dataclass(frozen=True)
class Planner:
    """The arithmetic of a plan, for any max_model_len."""

    config: EngineConfig
    model: ModelSpec
    divisors: Mapping[str, int]
    available: int | None

    @cached_property
    def forward_bytes(config: EngineConfig, model: ModelSpec, divisors: Mapping[str, int]) -> int:
    """An estimate of what a forward holds beside weights and cache: residuals, one product, one piece of attention."""
    tokens, size = config.max_num_batched_tokens, itemsize(config.dtype)
    products = [_product_sizes(s, divisors) for s in leaves(model.weights) if s.product and s.product.startswith("t")]
    widest = max((x for x, _ in products), default=0)
    attention = 0
    for spec in model.attention:
        heads = -(-spec.num_kv_heads // divisors.get("kv_heads", 1))
        keys = max(GATHERED, (config.max_model_len or 0) * heads * spec.k_dim)
        scores = keys // spec.k_dim * spec.group_size * min(16, tokens)
        attention = max(attention, 4 * (2 * keys + 2 * scores))
    return size * tokens * (3 * widest + max((x + y for x, y in products), default=0)) + attention


def head_bytes(config: EngineConfig, model: ModelSpec) -> int:
    """An estimate of what the largest head holds; every device has whole rows of logits."""
    return 4 * HEAD_COPIES * config.max_num_seqs * model.vocab_size


def _product_sizes(spec: ArraySpec, divisors: Mapping[str, int]) -> tuple[int, int]:
    """Elements that a product reads and makes, a token."""
    x, w, y = str(spec.product).replace("->", ",").split(",")
    size = {a: -(-n // divisors.get(axis or "", 1)) for a, n, axis in zip(w, spec.shape, spec.axes, strict=True)}
    return math.prod(size.get(a, 1) for a in x), math.prod(size.get(a, 1) for a in y)


def _too_small(planner: Planner, length: int) -> str:
    need, have = planner.blocks(length), [n - 1 for n in planner.pools(length)]
    fits = f"the largest max_model_len that fits is {planner.longest}" if planner.longest else "no request fits"
    enough = planner.bytes_of(n + 1 for n in need)
    return (
        f"the cache is too small for one request of max_model_len {length}: it needs {_sum(need)} blocks of "
        f"{planner.config.block_size} tokens, and {_sum(have)} are there; {fits}. Lower max_model_len (or say 'auto'), "
        f"or raise kv_cache_memory_bytes (to {enough} or more), num_gpu_blocks_override or gpu_memory_utilization"
    )


def _sum(blocks: Iterable[int]) -> str:
    """The numbers of the groups."""
    return " + ".join(map(str, blocks))


def _plan(planner: Planner, length: int) -> MemoryPlan:
    c, counts, need = planner.config, planner.pools(length), planner.blocks(length)
    groups = tuple(
        GroupPlan(g.window, len(g.layers), size, n, most, n * size)
        for g, size, n, most in zip(planner.model.groups, planner.block_bytes, counts, need, strict=True)
    )
    cache, rows = planner.bytes_of(counts), planner.rows_bytes(length)
    return MemoryPlan(
        dtype=c.dtype,
        num_devices=c.tensor_parallel_size,
        block_size=c.block_size,
        max_model_len=length,
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        weights_bytes=planner.weights_bytes,
        rows_bytes=rows,
        activations_bytes=planner.activations_bytes,
        cache_bytes=cache,
        total_bytes=planner.weights_bytes + rows + planner.activations_bytes + cache,
        worst_case_cache_bytes=c.max_num_seqs * planner.bytes_of(need),
        full_length_requests=round(min((n - 1) / most for n, most in zip(counts, need, strict=True)), 2),
        largest_max_model_len=planner.longest,
        groups=groups,
    )
