"""Texts to vectors: embeddings, and the hidden states that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..models.pooling import POOLINGS, first_row, joined, pooled
from .checks import check_names, choice, flag, integer, sequence
from .computed import compute_members
from .output_processor import Member
from .prompts import list_of_prompts, token_ids_of
from .reads import Wanted

if TYPE_CHECKING:
    import numpy as np

    from .llm import LLM


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a text becomes one vector: of its last token's hidden state, or of the mean of all, behind the final norm.

    `dimensions` keeps the first so many (of a model trained for that), before `normalize` makes the length 1.
    """

    pooling: str = "last"  # or "mean"
    normalize: bool = True
    dimensions: int | None = None  # None: all

    def __new__(cls, **names: Any) -> PoolingParams:
        hints = {"use_activation": "it is called normalize here", "pooling_type": "it is called pooling here"}
        check_names("pooling parameter", names, (f.name for f in fields(cls)), hints)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        choice("pooling", self.pooling, POOLINGS)
        flag("normalize", self.normalize)
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1)


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class HiddenStatesOutput:
    """The hidden states of one prompt, by layer as they were asked for: [tokens, hidden size] each, in the model's
    dtype."""

    request_id: str
    prompt_token_ids: Sequence[int]
    hidden_states: dict[int, np.ndarray] = field(repr=False)


@dataclass(frozen=True)
class RoutedExpertsOutput:
    """The experts of one prompt: [tokens, chosen experts] of each layer that has some, the best expert first."""

    request_id: str
    prompt_token_ids: Sequence[int]
    routed_experts: dict[int, np.ndarray] = field(repr=False)


def embed(
    llm: LLM, prompts: Any, params: PoolingParams | Sequence[PoolingParams], use_tqdm: bool
) -> list[EmbeddingRequestOutput]:
    """One vector a prompt, in order. "last" may find all but the last block in the cache, "mean" reads none of it."""
    prompts = list_of_prompts(prompts)
    each = _list_of_params(params, len(prompts), _hidden_size(llm))
    lengths = [len(token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size)) for prompt in prompts]
    wanted = [Wanted(first_row(p.pooling, n), n, hidden=("norm",)) for p, n in zip(each, lengths, strict=True)]
    members = compute_members(llm, prompts, wanted, use_tqdm)
    return [
        EmbeddingRequestOutput(
            m.request.id,
            EmbeddingOutput(pooled(_rows(m, "norm"), dimensions=p.dimensions, normalize=p.normalize).tolist()),
            m.request.prompt,
            m.request.num_cached or 0,
        )
        for m, p in zip(members, each, strict=True)
    ]


def hidden_states(llm: LLM, prompts: Any, layers: Sequence[int], use_tqdm: bool) -> list[HiddenStatesOutput]:
    """Of each prompt, the rows of all its tokens behind these layers, numbered as transformers does."""
    prompts, names = list_of_prompts(prompts), _names(llm, sequence("layers", layers))
    lengths = [len(token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size)) for prompt in prompts]
    hidden = tuple(dict.fromkeys(names.values()))
    members = compute_members(llm, prompts, [Wanted(0, n, hidden=hidden) for n in lengths], use_tqdm)
    return [
        HiddenStatesOutput(m.request.id, m.request.prompt, {i: _rows(m, name) for i, name in names.items()})
        for m in members
    ]


def routed_experts(llm: LLM, prompts: Any, use_tqdm: bool) -> list[RoutedExpertsOutput]:
    """Of each prompt, the experts of all its tokens, by layer."""
    if llm.model.mixture is None:
        raise ValueError(f"the model {llm.model.name!r} has no experts")
    prompts, names = list_of_prompts(prompts), {n: f"layer.{n}.experts" for n in llm.model.mixture.layers}
    lengths = [len(token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size)) for prompt in prompts]
    wanted = [Wanted(0, n, hidden=tuple(names.values())) for n in lengths]
    return [
        RoutedExpertsOutput(m.request.id, m.request.prompt, {n: _rows(m, name) for n, name in names.items()})
        for m in compute_members(llm, prompts, wanted, use_tqdm)
    ]


def _names(llm: LLM, layers: Sequence[Any]) -> dict[int, str]:
    """What the forward calls them. 0 is the embedding, the last one has been through the final norm; -1 is the last."""
    count, names = len(llm.model.attention), {}
    if not layers:
        raise ValueError(f"layers is empty: give some of 0 (the embedding) to {count}, or -1 for the last")
    for layer in layers:
        i = integer("layers", layer, -count - 1, count) % (count + 1)
        names[int(layer)] = "embed" if i == 0 else "norm" if i == count else f"layer.{i - 1}"
    return names


def _rows(member: Member, name: str) -> np.ndarray:
    """All rows of that name that were read of a request."""
    return joined([part.hidden[name] for part in member.reads])


def _hidden_size(llm: LLM) -> int:
    return llm.model.weights["final_norm"].shape[0]


def _list_of_params(params: Any, num_prompts: int, hidden_size: int) -> list[PoolingParams]:
    each = [params] * num_prompts if isinstance(params, PoolingParams) else list(sequence("pooling_params", params))
    for p in each:
        if not isinstance(p, PoolingParams):
            raise ValueError(f"pooling_params {p!r} is not a PoolingParams")
        if p.dimensions is not None and p.dimensions > hidden_size:
            raise ValueError(f"dimensions {p.dimensions} is more than the model's hidden size, {hidden_size}")
    if len(each) != num_prompts:
        raise ValueError(f"{len(each)} pooling params for {num_prompts} prompts: give one, or one for each")
    return each
