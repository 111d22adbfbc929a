"""generate() for a whole batch as one program, for those who bring their own loop.

In JAX everything here can be called inside a `jax.jit` of one's own; the loop over tokens is then a `lax.while_loop`.
In torch the same lines run eagerly. Greedy and seeded tokens are those of `LLM.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ..models import step
from ..models.interface import Array, CacheLayout, CacheState, ModelSpec, Sampling, StepInput
from ..models.keeps import keeps_of
from ..models.logit_edits import MAX_STOP_IDS
from ..models.sampling import PARAMS, VARIANTS
from .backend import Backend
from .batch import edit_columns
from .edits import edits_of
from .plan import Edits
from .runner import cache_specs, empty_cache
from .sampling_params import SamplingParams, request_key
from .tokenizer import Tokenizer

# max_tokens and ignore_eos are arguments of generate; there is no text, and no prefix cache
HONOURED = {*PARAMS, "seed", "logit_bias", "allowed_token_ids", "bad_words", "max_tokens", "ignore_eos", "detokenize",
            "skip_special_tokens", "spaces_between_special_tokens", "skip_reading_prefix_cache"}  # fmt: skip


class Generated(NamedTuple):
    """A pytree. `token_ids_SM` and `logprobs_SM` are valid up to `num_tokens_S`, an end-of-sequence id included."""

    token_ids_SM: Array  # int32, M = max_tokens
    logprobs_SM: Array  # float32, of the raw distribution
    num_tokens_S: Array
    cache: CacheState


def init_cache(
    model: ModelSpec, backend: Backend, layout: CacheLayout, num_seqs: int, max_prompt_len: int, max_tokens: int
) -> CacheState:
    """An empty cache for num_seqs sequences of max_prompt_len + max_tokens tokens, each with its own blocks."""
    length = max_prompt_len + max_tokens
    blocks = 1 + num_seqs * -(-length // layout.block_size)
    return empty_cache(cache_specs(model, layout, [blocks] * len(model.groups), num_seqs, length), backend)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids [S, longest] int32, lengths [S] int32) of a list of prompts."""
    if not prompts or not all(len(p) for p in prompts):
        raise ValueError("every prompt needs at least one token")
    lengths = np.array([len(p) for p in prompts], np.int32)
    ids = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, lengths


def sampling_columns(
    params: SamplingParams | Sequence[SamplingParams],
    num_seqs: int,
    *,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, np.ndarray]:
    """The rows of CacheState.rows that sampling reads, for `generate(columns=...)`. A seed of None is 0.

    allowed_token_ids, logit_bias and bad_words need the model's vocab_size, bad_words the tokenizer too.
    What generate's own arguments say (max_tokens, ignore_eos) and how text is made are passed over; NotImplementedError
    names whatever else is set and not honoured.
    """
    params = [params] * num_seqs if isinstance(params, SamplingParams) else list(params)
    if len(params) != num_seqs:
        raise ValueError(f"{len(params)} sampling params for {num_seqs} prompts")
    for p in params:
        if asked := [f.name for f in fields(p) if f.name not in HONOURED and getattr(p, f.name) != f.default]:
            raise NotImplementedError(f"functional.generate does not honour {', '.join(asked)}: use LLM.generate")
        if vocab_size is None and (p.allowed_token_ids or p.logit_bias or p.bad_words):
            raise ValueError("allowed_token_ids, logit_bias and bad_words need vocab_size=model.vocab_size here")
    columns = {
        "params": np.array([p.row() for p in params], np.float32),
        "keys": np.array([request_key(p.seed or 0, 0) for p in params], np.int32),
    }
    edits = [edits_of(p, vocab_size or 0, tokenizer, ()) for p in params]
    if not any(edits):
        return columns
    edited = {"edited": np.array([e is not None for e in edits], np.int32)}
    return columns | edited | edit_columns([e or Edits() for e in edits], num_seqs, vocab_size or 0)


