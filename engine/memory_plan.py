"""Where the memory goes, computed from specs alone: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..models.interface import ArraySpec, AttentionSpec, ModelSpec, leaves, row_specs_of
from ..models.keeps import by_window, keeps_of
from ..models.sampling import row_specs
from ..models.stage import stage_tree
from .arguments import GIB
from .batch import READ_TILE
from .block_manager import peak_blocks
from .config import EngineConfig
from .parallel.devices import Collective, Stage, collectives_of, stages

DEFAULT_CACHE_BYTES = 2 * GIB
# of what max_num_seqs requests of max_model_len need: a default cache beyond it would hardly be reused
USEFUL = 4
# queries of a tile of the reference attention, and elements of gathered keys that it has at a time
TILE, GATHERED = 16, 1 << 23
# [R, V] arrays that live at a time in the largest head: raw, shaped, a histogram of twice that, what forbids, what is
# repeated, and three in the making; a test measures it
HEAD_COPIES = 9
# the same of a tile of prompt logprobs: logits, and what ranks and the largest are found with; where the largest are
# the whole vocabulary, their sort and two tiles of results too
READ_COPIES, READ_COPIES_WHOLE = 3, 9


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
    # an estimate: the largest temporaries of the forward, of the head, or of reading prompt logprobs
    activations_bytes: int
    cache_bytes: int
    total_bytes: int
    worst_case_cache_bytes: int  # max_num_seqs requests of max_model_len at once
    full_length_requests: float  # how many of max_model_len the cache holds
    largest_max_model_len: int  # tokens of one request that would fit
    groups: tuple[GroupPlan, ...]
    stages: tuple[Stage, ...] = ()  # of several devices, what each holds
    collectives: tuple[Collective, ...] = ()  # of one step

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
    total: int | None = None
    beside: Callable[[ArraySpec, Sequence[int]], int] | None = None

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """One block in all layers of each group, on one device."""

        def of_layer(i: int, blocks: int) -> int:
            specs = self.config.layout.spec(self.model.attention[i], blocks).values()
            return sum(spec_bytes(s, self.config.dtype, self.divisors) for s in specs)

        # of a pipeline, those of the stage with most layers of a group
        return tuple(
            max(sum(of_layer(i, 2) - of_layer(i, 1) for i in group.layers if i in stage) for stage in self.stages)
            for group in self.model.groups
        )

    @cached_property
    def stages(self) -> list[range]:
        return stages(len(self.model.attention), self.config.pipeline_parallel_size)

    @cached_property
    def weights_bytes(self) -> int:
        return max(map(self.stage_bytes, self.stages))

    def stage_bytes(self, layers: range) -> int:
        """Bytes of the weights of a pipeline stage, on one device."""
        tree = stage_tree(self.model, layers, self.model.weights)
        specs, embed = leaves(tree), tree.get("embed")
        beside = sum(self.beside(s, shard_of(s, self.divisors)) for s in specs if self.beside and s.product)
        if self.config.backend == "torch" and embed is not None and embed.product is not None:
            # packed for its product, a tied table is kept a second time for look-ups
            specs.append(embed)
        return beside + sum(spec_bytes(s, self.config.dtype, self.divisors) for s in specs)

    def stage_cache(self, layers: range, blocks: Sequence[int]) -> int:
        """Bytes of the pools of a pipeline stage, on one device."""
        of = ((n, i) for n, group in zip(blocks, self.model.groups, strict=True) for i in group.layers if i in layers)
        specs = (s for n, i in of for s in self.config.layout.spec(self.model.attention[i], n).values())
        return sum(spec_bytes(s, self.config.dtype, self.divisors) for s in specs)

    @cached_property
    def activations_bytes(self) -> int:
        c = self.config
        # graphs keep theirs apart from what runs op by op
        times = 2 if c.backend == "torch" and c.device == "cuda" and not c.enforce_eager else 1
        return times * self.activations_once

    @cached_property
    def activations_once(self) -> int:
        c, model = self.config, self.model
        return max(forward_bytes(c, model, self.divisors), head_bytes(c, model), reading_bytes(c, model))

    def rows_bytes(self, length: int) -> int:
        rows = row_specs(self.config.max_num_seqs + 1, length, self.model.vocab_size)
        known = sum(spec_bytes(s, "int32", {}) for s in rows.values())
        return known + sum(self.layer_row_bytes(a) for a in self.model.attention)

    def layer_row_bytes(self, attention: AttentionSpec) -> int:
        """What a layout keeps of one layer by row, on one device."""
        specs = row_specs_of(self.config.layout, attention, self.config.max_num_seqs + 1)
        return sum(spec_bytes(s, self.config.dtype, self.divisors) for s in specs.values())

    def blocks(self, length: int) -> list[int]:
        """The most blocks that a sequence of this length holds, all of it prompt, in each group."""
        size, budget, keeps = self.config.block_size, self.config.max_num_batched_tokens, keeps_of(self.config.layout)
        groups = by_window(keeps, (g.window for g in self.model.groups))
        return [peak_blocks(k, length, length, size, budget) for k in groups]

    def bytes_of(self, blocks: Iterable[int]) -> int:
        """Bytes, on one device, of so many blocks of each group."""
        return sum(n * size for n, size in zip(blocks, self.block_bytes, strict=True))

    def cache_limit(self, length: int) -> int:
        """Bytes that the pools of one device may have."""
        c = self.config
        if c.kv_cache_memory_bytes is not None:
            return c.kv_cache_memory_bytes
        limit = USEFUL * c.max_num_seqs * self.bytes_of(self.blocks(length)) + sum(self.block_bytes)
        if c.device == "cpu" or self.available is None:
            limit = min(DEFAULT_CACHE_BYTES // c.num_shards, limit)
        if self.available is None:
            return limit
        others = self.weights_bytes + self.rows_bytes(length) + self.activations_bytes
        return min(limit, self.allowed(self.available) - others)

    def allowed(self, available: int) -> int:
        """Bytes that the engine may have in all: its part of the whole device where that is known, else of the rest."""
        part = self.config.gpu_memory_utilization
        return int(available * part) if self.total is None else int(available - self.total * (1 - part))

    def pools(self, length: int) -> list[int]:
        """Blocks of each group at this max_model_len; less than one request needs, if there is no more room.

        The groups share as they need, so that a request that fits in one fits in all; each has a null block too.
        """
        override, need = self.config.num_gpu_blocks_override, self.blocks(length)
        if override is not None:
            return list(override) if isinstance(override, tuple) else [override] * len(need)
        room = max(0, self.cache_limit(length) - sum(self.block_bytes))
        counts = [1 + room * n // self.bytes_of(need) for n in need]
        c = self.config
        if c.backend == "jax" and c.device != "cpu" and c.kv_cache_memory_bytes is None:
            # compiled programs go by the shapes of the pools, and a GPU has not the same free at every start
            return [n - n % _step(n) for n in counts]
        return counts

    def fits(self, length: int) -> bool:
        return all(have > need for have, need in zip(self.pools(length), self.blocks(length), strict=True))

    @cached_property
    def longest(self) -> int:
        """The largest max_model_len, up to the model's, of which one request fits; 0 if none does."""
        low, high = 0, self.model.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low


