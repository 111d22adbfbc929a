"""Beam search: the likeliest continuations, found by widening the best few one token at a time.

Each round is one generate() of one-token requests, all beams of all prompts together. A beam's request finds all but
its last block in the prefix cache, where its parent left it: a round computes at most block_size tokens a beam, and
the prompt is computed once. Without prefix caching every round computes every beam anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ..models.keeps import keeps_of
from .checks import check_names, flag, integer, number
from .outputs import Logprob, RequestOutput
from .progress import Progress
from .prompts import Prompt, list_of_prompts, salt_of, token_ids_of
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .llm import LLM


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What a beam search is to find; names and defaults are vLLM's.

    A sequence of n output tokens, its end-of-text counted, scores cumulative logprob / n ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the end-of-text token in `tokens` and `text`

    def __new__(cls, **names: Any) -> BeamSearchParams:
        check_names("beam search parameter", names, (f.name for f in fields(cls)), {"n": "it is called beam_width"})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1)
        integer("max_tokens", self.max_tokens, 1)
        number("length_penalty", self.length_penalty, -100, 100)
        flag("ignore_eos", self.ignore_eos)
        flag("include_stop_str_in_output", self.include_stop_str_in_output)
        if number("temperature", self.temperature, 0, 2) != 0:
            raise ValueError(f"temperature {self.temperature}: beams are ranked by the model's own logprobs, give 0")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One of the sequences found. `tokens` and `text` begin with the prompt, as in vLLM; `logprobs` do not.

    An end-of-text token counts in `cum_logprob`, `score` and `logprobs` also where it is left out of `tokens`.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    logprobs: list[dict[int, Logprob]]
    num_prompt_tokens: int
    text: str | None  # None: there is no tokenizer
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None = None  # the id that ended it

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True)
class BeamSearchOutput:
    """What was found behind one prompt, the best first: at most beam_width sequences."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)


class Beam(NamedTuple):
    """A sequence in the making."""

    tokens: list[int]
    logprob: float
    entries: tuple[dict[int, Logprob], ...] = ()
    end: int | None = None  # the end-of-text id that it ends with


