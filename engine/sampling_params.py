"""What a user may ask of one request, checked. Names and defaults are vLLM's."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any

from ..models.logit_edits import MAX_STOP_IDS
from ..models.sampling import PARAMS
from .checks import check_names, choice, flag, integer, number, sequence
from .edits import checked_edits
from .logprob_params import checked_logprobs, resolved_logprobs
from .repetition import checked_repetition
from .structured_output_params import StructuredOutputsParams

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # temperatures under it mean greedy
MIN_TEMPERATURE = 0.01  # smaller ones overflow what follows, and are raised to it
MAX_N = 16384
HINTS = {
    "max_new_tokens": "it is called max_tokens here",
    "sampling_seed": "it is called seed here",
    "best_of": "it is gone; use n",
    "use_beam_search": "it is gone; use LLM.beam_search",
    "guided_decoding": "it is called structured_outputs now",
    "guided_json": "it is structured_outputs={'json': ...} now",
    "guided_regex": "it is structured_outputs={'regex': ...} now",
    "guided_choice": "it is structured_outputs={'choice': ...} now",
    "guided_grammar": "it is structured_outputs={'grammar': ...} now",
    "guided_json_object": "it is structured_outputs={'json_object': True} now",
    "logits_processors": "give them to LLM(logits_processors=...) and select them by extra_args",
}


class RequestOutputKind(Enum):
    """What the outputs of LLM.step and AsyncLLM hold: all so far, what is new, or there is only one, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class NotYet:
    """Parameters that are known, and not yet honoured: anything but the default is refused."""

    thinking_token_budget: int | None = None
    watermarking: Any = None
    trace_decode_token_ids: Sequence[int] | None = None
    routed_experts_prompt_start: int | None = None


NOT_YET = {f.name: f.default for f in fields(NotYet)}