def _step(n: int) -> int:
    """The largest power of two of which there are at least 256 in n; 1 if there are fewer."""
    return max(1, 1 << (n >> 8).bit_length() >> 1)


def memory_plan(
    config: EngineConfig,
    model: ModelSpec,
    *,
    divisors: Mapping[str, int] | None = None,
    available: int | None = None,
    total: int | None = None,
    beside: Callable[[ArraySpec, Sequence[int]], int] | None = None,
) -> MemoryPlan:
    """The plan of a config that has been through `for_model`.

    `divisors` says over how many devices a logical axis is split; `available` is the free memory of a device in bytes
    (devices that are one host's CPU share its memory), None where it is not known; `total` is all that a GPU has, of
    which gpu_memory_utilization is a part; `beside` (spec, a device's shape) are the bytes that the backend keeps
    beside a weight, None: nothing. Under max_model_len "auto" the plan's max_model_len is the longest that fits. Raises
    ValueError when the cache cannot hold one request.
    """
    if config.max_model_len is None:
        raise ValueError("max_model_len is not known yet: plan config.for_model(model)")
    planner = Planner(config, model, divisors or {}, available, total, beside)
    length = config.max_model_len
    if config.fit_model_len and planner.longest:
        length = min(length, planner.longest)
    if not planner.fits(length):
        raise ValueError(_too_small(planner, length))
    return _plan(planner, length)


def available_memory() -> int | None:
    """Bytes that a process can still get on this host, its control group's limit included; None if nobody says."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).exists() and (text := (group / limit).read_text().strip()) != "max":
            found.append(int(text) - int((group / used).read_text()))
    return min(found, default=None)


def spec_bytes(spec: ArraySpec, dtype: str, divisors: Mapping[str, int]) -> int:
    """Bytes of one device's shard."""
    return math.prod(shard_of(spec, divisors)) * itemsize(spec.dtype or dtype)


