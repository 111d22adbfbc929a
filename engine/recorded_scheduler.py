"""The scheduler, with everything that comes to it from outside written to a step log."""

from __future__ import annotations

from typing import Any

from .block_manager import BlockManager
from .limits import SchedulerConfig
from .plan import Plan
from .request import Request
from .scheduler import Scheduler
from .scheduler_state import dump_requests, load_requests
from .step_log import StepLog


class RecordedScheduler(Scheduler):
    """Decides as a Scheduler does. Its log can be run again with `rerun`: equal events lead to equal plans."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Any = None):
        super().__init__(config, blocks, policy)
        self.log: StepLog | None = None

    def add(self, r: Request) -> None:
        super().add(r)
        self._write("add", request_to_json(r))

    def compiled(self, r: Request) -> None:
        super().compiled(r)
        self._write("compiled", r.id)

    def schedule(self) -> Plan | None:
        before = self._changed_by_idling()
        plan = super().schedule()
        if plan is not None and self.log is not None:
            self.log.planned(plan)
        elif self._changed_by_idling() != before:
            # nothing to run, but somebody has lost row and blocks, or given them up
            self._write("idle", self.step)
        return plan

    def finish(self, r: Request, reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(r, reason, stop_reason)
        self._write("finish", [r.id, str(reason), stop_reason])

    def abandon(self) -> None:
        super().abandon()
        self._write("abandon", self.step)

    def set_limits(self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> None:
        super().set_limits(max_num_seqs, max_num_batched_tokens)
        self._write("set_limits", [max_num_seqs, max_num_batched_tokens])

    def reset_prefix_cache(self) -> bool:
        self._write("reset_prefix_cache", self.step)
        return super().reset_prefix_cache()

    def _changed_by_idling(self) -> tuple[int, ...]:
        """What a schedule may change that plans nothing."""
        return self.num_preemptions, len(self.left), self.held, len(self.estates.kept)

    def _write(self, kind: str, value: Any) -> None:
        if self.log is not None:
            self.log.write(kind, value)


def request_to_json(r: Request) -> dict[str, Any]:
    """A request that has just been added; its sibling `first` by id."""
    (value, *_) = dump_requests([r])
    return value | {"first": None if r.first is None else r.first.id}


def request_from_json(value: dict[str, Any], families: dict[str, Request]) -> Request:
    """The request that was added. `families` holds those added before it, by id."""
    (r,) = load_requests([value | {"first": None}])
    r.first = None if value["first"] is None else families[value["first"]]
    return r
