"""Which of our guarantees hold on this machine for one backend: golden traces, and an engine held against itself.

Tokens are compared up to the first tie: a place where the next best token is nearer than rounding may turn. Behind it
a sequence may go on otherwise.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ..llm import LLM
from ..plan import Reason
from ..replica import check_alone
from ..runner import StepResult
from ..step_log import Entry, read_log
from ..user_code import function_in_file
from .replaying import TOLERANCE, Teller, compare_steps
from .rerun import quiet
from .subjects import check_name, is_users
from .trace import Asked, Stream, Trace, read_trace_file, with_logprobs

Make = Callable[..., LLM]
NUM_TOP = 5  # likeliest tokens whose logprobs a trace has
SMALL_STEP = 16  # tokens of a step when chunks are to be small


@dataclass(frozen=True)
class Guarantee:
    """One promise, whether it held, and by what that is known."""

    name: str
    held: bool
    evidence: str


@dataclass(frozen=True)
class Sample:
    """One stream of a run."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


Samples = dict[str, Sample]  # by "request" or "request/sample"


@dataclass
class Watched:
    """An engine, and how often its plans gave each reason."""

    llm: LLM
    reasons: Counter[Reason]


def certify(
    backend: str = "auto",
    *,
    model: Any = None,
    weights: Any = None,
    trace: Trace | str | Path | None = None,
    **arguments: Any,
) -> list[Guarantee]:
    """Runs a golden trace (the shipped one: SmolLM2) on a backend, and says which guarantees hold.

    `backend` is a name, backend:attention, or FILE.py:NAME, a function that is given make(name, **arguments) -> LLM and
    returns an LLM. `model` takes the place of the trace's. Raises ValueError for a name that nobody knows.
    """
    golden = trace if isinstance(trace, Trace) else read_trace_file(trace) if trace else read_trace_file()
    make = _maker(backend, golden.model if model is None else model, weights, arguments)
    return list(_Certifier(golden, make).run())


def _maker(backend: str, model: Any, weights: Any, arguments: dict[str, Any]) -> Make:
    def make_named(name: str, **options: Any) -> LLM:
        library, _, attention = name.partition(":")
        named = {"backend": library, "attention": attention or "auto"}
        return LLM(model, weights=weights, **named | options | arguments)

    if not is_users(backend):
        if backend != "auto":
            check_name(backend)
        return lambda **options: make_named(backend, **options)
    users = function_in_file(backend)
    return lambda **options: users(lambda name, **changes: make_named(name, **options | changes))


