"""The vocabulary: every type that crosses from one room into another. No jax, no torch.

Letters: T tokens of a step, S sequences of a step, R rows (sequences) that are sampled, A rows that are admitted,
L max_model_len, E embed, K kv heads, G query heads a kv head, D head dim, F mlp, V vocabulary, N blocks,
P block size (tokens), B width of a block table, X a small fused axis (q..q k v, or gate and up). Where there are
experts: X experts, C chosen ones of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .keeps import Keeps

Array = Any  # a jax.Array or a torch.Tensor: models never ask which
LayerCache = dict[str, Array]


@dataclass(frozen=True)
class ArraySpec:
    """An array that does not exist yet. One tree of these serves loading, random init, sharding and the memory plan.

    `axes` are logical names ("vocab", "kv_heads", "mlp", ...) or None; `sharding/rules.py` maps them to mesh axes.
    `dtype` None means the dtype the model is run in. `init` is "normal", "ones", "zeros", or "host" for a value that
    the checkpoint map itself holds. `product` is the einsum in which a weight is used: `ops.prepare` packs by it.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None
    init: str = "normal"
    product: str | None = None


@dataclass(frozen=True)
class CacheState:
    """Everything the device remembers between steps. Consumed and returned, never changed.

    `groups[g][i]` holds the arrays of the i-th layer of cache group g. `rows` holds one row a running request, and one
    more, the *scratch row* (the last), which takes what padding writes: `rows["tokens"]` is [max_num_seqs + 1, L].
    """

    groups: tuple[tuple[LayerCache, ...], ...]
    rows: dict[str, Array]


@dataclass(frozen=True)
class SharedPrefixes:
    """Which sequences of a step begin with the same blocks, so that attention may read those once for all of them.

    Only of sequences with one token in the step. Tiles (W) of C sequences; what a group lacks of a tile is -1, and a
    tile of nobody has length 0. Every sequence has tokens of its own beyond the shared ones.
    """

    members_WC: Array  # int32, places in the step; the first of a tile is one
    lengths_W: Array  # tokens that a tile's members share, in whole blocks
    lengths_S: Array  # the same by sequence; 0: none


@dataclass(frozen=True)
class StepInput:
    """One ragged, padded step as the host knows it: who, how many tokens each, which blocks. No token, no position.

    `num_tokens` (T) and `decode` are static: no array here has a T axis, so the shape of a step must be said.
    `decode` promises at most one token a sequence. `extra` is declared by the ModelSpec; empty for text. `taps`, static
    too, name what forward_all keeps beside the last layer's rows. `shared` (empty: nobody looked) only says again what
    is in the tables: whoever has no use for it may leave it.
    """

    rows_S: Array
    query_starts_S1: Array  # cu_seqlens in flash-attention
    block_tables: tuple[Array, ...]  # [S, B], one a cache group
    num_tokens: int
    decode: bool
    extra: dict[str, Array] = field(default_factory=dict)
    taps: tuple[str, ...] = ()
    shared: tuple[SharedPrefixes | None, ...] = ()  # one a cache group; None where a window would hide a prefix


@dataclass(frozen=True)
class Rope:
    """A rotary table for the tokens of one step, and the frequencies it was made from."""

    inv_freq_D: Array  # [D / 2], float32
    cos_TD: Array  # [T, D / 2]
    sin_TD: Array


@dataclass(frozen=True)
class Step:
    """StepInput seen from inside, for one cache group: everything derived from CacheState.rows."""

    token_ids_T: Array
    positions_T: Array
    seq_ids_T: Array
    is_real_T: Array
    blocks_T: Array  # where the token's k and v go; padding goes to block 0
    offsets_T: Array
    lengths_S: Array  # tokens in the cache after this step
    query_starts_S1: Array
    block_tables_SB: Array
    decode: bool
    ropes: dict[str, Rope]
    extra: dict[str, Array]
    shared: SharedPrefixes | None = None
    prompt_lens_S: Array = None  # None: made by hand, for a layout that keeps everything
    rows_S: Array = None  # row of each sequence; None: made by hand, for a layout without row_spec


