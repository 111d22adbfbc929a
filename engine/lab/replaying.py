"""A logged run, done again: bit for bit where it was made, or beside another backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...models.step import put_tokens, with_rows
from ..build import Parts, build
from ..config import engine_config
from ..progress import Progress
from ..runner import Runner, StepResult
from ..step_log import Entry, read_log
from .rerun import Difference, rerun
from .trace import with_logprobs

# how far a logprob may be from the other backend's, by the dtype of the run
TOLERANCE = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 2e-1}
NUM_COMPARED = 20  # likeliest tokens of each row whose logprobs are compared
# what follows from the rest, or says how rather than what
NOT_COMPARED = ("scheduler", "arguments", "is_spec")


@dataclass(frozen=True)
class Replay:
    """What came of a replay. `changes` names what is not as the log's header says (versions, machine, weights ...).

    Beside another backend, `max_error` is the greatest difference of a logprob, and `difference` the first other token.
    """

    num_steps: int
    num_tokens: int
    difference: Difference | None
    changes: list[str]
    max_error: float | None = None
    tolerance: float | None = None

    @property
    def ok(self) -> bool:
        """Equal in every bit; or, beside another backend, within tolerance."""
        if self.max_error is None or self.tolerance is None:
            return self.difference is None
        return self.max_error <= self.tolerance


def replay(
    path: str | Path,
    *,
    to: int | None = None,
    on: str | None = None,
    model: Any = None,
    weights: Any = None,
    progress: bool = False,
    **arguments: Any,
) -> Replay:
    """Runs the steps of a log again, up to step `to`, and compares tokens and the digests of all fp32 logits.

    The scheduler's decisions are made again as well. `on` names another backend, which then runs beside the logged one
    and is told the logged tokens, so that one difference does not hide the next. `model` (and `weights`) are needed if
    the log was made from a ModelSpec; other engine arguments override the logged ones. Raises ValueError for a file
    that is not a whole step log.
    """
    header, steps = read_log(path)
    steps = [s for s in steps if to is None or s.plan.step <= to]
    decisions = rerun(path, arguments.get("scheduling_policy")).difference
    if decisions is not None:
        steps = [s for s in steps if s.plan.step < decisions.step]
    parts = _build(header, model, weights, arguments)
    with Progress(len(steps), progress) as bar:
        watched = _watched(steps, bar)
        if on is None or on == header["backend"]:
            found = _alone(watched, parts)
        else:
            found = _beside(watched, parts, _build(header, model, weights, arguments | {"backend": on}))
    if found.difference is None and decisions is not None and (to is None or decisions.step <= to):
        found = replace(found, difference=decisions)
    assert parts.step_log is not None
    return replace(found, changes=_changes(header, parts.step_log.header))


def _build(header: Mapping[str, Any], model: Any, weights: Any, arguments: Mapping[str, Any]) -> Parts:
    """The engine that the log was made with, or as much of it as the arguments leave."""
    logged = {**header["arguments"], "backend": header["backend"], "max_model_len": header["max_model_len"]}
    logged |= {"num_gpu_blocks_override": header["num_blocks"], "step_log": os.devnull}
    if arguments.get("backend", header["backend"]) != header["backend"]:
        # how the logged backend was tuned is nothing to another
        for name in ("threads", "attention", "compile_cache_dir"):
            logged.pop(name, None)
    if logged.get("layout") is None and "layout" not in arguments:
        raise ValueError(f"the log was made with layout {header['layout']}: pass it as layout=")
    if model is None and header["is_spec"]:
        raise ValueError(f"the log was made from a ModelSpec ({header['model']}): pass it as model=, with its weights=")
    return build(engine_config(model if model is not None else header["model"], **{**logged, **arguments}), weights)


def _changes(logged: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in logged if name not in NOT_COMPARED]
    return [f"{n}: {logged[n]} then, {now.get(n)} now" for n in names if logged[n] != now.get(n)]


def _watched(steps: Sequence[Entry], bar: Progress) -> Iterator[Entry]:
    for step in steps:
        yield step
        bar.advance(len(step.token_ids), 1)


def _alone(steps: Iterator[Entry], parts: Parts) -> Replay:
    num_steps = 0

    def counted() -> Iterator[Entry]:
        nonlocal num_steps
        for step in steps:
            yield step
            num_steps += 1

    num_tokens, difference = compare_steps(counted(), parts.runner)
    return Replay(num_steps, num_tokens, difference, [])


def compare_steps(steps: Iterator[Entry], runner: Runner) -> tuple[int, Difference | None]:
    """Runs logged steps again. Returns how many tokens were equal, and the first token or digest that is not."""
    num_tokens = 0
    for step in steps:
        result = runner.launch(step.plan, step.mask).result()
        if difference := _first_difference(step, result):
            return num_tokens, difference
        num_tokens += len(result.token_ids)
    return num_tokens, None


def _first_difference(step: Entry, result: StepResult) -> Difference | None:
    """The first sampled chunk whose token or logits are not the logged ones."""
    found = zip(result.token_ids, result.digests or [], strict=True)
    for i, (chunk, (token, digest)) in enumerate(zip(step.plan.sampled, found, strict=True)):
        for what, logged, now in (("tokens", step.token_ids, token), ("logits", step.digests, digest)):
            if logged is None:
                continue
            was = logged[i] if i < len(logged) else None
            if was != now:
                return Difference(step.line, step.plan.step, chunk.request_id, what, was, now)
    return None


def _beside(steps: Iterator[Entry], parts: Parts, other: Parts) -> Replay:
    """Both backends in lockstep, each told the logged tokens after every step."""
    most, size = parts.config.max_logprobs, parts.model.vocab_size
    count = min(NUM_COMPARED, size if most == -1 else most)
    tell = [Teller(p.runner) for p in (parts, other)]
    num_steps, num_tokens, worst, first = 0, 0, 0.0, None
    for step in steps:
        plan = with_logprobs(step.plan, count)
        mine, theirs = (p.runner.launch(plan, step.mask).result() for p in (parts, other))
        for teller in tell:
            teller.tell(step)
        num_steps, num_tokens = num_steps + 1, num_tokens + len(step.token_ids)
        worst = max(worst, _error(mine, theirs))
        first = first or _other_token(step, theirs)
    return Replay(num_steps, num_tokens, first, [], worst, TOLERANCE[parts.config.dtype])


def _error(a: StepResult, b: StepResult) -> float:
    """The greatest difference of a logprob, over the tokens that are among the likeliest of one of them.

    One that the other does not name is at most as likely there as the last that it names: so much less, at least.
    """
    worst = 0.0
    for here, there in zip(_likeliest(a), _likeliest(b), strict=True):
        for mine, other in ((here, there), (there, here)):
            last = min(other.values())
            worst = max(worst, *(abs(p - other[i]) if i in other else max(0.0, p - last) for i, p in mine.items()))
    return worst


def _likeliest(result: StepResult) -> list[dict[int, float]]:
    """The likeliest tokens of each sampled row, and their logprobs."""
    if result.top_ids is None or result.top_logprobs is None:
        return []
    rows = zip(result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True)
    return [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


def _other_token(step: Entry, result: StepResult) -> Difference | None:
    for chunk, was, now in zip(step.plan.sampled, step.token_ids, result.token_ids, strict=True):
        if was != now:
            return Difference(step.line, step.plan.step, chunk.request_id, "tokens", was, now)
    return None


class Teller:
    """Puts logged tokens in the place of sampled ones."""

    def __init__(self, runner: Runner):
        self.runner = runner
        args, outs = ("rows", "at", "position", "token"), ("rows",)
        self.program = runner.backend.compile(put_tokens, args, outs, "rows")

    def tell(self, step: Entry) -> None:
        """After the step's head, before the next step."""
        chunks = step.plan.sampled
        if not chunks:
            return
        at, position = (
            np.asarray(x, np.int32) for x in ([c.row for c in chunks], [c.start + c.num_tokens for c in chunks])
        )
        token = np.asarray(step.token_ids, np.int32)
        rows = self.program(self.runner.cache.rows, at, position, token)
        self.runner.cache = with_rows(self.runner.cache, rows)