def generate(
    weights: dict[str, Any],
    cache: CacheState,
    prompts_SL: Array,
    lengths_S: Array,
    max_tokens: int,
    *,
    model: ModelSpec,
    backend: Backend,
    layout: CacheLayout,
    columns: dict[str, Array] | None = None,
    variant: str | None = None,
    eos: int = -1,
) -> Generated:
    """Prompts to tokens, until every sequence has max_tokens or has sampled `eos` (-1: never).

    prompts_SL and lengths_S are int32, as `pad_prompts` makes them; weights is the model's tree, in any values. Without
    `columns` the tokens are greedy; with them the sampler is the whole one, unless `variant` names a smaller one that
    suffices for all (the largest of `SamplingParams.variant`). Consumes the cache: with JAX donate it, or keep it.
    """
    variant = variant or ("penalties" if columns else "greedy")
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    _check_room(cache, prompts_SL.shape, max_tokens)
    section = keeps_of(layout).section
    if section is not None and section < prompts_SL.shape[1]:
        raise NotImplementedError(f"prompts of {prompts_SL.shape[1]} tokens: {layout!r} reads them {section} at a time")
    given: dict[str, Array] = columns or {}
    prompts_SL, lengths_S, given = backend.own((prompts_SL, lengths_S, given))
    ops, xp, (seqs, longest) = backend.ops, backend.ops.xp, prompts_SL.shape
    with backend.scope():
        cache = backend.consume(cache)
        cache = step.with_rows(cache, _fill_rows(cache.rows, prompts_SL, lengths_S, given, ops))
        batch = _batch(weights, cache, lengths_S, model, layout, ops, variant)

        def body(state: tuple) -> tuple:
            cache, alive_S, made_S, logprobs_SM, n = state
            cache, ids_S, picked_S = batch.step(cache, xp.astype(alive_S, xp.int32), seqs, True)
            made_S = made_S + xp.astype(alive_S, xp.int32)
            logprobs_SM = ops.scatter(logprobs_SM, (batch.seq_S, batch.seq_S * 0 + n), picked_S)
            return cache, alive_S & (ids_S != eos), made_S, logprobs_SM, n + 1

        def goes_on(state: tuple) -> Array:
            return xp.any(state[1]) & (state[4] < max_tokens)

        cache, ids_S, picked_S = batch.step(cache, lengths_S, seqs * longest, False)
        column_M, ones_S = ops.arange(max_tokens, like=lengths_S), xp.ones_like(lengths_S)
        logprobs_SM = xp.where(column_M[None] == 0, picked_S[:, None], 0.0)
        state = (cache, ids_S != eos, ones_S, logprobs_SM, ones_S[0])
        cache, _, made_S, logprobs_SM, _ = ops.loop(goes_on, body, state)
        place_SM = lengths_S[:, None] + column_M[None]
        return Generated(cache.rows["tokens"][batch.seq_S[:, None], place_SM], logprobs_SM, made_S, cache)


def _check_room(cache: CacheState, shape: tuple[int, int], max_tokens: int) -> None:
    (seqs, longest), (rows, room) = shape, cache.rows["tokens"].shape
    if rows != seqs + 1 or longest + max_tokens > room:
        raise ValueError(
            f"the cache is for {rows - 1} sequences of {room} tokens, not for {seqs} of {longest} + {max_tokens}: "
            f"make it with init_cache(..., {seqs}, {longest}, {max_tokens})"
        )


@dataclass(frozen=True)
class _Batch:
    """Sequences that run together from prompt to end, each in blocks of its own."""

    weights: dict[str, Any]
    model: ModelSpec
    layout: CacheLayout
    ops: Any
    variant: str
    seq_S: Array
    tables: tuple[Array, ...]

    def step(
        self, cache: CacheState, counts_S: Array, num_tokens: int, decode: bool
    ) -> tuple[CacheState, Array, Array]:
        """The next counts_S tokens of each; a token of each that has any, and its logprob."""
        ops, xp, seqs = self.ops, self.ops.xp, self.seq_S.shape[0]
        starts_S1 = xp.concat([xp.zeros_like(counts_S[:1]), xp.astype(xp.cumulative_sum(counts_S, axis=0), xp.int32)])
        inputs = StepInput(self.seq_S, starts_S1, self.tables, num_tokens, decode)
        hidden, cache = step.forward(
            self.weights, cache, inputs, ops=ops, model=self.model, layout=self.layout, max_num_seqs=seqs
        )
        # those that have ended write to the scratch row
        rows_R = xp.where(counts_S > 0, self.seq_S, seqs)
        at = Sampling(self.seq_S, rows_R, self.variant, num_logprobs=0)
        output, rows = step.head(self.weights, cache.rows, hidden, at, ops=ops, model=self.model)
        return step.with_rows(cache, rows), output.token_ids_R, output.logprobs_R


def _batch(
    weights: dict[str, Any],
    cache: CacheState,
    like: Array,
    model: ModelSpec,
    layout: CacheLayout,
    ops: Any,
    variant: str,
) -> _Batch:
    rows, room = cache.rows["tokens"].shape
    seq_S, width = ops.arange(rows - 1, like=like), -(-room // layout.block_size)
    table_SB = 1 + seq_S[:, None] * width + ops.arange(width, like=like)[None]
    return _Batch(weights, model, layout, ops, variant, seq_S, (table_SB,) * len(model.groups))


def _fill_rows(rows: dict, prompts_SL: Array, lengths_S: Array, columns: dict, ops: Any) -> dict:
    xp, seq_S = ops.xp, ops.arange(lengths_S.shape[0], like=lengths_S)
    zeros = {name: xp.zeros_like(rows[name][: lengths_S.shape[0]]) for name in ("keys", "params", "stop_ids", "edited")}
    values = (
        zeros
        | columns
        | {
            "tokens": prompts_SL,
            "num_computed": xp.zeros_like(lengths_S),
            "prompt_len": lengths_S,
            "min_tokens": xp.zeros_like(lengths_S),
        }
    )
    assert values["stop_ids"].shape[1] == MAX_STOP_IDS
    return step.set_rows(rows, seq_S, values, ops=ops)