@dataclass(frozen=True, kw_only=True)
class SamplingParams(NotYet):
    """How one request is sampled, when it stops, and what it returns.

    Normalised: `stop`, `bad_words` and the lists of ids are tuples without repetition, `seed` -1 is None, `top_k` -1
    is 0, temperatures under 1e-5 are 0 (greedy, without truncation), and those under 0.01 are raised to it.

    Raises ValueError for a value out of range, UnknownArgumentError for an unknown name, NotImplementedError for a
    field of NotYet that is set to anything but its default.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the engine
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None  # {name of a logits processor: {its parameter: value}}
    max_tokens: int | None = 16  # None: as many as max_model_len leaves room for
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_detection: Mapping[str, int] | None = None  # ends an output that repeats itself: repetition.py
    logprobs: int | None = None  # how many of the most likely beside the sampled one; -1: the whole vocabulary
    logprob_token_ids: Sequence[int] | None = None  # ids whose logprobs come too; at most 128
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    prompt_logprob_start: int | None = None  # from the token behind this place on
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None  # a list of ids for each of these
    flat_logprobs: bool = False  # FlatLogprobs in place of lists of dicts
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt; -1: those that leave max_tokens room
    truncation_side: str = "left"  # where a prompt is cut: left keeps its end, right its beginning
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens from one output to the next; None: the engine's
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None  # the form an output must have
    # compute the whole prompt; what is computed may still be reused. None: with logprobs of the whole prompt
    skip_reading_prefix_cache: bool | None = None

    def __new__(cls, **names: Any) -> SamplingParams:
        if not names.keys() <= DEFAULTS.keys():
            check_names("sampling parameter", names, (f.name for f in fields(cls)), HINTS)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_supported()
        # defaults need no check, and a benchmark makes a thousand of these
        given = {name for name, value in vars(self).items() if value is not DEFAULTS.get(name, MISSING)}
        for check, names in CHECKS:
            if not names.isdisjoint(given):
                vars(self).update(check(self))
        vars(self).update(checked_logprobs(self))
        if self.structured_outputs is not None:
            vars(self)["structured_outputs"] = _form(self)
        if self.temperature == 0:
            vars(self).update(top_p=1.0, top_k=0, min_p=0.0)
            if self.n > 1:
                raise ValueError(f"n {self.n} at temperature 0: greedy samples would all be equal, so n must be 1")

    def _check_supported(self) -> None:
        for name, default in NOT_YET.items():
            value = getattr(self, name)
            if value != default:
                raise NotImplementedError(f"sampling parameter {name}={value!r} is not supported yet")

    @property
    def variant(self) -> str:
        """The smallest head (of sampling.VARIANTS) that can serve this request."""
        if self.extra_args:
            return "processors"
        if (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0):
            return "penalties"
        if (
            self.min_tokens
            or self.allowed_token_ids
            or self.logit_bias
            or self.bad_words
            or self.structured_outputs is not None
        ):
            return "edits"
        if (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            return "truncate"
        return "sample" if self.temperature else "greedy"

    @property
    def num_logprobs(self) -> int:
        """How many top logprobs the device returns; -1: none. Only a resolved value can mean the whole vocabulary."""
        if self.logprobs is None:
            return 0 if self.logprob_token_ids else -1
        if self.logprobs == -1:
            raise ValueError("logprobs -1 is the whole vocabulary, whose size only resolve() knows")
        return self.logprobs

    def row(self) -> tuple[float, ...]:
        """What the device keeps of it, in the order of sampling.PARAMS."""
        return tuple(float(getattr(self, name)) for name in PARAMS)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def resolve(
        self, vocab_size: int, max_logprobs: int, *, has_tokenizer: bool = True, eos_ids: Collection[int] = ()
    ) -> SamplingParams:
        """The same as one engine understands it: logprobs -1 becomes vocab_size, no tokenizer means no text.

        Raises ValueError for what this engine cannot serve. max_logprobs -1 allows the whole vocabulary.
        """
        wrong = [i for i in self.stop_token_ids if i >= vocab_size]
        if wrong:
            raise ValueError(f"stop_token_ids {wrong} are outside the vocabulary, 0 to {vocab_size - 1}")
        count = len({*self.stop_token_ids, *eos_ids})
        if self.min_tokens and count > MAX_STOP_IDS:
            raise ValueError(f"min_tokens can hold back {MAX_STOP_IDS} stop ids, end-of-text included, not {count}")
        if self.stop and not has_tokenizer:
            raise ValueError(f"stop {list(self.stop)} needs a tokenizer, and the engine has none (skip_tokenizer_init)")
        counts = resolved_logprobs(self, vocab_size, max_logprobs)
        # more than all is all; the device keeps it as a float
        top_k = 0 if self.top_k >= vocab_size else self.top_k
        changes = counts | {"top_k": top_k, "detokenize": self.detokenize and has_tokenizer}
        resolved = copy(self)
        # as legal as they were: there is nothing to check again
        vars(resolved).update(changes)
        return resolved


def request_key(seed: int, index: int = 0) -> tuple[int, int]:
    """The random stream of the index-th of n samples: two words as int32. Sample i of seed s is sample 0 of s + i."""
    digest = hashlib.sha256(f"{seed + index}".encode()).digest()
    return _word(digest[:4]), _word(digest[4:8])


def _word(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _randomness(p: SamplingParams) -> dict[str, Any]:
    """The fields that say how a token is drawn, checked and normalised."""
    temperature = number("temperature", p.temperature, 0, 2)
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    elif temperature < MIN_TEMPERATURE:
        log.warning("temperature %g is raised to %g: smaller ones are not stable", temperature, MIN_TEMPERATURE)
        temperature = MIN_TEMPERATURE
    seed = None if p.seed is None else integer("seed", p.seed, -(2**63), 2**63 - 1)
    return {
        "n": integer("n", p.n, 1, MAX_N),
        "temperature": temperature,
        "top_p": number("top_p", p.top_p, 0, 1, open_low=True),
        "top_k": max(0, integer("top_k", p.top_k, -1, math.inf)),
        "min_p": number("min_p", p.min_p, 0, 1),
        "seed": None if seed == -1 else seed,
    }


def _stopping(p: SamplingParams) -> dict[str, Any]:
    """The fields that say when a request ends."""
    max_tokens = None if p.max_tokens is None else integer("max_tokens", p.max_tokens, 1, math.inf)
    stop = sequence("stop", (p.stop,) if isinstance(p.stop, str) else p.stop)
    for s in stop:
        if not isinstance(s, str) or not s:
            raise ValueError(f"stop {s!r} is not a string of at least one character")
    if stop and not p.detokenize:
        raise ValueError(f"stop {list(stop)} is looked for in text, and detokenize is False")
    ids = sequence("stop_token_ids", p.stop_token_ids)
    return {
        "max_tokens": max_tokens,
        "min_tokens": integer("min_tokens", p.min_tokens, 0, math.inf if max_tokens is None else max_tokens),
        "stop": tuple(dict.fromkeys(stop)),
        "stop_token_ids": tuple(dict.fromkeys(integer("stop_token_ids", i, 0, math.inf) for i in ids)),
        "ignore_eos": flag("ignore_eos", p.ignore_eos),
        "repetition_detection": checked_repetition(p.repetition_detection),
    }


def _prompt_length(p: SamplingParams) -> dict[str, Any]:
    """The fields that cut a long prompt."""
    keep = p.truncate_prompt_tokens
    if keep is not None and integer("truncate_prompt_tokens", keep, -1, math.inf) == 0:
        raise ValueError("truncate_prompt_tokens 0 leaves no prompt: keep at least 1 token, or -1 for all that fit")
    return {"truncation_side": choice("truncation_side", p.truncation_side, ("left", "right"))}


def _form(p: SamplingParams) -> StructuredOutputsParams:
    if p.ignore_eos:
        raise ValueError("ignore_eos with structured_outputs: only end-of-text can follow an output that is complete")
    return StructuredOutputsParams.of(p.structured_outputs)


def _returning(p: SamplingParams) -> dict[str, Any]:
    """The fields that say what comes back."""
    flags = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    return {
        "output_kind": _kind(p.output_kind),
        "stream_interval": None if p.stream_interval is None else integer("stream_interval", p.stream_interval, 1),
    } | {name: flag(name, getattr(p, name)) for name in flags}


def _kind(value: Any) -> RequestOutputKind:
    """A kind, or the number of one."""
    if isinstance(value, RequestOutputKind):
        return value
    if value not in [k.value for k in RequestOutputKind] or isinstance(value, bool):
        raise ValueError(
            f"output_kind {value!r} is not RequestOutputKind.{', '.join(k.name for k in RequestOutputKind)}"
        )
    return RequestOutputKind(value)


DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}
# what checks and normalises fields, in this order, with the fields that it looks at
CHECKS: tuple[tuple[Callable[[SamplingParams], dict[str, Any]], frozenset[str]], ...] = tuple(
    (check, frozenset(names.split()))
    for check, names in (
        (_stopping, "max_tokens min_tokens stop stop_token_ids ignore_eos repetition_detection detokenize"),
        (_randomness, "n temperature top_p top_k min_p seed"),
        (
            checked_edits,
            "presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids bad_words extra_args",
        ),
        (
            _returning,
            "output_kind stream_interval detokenize skip_special_tokens spaces_between_special_tokens "
            "include_stop_str_in_output",
        ),
        (_prompt_length, "truncate_prompt_tokens truncation_side"),
    )
)
