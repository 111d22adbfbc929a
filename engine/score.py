"""How likely given continuations are: their logprobs behind a prompt, each token fed as it is said to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .computed import compute
from .detokenizer import token_text
from .prompts import list_of_prompts, salt_of, token_ids_of
from .reads import Wanted

if TYPE_CHECKING:
    from .llm import LLM

Continuation = str | Sequence[int]
FORMS = "a string or a list of token ids, of at least one token"


@dataclass(frozen=True)
class ScoreOutput:
    """One continuation of one prompt: natural logarithms of its tokens' raw probabilities, and their ranks from 1."""

    prompt_token_ids: Sequence[int] = field(repr=False)
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    decoded_tokens: Sequence[str] | None = None  # None: there is no tokenizer

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum of its tokens'."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is more likely than all others, so that greedy decoding says it. A tie is none."""
        return all(rank == 1 for rank in self.ranks)


def score(llm: LLM, prompts: Any, continuations: Any, use_tqdm: bool) -> list[list[ScoreOutput]]:
    """What LLM.score says."""
    if llm.config.logprobs_mode.endswith("logits"):
        raise ValueError(
            f"logprobs_mode {llm.config.logprobs_mode!r}: scores are logprobs, and this engine makes logits"
        )
    prompts = list_of_prompts(prompts)
    asked = _continuations(prompts, continuations)
    ids = [token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size) for prompt in prompts]
    pairs = [(i, _token_ids(llm, c, i)) for i, several in enumerate(asked) for c in several]
    whole, wanted = [], []
    for i, continuation in pairs:
        start, salt = len(ids[i]), salt_of(prompts[i], None)
        # the last token is not computed: nothing is asked of what comes behind it
        known = {"prompt_token_ids": [*ids[i], *continuation[:-1]]}
        whole.append(known if salt is None else known | {"cache_salt": salt})
        wanted.append(Wanted(start - 1, start - 1 + len(continuation), targets=tuple(continuation)))
        _check_length(llm, start, len(continuation))
    scores: list[list[ScoreOutput]] = [[] for _ in prompts]
    for (i, continuation), parts in zip(pairs, compute(llm, whole, wanted, use_tqdm), strict=True):
        logprobs = [float(x) for part in parts if part.logprobs is not None for x in part.logprobs]
        ranks = [int(x) for part in parts if part.ranks is not None for x in part.ranks]
        scores[i].append(ScoreOutput(ids[i], continuation, logprobs, ranks, _decoded(llm, ids[i], continuation)))
    return scores


def _continuations(prompts: Sequence[Any], given: Any) -> list[list[Continuation]]:
    """A list of continuations for each prompt."""
    if len(prompts) == 1 and (_is_one(given) or (isinstance(given, Sequence) and all(map(_is_one, given)))):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(given) != len(prompts):
        raise ValueError(
            f"{len(given) if isinstance(given, Sequence) else given!r} continuations for {len(prompts)} prompts: "
            "give a continuation, or a list of them, for each prompt"
        )
    several = [[each] if _is_one(each) else each for each in given]
    for each in several:
        if not isinstance(each, Sequence) or not each or not all(map(_is_one, each)):
            raise ValueError(f"continuations {each!r}: a continuation is {FORMS}")
    return [list(each) for each in several]


def _is_one(x: Any) -> bool:
    """Whether this is one continuation: text, or a list that begins with a token id."""
    return isinstance(x, str) or (isinstance(x, Sequence) and bool(x) and isinstance(x[0], Integral))


def _token_ids(llm: LLM, continuation: Any, i: int) -> list[int]:
    """Text is encoded apart from the prompt and without special tokens, so that all continue the same tokens."""
    if isinstance(continuation, str):
        continuation = llm.get_tokenizer().encode(continuation, add_special_tokens=False)
        if not continuation:
            raise ValueError(f"a continuation of prompt {i} has no token: it is {FORMS}")
    return token_ids_of({"prompt_token_ids": continuation}, llm.tokenizer, llm.model.vocab_size)


def _check_length(llm: LLM, prompt: int, continuation: int) -> None:
    longest = llm.scheduler.config.max_model_len
    if prompt + continuation > longest + 1:
        raise ValueError(
            f"a prompt of {prompt} tokens and a continuation of {continuation} are longer than max_model_len {longest} "
            "and one token more, which need not be computed"
        )


def _decoded(llm: LLM, prompt: Sequence[int], continuation: Sequence[int]) -> list[str] | None:
    if llm.tokenizer is None:
        return None
    pieces, ids = llm.tokenizer.pieces, [*prompt[-4:], *continuation]
    first = len(ids) - len(continuation)
    return [token_text(pieces, ids[max(0, n - 4) : n], ids[n]) for n in range(first, len(ids))]
