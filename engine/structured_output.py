"""Grammars of requests: compiled aside, one state a request, and masks that leave the head only legal tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .batch import all_allowed, allow
from .grammar_compiler import GIB, Compilation, GrammarCompiler, Limits
from .grammar_worker import Vocabulary, grammar_library, message_of
from .plan import Plan
from .request import Request
from .sampling_params import SamplingParams
from .structured_output_params import StructuredOutputsParams
from .tokenizer import Tokenizer

POLL_SECONDS = 0.02  # how long a step waits for a grammar when there is nothing else to do


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """What an engine does for structured output, made from the engine argument structured_outputs_config."""

    limits: Limits
    compact: bool
    closed: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> StructuredOutputsConfig:
        """From a checked config: arguments.structured_outputs_config says what may be in it."""
        limits = Limits(
            seconds=config["compile_timeout"],
            memory=int(config["compile_memory_gb"] * GIB),
            workers=config["compile_workers"],
            cached=config["cache_size"],
        )
        return StructuredOutputsConfig(
            limits, config["disable_any_whitespace"], config["disable_additional_properties"]
        )


class Grammar:
    """Where one output stands in its grammar. `matcher` is the request's own."""

    def __init__(self, matcher: Any, ends: Collection[int], eos: int):
        self.matcher, self.eos = matcher, eos
        # the library knows the model's ends; a request may have more
        self.ends = tuple(ends)
        self.error: str | None = None

    def take(self, token: int) -> bool:
        """Goes on by a token that was sampled; False if it was not legal, and `error` then says why."""
        if token in self.ends and self.matcher.is_accepting():
            return True
        if not self.matcher.consume_token(token):
            self.error = f"no legal token was left to sample: {message_of(self.matcher)}"
        return self.error is None

    def fill(self, mask_W: np.ndarray) -> bool:
        """Writes the legal tokens into a row of a mask; False if the grammar cannot go on."""
        self.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self.matcher.is_error():
            self.error = f"the grammar became too complex: {message_of(self.matcher)}"
            return False
        allow(mask_W, self.ends, self.eos)
        return True


class StructuredOutput:
    """What an engine keeps of requests whose output must have a form. It works only under the engine's lock."""

    def __init__(
        self,
        config: StructuredOutputsConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_ids: Collection[int],
    ):
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.eos_ids = sorted(eos_ids)
        self.compiler: GrammarCompiler | None = None
        self.compiling: dict[Request, Compilation] = {}
        self.alive: dict[str, Request] = {}
        # requests that can go on no longer, until `take_failed`
        self.failed: list[Request] = []

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError if this engine cannot give an output a form."""
        if params.structured_outputs is None:
            return
        if self.tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the engine has none (skip_tokenizer_init)")
        if not self.eos_ids:
            raise ValueError("structured_outputs needs an end-of-text token, and neither tokenizer nor model names one")
        if grammar_library() is None:
            raise ValueError("structured_outputs needs llguidance: pip install 'octavo[grammar]'")

    def start(self, request: Request) -> None:
        """Begins to compile the request's grammar, if it has one; the scheduler is to set the request aside."""
        if request.params.structured_outputs is None:
            return
        params = StructuredOutputsParams.of(request.params.structured_outputs)
        if self.compiler is None:
            self.compiler = GrammarCompiler(self._vocabulary, self.config.limits)
        compilation = self.compiler.compile(params.source(compact=self.config.compact, closed=self.config.closed))
        request.compiling = True
        self.alive[request.id] = request
        self.compiling[request] = compilation

    def take_ready(self) -> list[Request]:
        """Requests whose grammar has been compiled since the last call. Those with a wrong one become `failed`."""
        if not self.compiling:
            return []
        assert self.compiler is not None
        self.compiler.wake.clear()
        ended = [r for r, compilation in self.compiling.items() if compilation.done or r.finish_reason]
        ready = []
        for r in ended:
            compilation = self.compiling.pop(r)
            if r.finish_reason is not None:
                continue
            if compilation.error is not None:
                self._fail(r, f"structured_outputs: {compilation.error}")
                continue
            r.grammar = Grammar(compilation.matcher.deep_copy(), r.params.stop_token_ids, self.eos_ids[0])
            ready.append(r)
        return ready

    def wait(self) -> None:
        """Waits a little for a grammar to be compiled; for a step that has nothing to do before."""
        if self.compiling and self.compiler is not None:
            self.compiler.wake.wait(POLL_SECONDS)

    def take_tokens(self, requests: list[Request]) -> list[Request]:
        """Lets grammars go on by the last token of each request. Returns the requests without those that fail.

        An illegal token is taken back: it comes where other parameters forbid all that the grammar allows.
        """
        if not self.alive:
            return requests
        for r in requests:
            if r.grammar is not None and r.samples and not r.grammar.take(r.tokens[-1]):
                r.tokens.pop()
                self._fail(r, r.grammar.error)
        return [r for r in requests if r.error is None] if self.failed else requests

    def is_late(self, plan: Plan) -> bool:
        """Whether the mask of a plan must wait for tokens that are not read yet."""
        return any(r.in_flight > 1 for r in self._of(plan) if r is not None)

    def mask(self, plan: Plan) -> np.ndarray | None:
        """int32 [sampled chunks, W], as the head wants it; None if no chunk has a grammar."""
        requests = self._of(plan)
        if not any(requests):
            return None
        mask_RW = all_allowed(len(requests), self.vocab_size)
        for i, r in enumerate(requests):
            # one that has ended since, or is about to, is sampled for nobody
            if r is None or r.grammar is None or r.finish_reason is not None or r.error is not None:
                continue
            if not r.grammar.fill(mask_RW[i]):
                mask_RW[i] = -1
                self._fail(r, r.grammar.error)
        return mask_RW

    def take_failed(self) -> list[Request]:
        """Requests that must end with an error since the last call; `request.error` says what it is."""
        failed, self.failed = self.failed, []
        return failed

    def forget_ended(self) -> None:
        """Forgets requests that have ended. Compiled grammars stay."""
        self.compiling = {r: compilation for r, compilation in self.compiling.items() if r.finish_reason is None}
        self.alive = {name: r for name, r in self.alive.items() if r.finish_reason is None}
        self.failed = [r for r in self.failed if r.finish_reason is None]

    def _of(self, plan: Plan) -> list[Request | None]:
        """The requests with a grammar among a plan's sampled chunks, in their order; None for the others."""
        if not self.alive:
            return []
        for name in [name for name, r in self.alive.items() if r.finish_reason is not None]:
            del self.alive[name]
        return [self.alive.get(chunk.request_id) for chunk in plan.sampled]

    def _fail(self, request: Request, error: str | None) -> None:
        request.error = error
        self.failed.append(request)

    def _vocabulary(self) -> Vocabulary:
        """What the grammar library must know of the tokenizer, padded to the model's vocabulary."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        return vocabulary_of(tokenizer, self.vocab_size, self.eos_ids)


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Vocabulary:
    """The tokens of a vocabulary of `size` ids. One that stands for nothing is never legal."""
    special = dict(zip(tokenizer.all_special_tokens, sorted(tokenizer.special_ids)))
    special = {text: i for text, i in special.items() if i < size}
    return Vocabulary([tokenizer.token_bytes(i) for i in range(size)], special, [i for i in ends if i < size])
