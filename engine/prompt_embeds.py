"""Embeddings in place of token ids: checked, and told apart in the prefix cache by what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.interface import ModelSpec
from ..models.prompt_embeds import NAME, NO_ID, hidden_size

if TYPE_CHECKING:
    from .sampling_params import SamplingParams


class PromptEmbeds:
    """The rows [n, E] of one prompt, float32, and a digest of those that lie in each block."""

    def __init__(self, rows: np.ndarray, block_size: int):
        self.rows = rows
        starts = range(0, len(rows), block_size)
        self.digests = tuple(hashlib.sha256(rows[at : at + block_size].tobytes()).digest() for at in starts)

    @property
    def token_ids(self) -> list[int]:
        """What stands for them among token ids."""
        return [NO_ID] * len(self.rows)


def embeds_of(prompt: Any, model: ModelSpec, block_size: int) -> PromptEmbeds | None:
    """The embeddings that a prompt brings; None: it is one of another form. Raises ValueError for wrong ones."""
    if not isinstance(prompt, Mapping) or NAME not in prompt:
        return None
    if unknown := set(prompt) - {NAME, "cache_salt"}:
        raise ValueError(f"a prompt with prompt_embeds may have a cache_salt, and not {', '.join(sorted(unknown))}")
    if NAME not in model.extra:
        raise ValueError("the prompt is prompt_embeds, which needs LLM(enable_prompt_embeds=True)")
    return PromptEmbeds(_rows(prompt[NAME], hidden_size(model)), block_size)


def check_beside(params: SamplingParams) -> None:
    """Raises ValueError for params that ask for what a prompt without ids does not have."""
    for name in ("prompt_logprobs", "prompt_logprob_token_ids", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise ValueError(f"{name} {getattr(params, name)} wants the ids of the prompt, which is prompt_embeds")


def _rows(given: Any, size: int) -> np.ndarray:
    try:
        if np.iscomplexobj(given):
            raise TypeError("complex numbers have no place in a row")
        # a copy: what is computed and what is hashed must not change
        rows = np.array(given, np.float32, order="C")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"prompt_embeds of type {type(given).__name__} cannot be read as numbers: {error}") from None
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != size:
        raise ValueError(f"prompt_embeds of shape {rows.shape}: it must be [tokens, {size}], of at least one token")
    if not np.isfinite(rows).all():
        raise ValueError("prompt_embeds holds NaN or infinity")
    return rows