class _Certifier:
    """One trace and the engines it is run on."""

    def __init__(self, trace: Trace, make: Make):
        self.trace, self.make = trace, make
        self.plenty = {k: v for k, v in trace.options.items() if k != "num_gpu_blocks_override"}
        self.ids = count()

    def run(self) -> Iterable[Guarantee]:
        small = self._engine(**self.trace.options)
        self.dtype = small.llm.config.dtype
        self.tolerance = TOLERANCE[self.dtype]
        yield from self._golden_steps(small.llm)
        preempted = self._all(small)
        del small.llm
        main = self._engine(**self.plenty, warmup="all")
        compiled = main.llm.backend.num_compiles()
        together, before = self._all(main), main.llm.scheduler.num_hit_tokens
        again = self._all(main, forget=False)
        hits = main.llm.scheduler.num_hit_tokens - before
        alone = self._alone(main)
        yield self._golden_run(together)
        yield self._same("batch invariance", together, alone, "each request alone")
        yield self._same("prefix-hit invariance", alone, again, f"{hits} tokens from the cache, or none", hits > 0)
        main.llm.set_limits(None, SMALL_STEP)
        chunks = self._all(main)
        yield self._same("chunking invariance", together, chunks, f"steps of {SMALL_STEP} tokens")
        num_preempted = small.reasons[Reason.PREEMPTED]
        yield self._same(
            "preemption invariance", together, preempted, f"{num_preempted} preemptions", num_preempted > 0
        )
        yield self._forks(main.reasons[Reason.FORKED], together)
        yield self._compiles(main.llm, compiled)
        del main.llm
        yield from self._logged(together)

    def _engine(self, **options: Any) -> Watched:
        """An engine whose plans are counted."""
        llm = self.make(skip_tokenizer_init=True, **options)
        check_alone(llm)
        reasons: Counter[Reason] = Counter()
        schedule = llm.scheduler.schedule

        def watched() -> Any:
            plan = schedule()
            reasons.update(code for _, code in plan.reasons) if plan else None
            return plan

        llm.scheduler.schedule = watched
        return Watched(llm, reasons)

    def _all(self, watched: Watched, *, forget: bool = True) -> Samples:
        """What comes of all requests at once, from an empty cache unless told otherwise."""
        if forget:
            watched.llm.reset_prefix_cache()
        return self._run(watched.llm, self.trace.requests)

    def _alone(self, watched: Watched) -> Samples:
        """What comes of each request on its own."""
        found: Samples = {}
        for request in self.trace.requests:
            watched.llm.reset_prefix_cache()
            found |= self._run(watched.llm, [request])
        return found

    def _run(self, llm: LLM, requests: Sequence[Asked]) -> Samples:
        prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
        params = [r.sampling_params(logprobs=0, detokenize=False) for r in requests]
        with quiet():
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found = {}
        for request, output in zip(requests, outputs, strict=True):
            for name, sample in zip(request.names(), output.outputs, strict=True):
                ids = tuple(sample.token_ids)
                logprobs = tuple(at[i].logprob for i, at in zip(ids, sample.logprobs or [], strict=True))
                found[name] = Sample(ids, logprobs)
        return found

    def _golden_steps(self, llm: LLM) -> Iterable[Guarantee]:
        """The trace's own plans, each step told the golden tokens: tokens and logprobs of every step."""
        streams, teller = self.trace.streams(), Teller(llm.runner)
        wrong, ties, worst, counted = Counter[str](), Counter[str](), 0.0, Counter[str]()
        first: dict[str, str] = {}
        for plan in self.trace.plans:
            result = llm.runner.launch(with_logprobs(plan, NUM_TOP)).result()
            golden = []
            for row, chunk in enumerate(plan.sampled):
                request, stream = streams[chunk.request_id]
                j = chunk.start + chunk.num_tokens - len(request.prompt_token_ids)
                kind = "greedy" if request.sampling_params().temperature == 0 else "seeded"
                golden.append(stream.tokens[j])
                counted[kind] += 1
                worst = max(worst, _logprob_error(result, row, stream, j))
                if result.token_ids[row] != stream.tokens[j]:
                    is_tie = self._is_tie(stream, j)
                    (ties if is_tie else wrong)[kind] += 1
                    if not is_tie:
                        where = f"first: request {chunk.request_id}, token {j}"
                        first.setdefault(kind, f"{where}: {result.token_ids[row]} for {stream.tokens[j]}")
            teller.tell(Entry(plan, golden, None))
        llm.runner.reset()
        for kind, name in (("greedy", "greedy tokens"), ("seeded", "same seed, same stream")):
            said = f"{counted[kind] - wrong[kind] - ties[kind]} of {counted[kind]} golden tokens, {ties[kind]} ties"
            yield Guarantee(name, not wrong[kind], said + (f"; {first[kind]}" if kind in first else ""))
        said = f"at most {worst:.1e} from the float64 oracle's (tolerance {self.tolerance:.0e} in {self.dtype})"
        yield Guarantee("logprobs", worst <= self.tolerance, said)

    def _golden_run(self, found: Samples) -> Guarantee:
        """A run of one's own, not told anything."""
        return self._same("golden run", self._golden(), found, "all requests at once, by its own scheduler")

    def _golden(self) -> Samples:
        return {name: Sample(s.tokens, s.logprobs) for name, (_, s) in self.trace.streams().items()}

    def _same(self, name: str, a: Samples, b: Samples, how: str, happened: bool = True) -> Guarantee:
        """Whether two runs give the same tokens, up to ties; and how far their logprobs are apart."""
        ties, worst = 0, 0.0
        for key, (request, stream) in self.trace.streams().items():
            x, y = a[key], b[key]
            at = next((j for j, (i, k) in enumerate(zip(x.tokens, y.tokens)) if i != k), None)
            length = min(len(x.tokens), len(y.tokens)) if at is None else at
            worst = max([worst, *(abs(p - q) for p, q in zip(x.logprobs[:length], y.logprobs[:length]))])
            if at is None and len(x.tokens) == len(y.tokens):
                continue
            if at is None or not self._is_tie(stream, at):
                return Guarantee(name, False, f"{how}: request {request.id} differs from token {length} on")
            ties += 1
        if not happened:
            return Guarantee(name, False, f"{how}: the trace does not bring it about here")
        equal = "logprobs equal in every bit" if worst == 0 else f"logprobs at most {worst:.1e} apart"
        held = worst <= self.tolerance
        return Guarantee(name, held, f"{how}: same tokens" + (f" up to {ties} ties" if ties else "") + f", {equal}")

    def _is_tie(self, stream: Stream, j: int) -> bool:
        # both logits may be off by as much
        return stream.gaps[j] < 2 * self.tolerance

    def _forks(self, num_forked: int, found: Samples) -> Guarantee:
        """Samples of one prompt against golden ones that were drawn apart."""
        several = {name for r in self.trace.requests if len(r.streams) > 1 for name in r.names()}
        golden = self._golden()
        made = {name: sample if name in several else golden[name] for name, sample in found.items()}
        how = f"{num_forked} forks for the {len(several)} samples of n > 1"
        return self._same("forks", golden, made, how, num_forked > 0)

    def _compiles(self, llm: LLM, before: int) -> Guarantee:
        new = llm.backend.num_compiles() - before
        said = f"{before} programs in the warm-up, {new} after it" if before else "nothing is compiled: op by op"
        return Guarantee("no compile after warm-up", new == 0, said)

    def _logged(self, together: Samples) -> Iterable[Guarantee]:
        """A synchronous run with a step log, and the log replayed by another engine."""
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-certify-"))
            path = Path(folder) / "steps.jsonl"
            logged = self._engine(**self.plenty, async_scheduling=False, step_log=str(path))
            yield self._same("overlapped = synchronous", together, self._all(logged), "async_scheduling off")
            assert logged.llm.step_log is not None
            logged.llm.step_log.close()
            blocks = list(logged.llm.memory_plan.num_blocks)
            del logged.llm
            _, steps = read_log(path)
            other = self._engine(**self.plenty, num_gpu_blocks_override=blocks, step_log=os.devnull)
            num_tokens, difference = compare_steps(iter(steps), other.llm.runner)
            said = f"{num_tokens} tokens and digests of their logits, by another engine"
            yield Guarantee("bit-exact replay", difference is None, said if difference is None else str(difference))


def _logprob_error(result: StepResult, row: int, stream: Stream, j: int) -> float:
    """The greatest difference from the golden logprobs, over the likeliest tokens of both. NaN counts as infinite."""
    assert result.top_ids is not None and result.top_logprobs is not None
    _, here, there = np.intersect1d(result.top_ids[row], stream.top_ids[j], return_indices=True)
    apart = np.abs(result.top_logprobs[row][here] - np.array(stream.top_logprobs[j])[there])
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0)) if len(here) else np.inf
