"""What became of one request of a logged run, step by step, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import Chunk, Plan, Reason
from ..step_log import from_json, read_lines
from .rerun import rerun

SAYS = {
    Reason.ADMITTED: "starts",
    Reason.FORKED: "starts, its prompt taken over from a running sibling",
    Reason.RESUMED: "starts again after the preemption",
    Reason.PREEMPTED: "preempted: its blocks were needed for another",
    Reason.STOP: "ends: stop",
    Reason.LENGTH: "ends: length",
    Reason.REPETITION: "ends: it repeats itself",
    Reason.ABORT: "ends: abort",
    Reason.ERROR: "ends: a step failed",
    Reason.ENDS_UNREAD: "gives up its seat: all of it is planned, and its last token is in flight",
    Reason.NO_BUDGET: "waits: the step's token budget is spent",
    Reason.NO_SEAT: "waits: max_num_seqs requests are running",
    Reason.NO_ROOM: "waits: its blocks do not fit",
    Reason.AFTER_PREEMPTION: "waits: a step that preempts admits nobody",
    Reason.NEXT_BATCH: "waits: this batch has its share of the requests",
    Reason.IN_FLIGHT: "waits: a token of it is unread",
    Reason.GRAMMAR: "waits: its grammar is being compiled",
    Reason.SIBLING: "waits: the first of its family computes the prompt",
}
STARTS = (Reason.ADMITTED, Reason.FORKED, Reason.RESUMED)
ENDS = (Reason.STOP, Reason.LENGTH, Reason.REPETITION, Reason.ABORT, Reason.ERROR)
HELD = (Reason.NO_BUDGET, Reason.NEXT_BATCH, Reason.NO_SEAT, Reason.NO_ROOM, Reason.AFTER_PREEMPTION)


@dataclass(frozen=True)
class Period:
    """Consecutive steps in which the same happened to a request. `num_tokens` are those computed in them."""

    first_step: int
    last_step: int
    what: str
    num_tokens: int = 0


def explain(path: str | Path, request_id: str, policy: Any = None) -> list[Period]:
    """The time line of a request: why it waited, what it hit, when it was preempted, how it ended.

    `policy` is as in `rerun`. Raises ValueError for a request that the log does not know, naming those it knows.
    """
    _, lines = read_lines(path)
    start = next((i for i, line in enumerate(lines) if "add" in line and line["add"]["id"] == request_id), None)
    if start is None:
        known = [line["add"]["id"] for line in lines if "add" in line]
        raise ValueError(f"{path} has no request {request_id!r}: it has {_listed(known)}")
    periods = list(_merged(_story(lines[start:], request_id)))
    request = rerun(path, policy).requests[request_id]
    if request.finish_reason and not (periods and periods[-1].what.startswith("ends")):
        # nothing was planned after it, so no plan could tell
        last = periods[-1].last_step if periods else 0
        periods.append(Period(last, last, SAYS[Reason(request.finish_reason)]))
    return periods


def _story(lines: Iterable[dict[str, Any]], request_id: str) -> Iterator[Period]:
    """What each step meant for a request, from the line that adds it to its end."""
    lines = iter(lines)
    prompt_len = len(next(lines)["add"]["prompt"])
    running = False
    for plan in (from_json(line["plan"]) for line in lines if "plan" in line):
        codes = [code for name, code in plan.reasons if name == request_id]
        for code in codes:
            yield Period(plan.step, plan.step, SAYS[code] + (_hit(plan, request_id) if code in STARTS else ""))
        if any(code in ENDS for code in codes):
            return
        chunk = next((c for c in plan.chunks if c.request_id == request_id), None)
        running = chunk is not None or (running and Reason.PREEMPTED not in codes)
        if chunk is not None:
            yield Period(plan.step, plan.step, _work(chunk, prompt_len), chunk.num_tokens)
        elif not codes and not running:
            yield Period(plan.step, plan.step, _behind(plan))


def _work(chunk: Chunk, prompt_len: int) -> str:
    """What a chunk does for its request."""
    if chunk.start < prompt_len:
        part = "the rest of its prompt, and samples its first token" if chunk.samples else "a part of its prompt"
        return f"computes {part}"
    return "computes again what it lost" if chunk.num_tokens > 1 else "decodes"


def _behind(plan: Plan) -> str:
    """Who keeps a request waiting that the plan says nothing of: the head of the queue, which does not start."""
    if not plan.reasons or plan.reasons[-1][1] not in HELD:
        return "waits"
    head, code = plan.reasons[-1]
    return f"waits behind request {head!r}, which {SAYS[code]}"


def _hit(plan: Plan, request_id: str) -> str:
    """What it finds in the cache as it starts."""
    row = next(c.row for c in plan.chunks if c.request_id == request_id)
    start = next(a for a in plan.admitted if a.row == row)
    copies = f", {len(plan.transfers)} blocks copied in this step" if plan.transfers else ""
    return f": {start.num_computed} of {len(start.tokens)} tokens are in the cache, row {row}{copies}"


def _merged(periods: Iterator[Period]) -> Iterator[Period]:
    """Neighbours of which the same is told become one."""
    last: Period | None = None
    for p in periods:
        if last is not None and last.what == p.what:
            last = Period(last.first_step, p.last_step, p.what, last.num_tokens + p.num_tokens)
            continue
        if last is not None:
            yield last
        last = p
    if last is not None:
        yield last


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