class Search:
    """The beams behind one prompt."""

    def __init__(
        self, prompt: Sequence[int], salt: str | None, params: BeamSearchParams, limit: int, eos_ids: frozenset[int]
    ):
        self.prompt, self.salt, self.params, self.limit = list(prompt), salt, params, limit
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.live = [Beam(self.prompt, 0.0)]
        self.done: list[Beam] = []

    def prompts(self) -> list[Prompt]:
        """What the engine is to continue by one token."""
        salt = {} if self.salt is None else {"cache_salt": self.salt}
        return [{"prompt_token_ids": beam.tokens} | salt for beam in self.live]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Takes in a token's logprobs behind each live beam, and keeps the best."""
        grown: list[Beam] = []
        for beam, output in zip(self.live, outputs, strict=True):
            entries = output.outputs[0].logprobs
            assert entries is not None
            (entry,) = entries
            for token, found in entry.items():
                child = Beam([*beam.tokens, token], beam.logprob + found.logprob, (*beam.entries, entry))
                if token in self.eos_ids:
                    self.done.append(child._replace(end=token))
                else:
                    grown.append(child)
        width = self.params.beam_width
        self.done = sorted(self.done, key=self.score, reverse=True)[:width]
        # all are equally long, so the likeliest score best
        self.live = sorted(grown, key=lambda beam: beam.logprob, reverse=True)[:width]
        if self._length(self.live[0]) == self.limit:
            self.done, self.live = sorted(self.done + self.live, key=self.score, reverse=True)[:width], []
        elif self._is_decided():
            self.live = []

    def _is_decided(self) -> bool:
        """Whether no beam can still beat what is done: its logprob only falls, whatever its length will be."""
        if len(self.done) < self.params.beam_width:
            return False
        best, penalty = self.live[0], self.params.length_penalty
        length = self.limit if penalty > 0 else self._length(best) + 1
        return self.score(self.done[-1]) >= best.logprob / length**penalty

    def _length(self, beam: Beam) -> int:
        return len(beam.tokens) - len(self.prompt)

    def score(self, beam: Beam) -> float:
        return beam.logprob / self._length(beam) ** self.params.length_penalty

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        return BeamSearchOutput(self.prompt, [self._sequence(beam, tokenizer) for beam in self.done])

    def _sequence(self, beam: Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
        cut = beam.end is not None and not self.params.include_stop_str_in_output
        tokens = beam.tokens[:-1] if cut else beam.tokens
        return BeamSearchSequence(
            tokens=tokens,
            cum_logprob=beam.logprob,
            score=self.score(beam),
            logprobs=list(beam.entries),
            num_prompt_tokens=len(self.prompt),
            text=None if tokenizer is None else tokenizer.decode(tokens),
            finish_reason="length" if beam.end is None else "stop",
            stop_reason=beam.end,
        )


def step_params(
    params: BeamSearchParams, eos_ids: frozenset[int], vocab_size: int, max_logprobs: int
) -> SamplingParams:
    """What each round asks of the engine: the likeliest 2 * beam_width tokens, enough to go on beside end-of-text.

    Raises ValueError where max_logprobs forbids that.
    """
    width = params.beam_width
    wanted = min(max(2 * width, width + len(eos_ids)), vocab_size)
    if max_logprobs != -1 and wanted > max_logprobs:
        raise ValueError(f"beam_width {width} needs {wanted} logprobs a step: max_logprobs is {max_logprobs}")
    return SamplingParams(temperature=0, max_tokens=1, logprobs=wanted, detokenize=False, ignore_eos=True)


def beam_search(
    llm: LLM, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = False, concurrency_limit: int | None = None
) -> list[BeamSearchOutput]:
    """The beams behind each prompt, in order; `concurrency_limit` is how many prompts are searched at a time."""
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params {params!r} is not a BeamSearchParams")
    if llm.config.logprobs_mode.endswith("logits"):
        raise ValueError(
            f"logprobs_mode {llm.config.logprobs_mode!r}: beams are ranked by logprobs, and this engine makes logits"
        )
    if keeps_of(llm.layout).budget is not None:
        raise NotImplementedError(f"beam_search with layout {llm.layout!r}: every round makes a beam's tokens prompt")
    prompts = list_of_prompts(prompts)
    searches = [_search(llm, prompt, params) for prompt in prompts]
    each_step = step_params(params, llm.eos_ids, llm.model.vocab_size, llm.config.max_logprobs)
    at_once = len(prompts) if concurrency_limit is None else integer("concurrency_limit", concurrency_limit, 1)
    with Progress(len(searches), use_tqdm) as bar:
        for start in range(0, len(searches), max(at_once, 1)):
            running = searches[start : start + at_once]
            while running:
                _advance(llm, running, each_step)
                left = [search for search in running if search.live]
                bar.advance(sum(len(search.live) for search in left), len(running) - len(left))
                running = left
    return [search.output(llm.tokenizer) for search in searches]


def _search(llm: LLM, prompt: Prompt, params: BeamSearchParams) -> Search:
    ids, longest = token_ids_of(prompt, llm.tokenizer, llm.model.vocab_size), llm.scheduler.config.max_model_len
    if len(ids) >= longest:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for output: max_model_len is {longest}")
    limit = min(params.max_tokens, longest - len(ids))
    return Search(ids, salt_of(prompt, None), params, limit, llm.eos_ids)


def _advance(llm: LLM, searches: Sequence[Search], params: SamplingParams) -> None:
    """One round, of all beams of these prompts together."""
    prompts = [search.prompts() for search in searches]
    made = llm.generate([prompt for each in prompts for prompt in each], params, use_tqdm=False)
    if lost := [output.request_id for output in made if output.outputs[0].finish_reason != "length"]:
        raise RuntimeError(f"requests {', '.join(lost)} were ended by another call, or by its step that failed")
    outputs = iter(made)
    for search, each in zip(searches, prompts, strict=True):
        search.advance([next(outputs) for _ in each])