@dataclass(frozen=True)
class Sampling:
    """Which hidden rows become tokens of which cache rows. One hidden row may feed several (n > 1)."""

    hidden_R: Array  # index into the hidden rows that forward returned
    rows_R: Array  # cache row; padding names the scratch row
    variant: str  # static: one of sampling.VARIANTS
    num_logprobs: int = -1  # static: how many top logprobs; -1: none at all
    digest: bool = False  # static: also hash the logits, for the step log
    mask_RW: Array | None = None  # grammar, as `sampling.unpack` reads it. Known late, and only the head waits for it
    logprobs_mode: str = "raw_logprobs"  # static: one of logprobs.MODES
    token_ids_RN: Array | None = None  # more ids whose logprobs are wanted


@dataclass(frozen=True)
class Reading:
    """Hidden rows, a tile of fixed size, and the known tokens behind them, of which the logprobs are read."""

    hidden_R: Array  # index into all hidden rows of a step
    targets_R: Array
    num_tokens: int  # static: how many hidden rows the step has
    num_logprobs: int  # static, as in Sampling
    logprobs_mode: str = "raw_logprobs"  # static
    token_ids_RN: Array | None = None


@dataclass(frozen=True)
class Output:
    """What the head hands to the host. The fields that nobody asked for are None. Logprobs may be logits, by mode."""

    token_ids_R: Array
    logprobs_R: Array | None = None  # of that token
    ranks_R: Array | None = None  # 1 = most likely
    top_ids_RN: Array | None = None
    top_logprobs_RN: Array | None = None
    digests_R: Array | None = None
    id_logprobs_RN: Array | None = None  # of the ids that were given
    id_ranks_RN: Array | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention. Static; its arrays (sinks, frequencies) travel with the weights."""

    num_kv_heads: int
    group_size: int  # query heads a kv head
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None  # tokens a query sees, itself included
    softcap: float | None = None
    rope: str | None = "rope"  # which table of Step.ropes; None: positions are not rotated in


@dataclass(frozen=True)
class Routing:
    """How tokens find their experts. Static; `models/moe.py` reads it.

    Scores are the softmax or the sigmoid of the router's logits. With groups, only the experts of the best ones can be
    chosen; a group is as good as the sum of its `group_best` best scores.
    """

    num_chosen: int  # experts of a token
    scoring: str = "softmax"  # or "sigmoid"
    normalise: bool = False  # the weights of the chosen sum to 1
    scale: float = 1.0  # of the weights
    num_groups: int = 1
    num_top_groups: int = 1
    group_best: int = 1
    float32: bool = False  # logits are made in float32, whatever the model's dtype

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring {self.scoring!r} is neither softmax nor sigmoid")
        for name in ("num_chosen", "num_groups", "group_best"):
            if (n := getattr(self, name)) < 1:
                raise ValueError(f"{name} {n} must be at least 1")
        if not 1 <= self.num_top_groups <= self.num_groups:
            raise ValueError(f"num_top_groups {self.num_top_groups} must be from 1 to num_groups {self.num_groups}")


@dataclass(frozen=True)
class Mixture:
    """What stands for the MLP in some layers: experts of which each token goes through a few."""

    num_experts: int
    expert_dim: int
    layers: tuple[int, ...]
    routing: Routing
    shared_dim: int = 0  # of the expert that every token goes through; 0: there is none
    shared_gate: bool = False  # whether that one has a gate

    def __post_init__(self) -> None:
        routing, layers = self.routing, self.layers
        group, rest = divmod(self.num_experts, routing.num_groups)
        if self.num_experts < 1 or rest:
            raise ValueError(f"num_experts {self.num_experts} must be at least 1, in {routing.num_groups} equal groups")
        for name, most in (("group_best", group), ("num_chosen", group * routing.num_top_groups)):
            if (n := getattr(routing, name)) > most:
                raise ValueError(f"{name} {n} of {self.num_experts} experts: at most {most} can be chosen from")
        if self.expert_dim < 1:
            raise ValueError(f"expert_dim {self.expert_dim} must be at least 1")
        if not layers or min(layers) < 0 or len({*layers}) < len(layers):
            raise ValueError(f"layers {layers}: name each layer with experts once, from 0; there must be one")
        if self.shared_dim < 0 or (self.shared_gate and not self.shared_dim):
            raise ValueError(f"shared_dim {self.shared_dim} must be at least 0, and more for a shared_gate")


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor and the einops pattern that brings it to our axes."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Fuse:
    """Parts, fused ones among them, concatenated along `axis` into one weight. The loader's only verb.

    None is a part of size 1 that no checkpoint has: zeros.
    """

    parts: tuple[Part | Fuse | None, ...]
    axis: int = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table, because they forget alike."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A model is a config, specs of its weights, cache groups, a checkpoint map, and four pure functions.

    `weights` is a dict with at least "layers" (a list, one dict a layer) and "ropes" (name -> frequencies).
    `checkpoint` is the same tree with a Fuse, or for init "host" a numpy array, at each leaf.

    embed(weights, step, ops) -> x_TE
    layer(layer_weights, layer_cache, x_TE, step, attention_spec, ops, layout) -> (x_TE, layer_cache)
    norm(weights, x_TE, ops) -> x_TE, the final norm alone: what transformers calls the last hidden state
    unembed(weights, x_RE, ops) -> logits_RV, in the dtype of the weights; the final norm is in it
    """

    name: str
    config: Any
    vocab_size: int
    max_model_len: int  # the longest context that the checkpoint's config promises
    weights: dict[str, Any]
    checkpoint: dict[str, Any]
    pattern_sizes: Mapping[str, int]  # letters of the einops patterns that shapes alone do not fix
    groups: tuple[CacheGroup, ...]
    attention: tuple[AttentionSpec, ...]  # one a layer
    embed: Callable[..., Array]
    layer: Callable[..., tuple[Array, LayerCache]]
    norm: Callable[..., Array]
    unembed: Callable[..., Array]
    extra: Mapping[str, ArraySpec] = field(default_factory=dict)
    mixture: Mixture | None = None  # of experts, if the model has one
    first_layer: int = 0  # of the whole model, where this is a stage of it (models/stage.py)


