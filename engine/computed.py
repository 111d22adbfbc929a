"""Prompts that are computed and read, and after which no token is sampled: what scoring and embedding are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output_processor import Member
from .prompts import Prompt, salt_of, token_ids_of
from .read_head import ReadResult
from .reads import Wanted
from .request import Request
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .llm import LLM

NOTHING_SAMPLED = SamplingParams(temperature=0)


def compute(
    llm: LLM, prompts: Sequence[Prompt], wanted: Sequence[Wanted], use_tqdm: bool = True
) -> list[list[ReadResult]]:
    """What is wanted of each prompt: its parts in the order of places, of which each is there once."""
    return [m.reads for m in compute_members(llm, prompts, wanted, use_tqdm)]


def compute_members(
    llm: LLM, prompts: Sequence[Prompt], wanted: Sequence[Wanted], use_tqdm: bool = True
) -> list[Member]:
    """The computed request of each prompt, with what was read of it.

    All are checked before the first runs. Prompts that begin alike share that part, as far as nothing of it is wanted.
    Raises ValueError for what can never be served, RuntimeError if a step fails that another call runs.
    """
    names = [llm._next_id() for _ in prompts]
    requests = [computed_only(llm, *each) for each in zip(names, prompts, wanted, strict=True)]
    for r in requests:
        llm.scheduler.check(r)
    try:
        families = [llm._admit(r.id, [r], prompt) for r, prompt in zip(requests, prompts, strict=True)]
        members = [family.members[0] for family in families]
        llm._run(families, use_tqdm)
    finally:
        llm.abort(names)
    if lost := [r.id for r in requests if r.finish_reason != "stop"]:
        raise RuntimeError(f"requests {', '.join(lost)} were ended by another call, or by its step that failed")
    return members


def computed_only(llm: LLM, name: str, prompt: Prompt, wanted: Wanted) -> Request:
    """The request, not queued yet."""
    ids = token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size)
    return Request(name, ids, NOTHING_SAMPLED, cache_salt=salt_of(prompt, None), samples=False, wanted=wanted)
