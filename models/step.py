"""The programs that run on the device. Pure: state in, state out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import sampling as sampler
from .interface import (
    ROW,
    Array,
    CacheLayout,
    CacheState,
    LayerCache,
    ModelSpec,
    Output,
    Rope,
    Sampling,
    Step,
    StepInput,
)
from .layers import HIDDEN, WHOLE
from .logit_edits import LogitsProcessor
from .taps import TappedOps, Taps


def places(rows: dict[str, Array], inputs: StepInput, group: int, block_size: int, ops: Any) -> dict[str, Array]:
    """Positions, ids and slots of a step's tokens, by their names in Step."""
    xp, starts, table = ops.xp, inputs.query_starts_S1, inputs.block_tables[group]
    token_T = ops.arange(inputs.num_tokens, like=starts)
    # how many sequences end at or before a token: by comparing them all, which no GPU has to loop for
    ended_T = xp.sum(token_T[:, None] >= starts[None, 1:], axis=-1)
    seq_T = xp.clip(ended_T, 0, table.shape[0] - 1)
    real_T = token_T < starts[-1]
    computed_S = rows["num_computed"][inputs.rows_S]
    pos_T = xp.where(real_T, computed_S[seq_T] + token_T - starts[seq_T], 0)
    return {
        "token_ids_T": xp.where(real_T, rows["tokens"][inputs.rows_S[seq_T], pos_T], 0),
        "positions_T": pos_T,
        "seq_ids_T": seq_T,
        "is_real_T": real_T,
        "blocks_T": xp.where(real_T, table[seq_T, pos_T // block_size], 0),
        "offsets_T": pos_T % block_size,
        "lengths_S": computed_S + starts[1:] - starts[:-1],
        "prompt_lens_S": rows["prompt_len"][inputs.rows_S],
    }


def derive(rows: dict[str, Array], inputs: StepInput, group: int, block_size: int, ropes: dict, ops: Any) -> Step:
    """The step from what the rows know. So the host may plan ahead of tokens."""
    return Step(
        **ops.places(places, rows, inputs, group, block_size),
        query_starts_S1=inputs.query_starts_S1,
        block_tables_SB=inputs.block_tables[group],
        decode=inputs.decode,
        ropes=ropes,
        extra=inputs.extra,
        shared=inputs.shared[group] if inputs.shared else None,
        rows_S=inputs.rows_S,
    )


def derive_all(
    weights: dict, cache: CacheState, inputs: StepInput, model: ModelSpec, block_size: int, ops: Any
) -> list[Step]:
    """One Step a cache group; they share everything but blocks."""
    steps = [derive(cache.rows, inputs, g, block_size, {}, ops) for g in range(len(model.groups))]
    ropes = {name: Rope(f, *ops.rope_table(steps[0].positions_T, f)) for name, f in weights["ropes"].items()}
    return [replace(step, ropes=ropes) for step in steps]


def run_layers(
    weights: dict,
    cache: CacheState,
    inputs: StepInput,
    *,
    ops: Any,
    model: ModelSpec,
    layout: CacheLayout,
    taps: Taps | None = None,
) -> tuple[Array, CacheState]:
    """Embeds a step's tokens and runs every layer. Returns the hidden rows of all tokens, and the cache.

    `taps` gets "embed", "layer.i" (the rows behind layer i; the first is 0), and what each op of a layer returns. A
    stage that is not the first embeds nothing: it goes on with the rows of the stage before.
    """
    steps = derive_all(weights, cache, inputs, model, layout.block_size, ops)
    ops = ops.for_step(steps)
    x_TE = model.embed(weights, steps[0], ops)
    if taps and not model.first_layer:
        taps.keep_hidden("embed", x_TE, ops)
    home = {n: (g, i) for g, group in enumerate(model.groups) for i, n in enumerate(group.layers)}
    groups = [list(group) for group in cache.groups]
    # what a layer's ops return can be shown only if the layer is no program of its own
    layer = model.layer if taps else ops.layer(model.layer)
    for n, w in enumerate(weights["layers"]):
        g, i = home[n]
        name = f"layer.{model.first_layer + n}"
        layer_ops = TappedOps(ops, taps, name, w) if taps else ops
        x_TE, groups[g][i] = layer(w, groups[g][i], x_TE, steps[g], model.attention[n], layer_ops, layout)
        if taps:
            taps.keep_hidden(name, x_TE, ops)
    computed = ops.scatter(cache.rows["num_computed"], (inputs.rows_S,), steps[0].lengths_S)
    x_TE = ops.constrain(x_TE, HIDDEN, WHOLE)
    return x_TE, CacheState(tuple(tuple(g) for g in groups), cache.rows | {"num_computed": computed})


def forward(
    weights: dict,
    cache: CacheState,
    inputs: StepInput,
    *,
    ops: Any,
    model: ModelSpec,
    layout: CacheLayout,
    max_num_seqs: int,
) -> tuple[Array, CacheState]:
    """Runs the layers on one step. Returns the last hidden row of each sequence and the cache.

    The hidden rows are padded to [max_num_seqs, E], so that the head's shapes do not depend on the step's.
    """
    x_TE, cache = run_layers(weights, cache, inputs, ops=ops, model=model, layout=layout)
    return ops.last_rows(last_rows, x_TE, inputs, max_num_seqs), cache


def forward_all(
    weights: dict,
    cache: CacheState,
    inputs: StepInput,
    *,
    ops: Any,
    model: ModelSpec,
    layout: CacheLayout,
    max_num_seqs: int,
) -> tuple[Array, dict[str, Array], CacheState]:
    """As forward, and the hidden rows [T, E] of all tokens: "last", behind the last layer, and those of inputs.taps.

    None of them has been through the final norm but "norm". Padding has rows too, of no meaning.
    """
    taps = Taps(inputs.taps) if inputs.taps else None
    x_TE, cache = run_layers(weights, cache, inputs, ops=ops, model=model, layout=layout, taps=taps)
    if taps and taps.wants("norm"):
        taps.keep("norm", model.norm(weights, x_TE, ops))
    tapped = taps.found if taps else {}
    return ops.last_rows(last_rows, x_TE, inputs, max_num_seqs), {"last": x_TE} | tapped, cache


def forward_stage(
    weights: dict, cache: CacheState, inputs: StepInput, *, ops: Any, model: ModelSpec, layout: CacheLayout
) -> tuple[dict[str, Array], CacheState]:
    """As forward_all, of a stage that is not the last: nothing of what it returns is sampled."""
    taps = Taps(inputs.taps) if inputs.taps else None
    x_TE, cache = run_layers(weights, cache, inputs, ops=ops, model=model, layout=layout, taps=taps)
    return {"last": x_TE} | (taps.found if taps else {}), cache


def last_rows(x_TE: Array, inputs: StepInput, max_num_seqs: int, ops: Any) -> Array:
    """The hidden row of each sequence's last token, padded to [max_num_seqs, E]."""
    xp = ops.xp
    last_S = xp.clip(inputs.query_starts_S1[1:] - 1, 0, inputs.num_tokens - 1)
    last_R = last_S[xp.clip(ops.arange(max_num_seqs, like=last_S), 0, last_S.shape[0] - 1)]
    return x_TE[last_R]


def head(
    weights: dict,
    rows: dict[str, Array],
    hidden_RE: Array,
    sampling: Sampling,
    *,
    ops: Any,
    model: ModelSpec,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[Output, dict[str, Array]]:
    """Turns hidden rows into tokens and appends them to rows["tokens"], at num_computed."""
    ops = ops if sampler.sees_all(sampling) else ops.leaving("vocab")
    logits_RV = model.unembed(weights, hidden_RE[sampling.hidden_R], ops)
    output = sampler.sample(logits_RV, rows, sampling, ops, processors)
    at = (sampling.rows_R, rows["num_computed"][sampling.rows_R])
    return output, rows | {"tokens": ops.scatter(rows["tokens"], at, output.token_ids_R)}


def forward_and_head(
    weights: dict,
    cache: CacheState,
    inputs: StepInput,
    sampling: Sampling,
    *,
    ops: Any,
    model: ModelSpec,
    layout: CacheLayout,
    max_num_seqs: int,
) -> tuple[Output, CacheState]:
    """forward, then head: one program, for steps whose head waits for nothing."""
    hidden_RE, cache = forward(weights, cache, inputs, ops=ops, model=model, layout=layout, max_num_seqs=max_num_seqs)
    output, rows = head(weights, cache.rows, hidden_RE, sampling, ops=ops, model=model)
    return output, with_rows(cache, rows)


def set_rows(rows: dict[str, Array], at_A: Array, values: dict[str, Array], *, ops: Any) -> dict[str, Array]:
    """Admits requests: their known tokens, hit length and sampling parameters. Padding names the scratch row.

    Columns that have no value stay as they are: edits are for the few requests that have some.
    A value may be narrower than its row (tokens of a short prompt): the rest of the row is not touched, and not read
    before it is written.
    """

    def fill(old: Array, new: Array) -> Array:
        if new.shape[1:] == old.shape[1:]:
            return ops.scatter(old, (at_A,), new)
        column_M = ops.arange(new.shape[1], like=at_A)
        return ops.scatter(old, (at_A[:, None], column_M[None]), new)

    return {name: fill(old, values[name]) if name in values else old for name, old in rows.items()}


def put_tokens(rows: dict[str, Array], at_A: Array, places_A: Array, tokens_A: Array, *, ops: Any) -> dict[str, Array]:
    """Tokens that another stage has sampled, put into their rows. Padding names the scratch row."""
    return rows | {"tokens": ops.scatter(rows["tokens"], (at_A, places_A), tokens_A)}


def move_blocks(groups: tuple, source: tuple[Array, ...], target: tuple[Array, ...], *, ops: Any) -> tuple:
    """Copies blocks within each group, in every layer. All reads precede all writes, and a target occurs once.

    Padding copies block 0 onto itself.
    """

    def moved(layer: LayerCache, at: Array, to: Array) -> LayerCache:
        return {n: x if n.startswith(ROW) else ops.scatter(x, (to,), x[at]) for n, x in layer.items()}

    return tuple(
        tuple(moved(layer, at, to) for layer in group) for group, at, to in zip(groups, source, target, strict=True)
    )


def with_rows(cache: CacheState, rows: dict[str, Array]) -> CacheState:
    return replace(cache, rows=rows)


def digest_rows(rows: dict[str, Array], *, ops: Any) -> tuple[Array, dict[str, Array]]:
    """(int32 hashes [2, R] of each row's tokens and counts, rows as they were): what processes must agree on."""
    xp = ops.xp
    counts_R2 = xp.stack([rows["num_computed"], rows["prompt_len"]], axis=1)
    # ids and counts are exact in float32, whose bits are hashed
    return xp.stack([ops.digest(xp.astype(x, xp.float32)) for x in (rows["tokens"], counts_R2)]), rows