class CacheLayout(Protocol):
    """How keys and values lie in the cache: a frozen value without arrays. A new one is a file of some 50 lines."""

    @property
    def block_size(self) -> int: ...

    @property
    def keeps(self) -> Keeps:
        """What it keeps of a sequence, in layers without a window of their own; all, for a layout without `keeps`."""
        ...

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """The arrays of one layer. dtype None is the cache dtype."""
        ...

    def row_spec(self, attention: AttentionSpec, num_rows: int) -> dict[str, ArraySpec]:
        """Arrays of one layer that lie in no block, with an entry a row (step.rows_S) as their first axis.

        In the layer's cache their names begin with "row.". Nobody copies them: a layout that needs more than full
        blocks to go on with `keeps` no forks. None, for a layout without `row_spec`.
        """
        ...

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """parts: q [T, K, G, D], k and v [T, K, D], before rope. Returns [T, K, G, Dv] and the new cache.

        Where heads are normed, "q" and "k" are, and "unnormed" is what ops.rope_write norms on its way: (q, k, norm).
        """
        ...


ROW = "row."  # what the names of arrays by row begin with


def layer_specs(layout: CacheLayout, attention: AttentionSpec, num_blocks: int, num_rows: int) -> dict[str, ArraySpec]:
    """All arrays of a layer's cache."""
    return layout.spec(attention, num_blocks) | row_specs_of(layout, attention, num_rows)


def row_specs_of(layout: CacheLayout, attention: AttentionSpec, num_rows: int) -> dict[str, ArraySpec]:
    """Those that lie in no block, by the names that they have in the cache."""
    if not hasattr(layout, "row_spec"):
        return {}
    return {ROW + name: spec for name, spec in layout.row_spec(attention, num_rows).items()}


def map_tree(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """f over the leaves of dicts, tuples and lists; everything else is a leaf. `others` may hold more than `tree`."""
    if isinstance(tree, dict):
        return {k: map_tree(f, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_tree(f, v, *(o[i] for o in others)) for i, v in enumerate(tree))
    return f(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """The leaves of dicts, tuples and lists, in order."""
    if isinstance(tree, dict):
        return [x for v in tree.values() for x in leaves(v)]
    if isinstance(tree, list | tuple):
        return [x for v in tree for x in leaves(v)]
    return [tree]
