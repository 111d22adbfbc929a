"""Prompts that are given as embeddings: rows that stand where a token's id is negative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .interface import Array, ArraySpec, ModelSpec, Step
from .layers import HIDDEN, WHOLE

NAME = "prompt_embeds"  # in StepInput.extra: [T, E]; read only where an id is negative
NO_ID = -1  # what rows["tokens"] holds there


def with_prompt_embeds(model: ModelSpec) -> ModelSpec:
    """The model, which then takes given rows instead of those of its table."""
    row = ArraySpec((hidden_size(model),), (None,), "float32")
    return replace(model, embed=partial(embed, table=model.embed), extra={**model.extra, NAME: row})


def hidden_size(model: ModelSpec) -> int:
    return model.weights["final_norm"].shape[0]


def embed(w: dict, step: Step, ops: Any, *, table: Callable[..., Array]) -> Array:
    xp, ids_T = ops.xp, step.token_ids_T
    x_TE = table(w, replace(step, token_ids_T=xp.where(ids_T < 0, 0, ids_T)), ops)
    if NAME not in step.extra:
        return x_TE
    given_TE = xp.astype(ops.constrain(step.extra[NAME], WHOLE, HIDDEN), x_TE.dtype)
    return xp.where(ops.constrain((ids_T < 0)[:, None], WHOLE, HIDDEN), given_TE, x_TE)
