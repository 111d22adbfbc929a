"""The decisions of a logged run, made again by the production scheduler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..plan import Plan
from ..recorded_scheduler import request_from_json
from ..request import Request
from ..scheduler import Scheduler
from ..step_log import from_json, read_lines


@dataclass(frozen=True)
class Difference:
    """Where two runs part. `line` counts the log's lines from 1; `request_id` is None if it is of no single one."""

    line: int
    step: int
    request_id: str | None
    what: str  # "tokens", "logits", "error", or the field of the plan
    logged: Any
    found: Any

    def __str__(self) -> str:
        who = "" if self.request_id is None else f", request {self.request_id!r}"
        return f"step {self.step} (line {self.line}){who}: {self.what}: logged {self.logged}, now {self.found}"


@dataclass(frozen=True)
class Decisions:
    """What came of a rerun: how many plans were equal, the first that was not, and all requests as they then stand."""

    num_steps: int
    requests: dict[str, Request]
    difference: Difference | None


def rerun(path: str | Path, policy: Any = None) -> Decisions:
    """Hands a log's events to a scheduler that starts as the logged one did, and compares each plan that it makes.

    `policy` is the scheduling policy of the run, where the log has only its name. Raises ValueError for a file that is
    not a whole step log, and for a policy that is not the logged one.
    """
    header, lines = read_lines(path)
    scheduler = Scheduler.load(header["scheduler"], policy)
    known: dict[str, Request] = {}
    unread: dict[int, Plan] = {}
    num_steps = 0
    for number, line in enumerate(lines, 2):
        if "plan" in line:
            with quiet():
                logged, made = from_json(line["plan"]), scheduler.schedule()
            if difference := compare_plans(number, logged, made):
                return Decisions(num_steps, known, difference)
            unread[logged.step] = logged
            num_steps += 1
        elif "read" in line:
            scheduler.update(unread.pop(line["read"]), line["tokens"])
        else:
            take_event(scheduler, line, known)
    return Decisions(num_steps, known, None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the scheduler's warnings: what is decided again was warned of before."""
    log = logging.getLogger(Scheduler.__module__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def take_event(scheduler: Scheduler, line: Mapping[str, Any], known: dict[str, Request]) -> None:
    """Does to the scheduler what a line says that was done from outside. `known` gets the requests that are added."""
    match line:
        case {"add": value}:
            request = request_from_json(value, known)
            known[request.id] = request
            scheduler.add(request)
        case {"finish": [request_id, reason, stop_reason]}:
            scheduler.finish(known[request_id], reason, stop_reason)
        case {"compiled": request_id}:
            scheduler.compiled(known[request_id])
        case {"mask": _}:
            # the head's affair: no decision hangs on it
            pass
        case {"idle": _}:
            scheduler.schedule()
        case {"abandon": _}:
            scheduler.abandon()
        case {"set_limits": [max_num_seqs, max_num_batched_tokens]}:
            scheduler.set_limits(max_num_seqs, max_num_batched_tokens)
        case {"reset_prefix_cache": _}:
            scheduler.reset_prefix_cache()
        case _:
            raise ValueError(f"a step log has no lines of kind {', '.join(line)}")


def compare_plans(line: int, logged: Plan, made: Plan | None) -> Difference | None:
    """The first field in which two plans differ, and whose it is."""
    if made is None:
        return Difference(line, logged.step, None, "plan", "a step", "nothing to do")
    for f in fields(Plan):
        old, new = getattr(logged, f.name), getattr(made, f.name)
        if old == new:
            continue
        if not isinstance(old, tuple):
            return Difference(line, logged.step, None, f.name, old, new)
        at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        a, b = (values[at] if at < len(values) else None for values in (old, new))
        return Difference(line, logged.step, _owner(a if a is not None else b, logged), f.name, a, b)
    return None


def _owner(part: Any, plan: Plan) -> str | None:
    """The request that a part of a plan is about."""
    if isinstance(part, tuple):
        return part[0]
    if hasattr(part, "request_id"):
        return part.request_id
    row = getattr(part, "row", None)
    return next((c.request_id for c in plan.chunks if c.row == row), None)