def shard_of(spec: ArraySpec, divisors: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one device's part."""
    return tuple(-(-n // divisors.get(axis or "", 1)) for n, axis in zip(spec.shape, spec.axes, strict=True))


def itemsize(dtype: str) -> int:
    # numpy itself does not know these
    known = {"bfloat16": 2, "float8_e4m3fn": 1}
    return known[dtype] if dtype in known else np.dtype(dtype).itemsize


def forward_bytes(config: EngineConfig, model: ModelSpec, divisors: Mapping[str, int]) -> int:
    """An estimate of what a forward holds beside weights and cache: residuals, one product, one piece of attention."""
    tokens, size = config.max_num_batched_tokens, itemsize(config.dtype)
    products = [_product_sizes(s, divisors) for s in leaves(model.weights) if s.product and s.product.startswith("t")]
    widest = max((x for x, _ in products), default=0)
    attention = max(_attention_bytes(config, spec, divisors) for spec in model.attention)
    # experts that replicas share see the tokens of all
    mixed = config.num_joint * _mixture_size(model, divisors)
    product = max(max((x + y for x, y in products), default=0), mixed)
    return size * tokens * (3 * widest + product) + attention


def _mixture_size(model: ModelSpec, divisors: Mapping[str, int]) -> int:
    """Elements that a token has in the experts that it chose: its row going in, inside, and coming out."""
    if model.mixture is None:
        return 0
    embed_dim, inside = model.weights["embed"].shape[1], model.mixture.expert_dim // divisors.get("expert_mlp", 1)
    return model.mixture.routing.num_chosen * (2 * embed_dim + inside)


def _attention_bytes(config: EngineConfig, spec: AttentionSpec, divisors: Mapping[str, int]) -> int:
    """The reference attention's keys, values, scores and probabilities of the tiles that it has at a time, in fp32."""
    tiles = -(-config.max_num_batched_tokens // TILE) + config.max_num_seqs
    tile = (config.max_model_len or 1) * -(-spec.num_kv_heads // divisors.get("kv_heads", 1))
    at_once = max(1, min(tiles, GATHERED // (tile * spec.k_dim)))
    return 4 * at_once * tile * (spec.k_dim + spec.v_dim + 2 * TILE * spec.group_size)


def head_bytes(config: EngineConfig, model: ModelSpec) -> int:
    """An estimate of what the largest head holds; every device has whole rows of logits."""
    return 4 * HEAD_COPIES * config.max_num_seqs * model.vocab_size


def reading_bytes(config: EngineConfig, model: ModelSpec) -> int:
    """An estimate of what reading prompt logprobs holds: a tile of rows at a time, however long the prompts are."""
    whole = config.max_logprobs == -1 or config.max_logprobs >= model.vocab_size
    rows = min(READ_TILE, config.max_num_batched_tokens)
    return 4 * rows * model.vocab_size * (READ_COPIES_WHOLE if whole else READ_COPIES)


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
        f"{planner.config.block_size} tokens, and {_sum(have)} are there{_shortfall(planner, length)}; {fits}. "
        f"Lower max_model_len (or say 'auto'), or raise kv_cache_memory_bytes (to {enough} or more), "
        f"num_gpu_blocks_override or gpu_memory_utilization"
    )


def _shortfall(planner: Planner, length: int) -> str:
    """How many bytes are missing, where the memory is known."""
    if planner.available is None or planner.config.num_gpu_blocks_override is not None:
        return ""
    enough = planner.bytes_of(n + 1 for n in planner.blocks(length))
    return f", {enough - planner.cache_limit(length)} bytes too few beside {planner.weights_bytes} of weights"


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
        num_devices=c.num_shards,
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
        stages=_stages(planner, counts),
        collectives=tuple(collectives_of(c, planner.model, itemsize(c.dtype))),
    )


def _stages(planner: Planner, blocks: Sequence[int]) -> tuple[Stage, ...]:
    """What the devices of each pipeline stage hold; nothing of a single device."""
    c, found = planner.config, []
    each = c.tensor_parallel_size
    for n, layers in enumerate(planner.stages if c.num_shards > 1 else ()):
        # torch's rank 0 is in the last stage
        at = each * (c.pipeline_parallel_size - 1 - n if c.backend == "torch" else n)
        firsts = (replica * len(planner.stages) * each + at for replica in range(c.data_parallel_size))
        names = ", ".join(f"{first}-{first + each - 1}" if each > 1 else str(first) for first in firsts)
        sizes = planner.stage_bytes(layers), planner.stage_cache(layers, blocks)
        found.append(Stage(names, f"{layers.start}-{layers.stop - 1}", *sizes))
    return tuple(found)
