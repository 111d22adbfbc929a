"""One step of an engine, for all its requests: plan, launch, read, and what happens if that fails."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from .config import EngineConfig
from .metrics import EngineMetrics
from .output_processor import Family, OutputProcessor
from .plan import Plan
from .reads import readers
from .request import Request
from .runner import Pending, Runner
from .scheduler import Scheduler
from .stats import StatsLogger
from .step_log import StepLog
from .structured_output import StructuredOutput


class EngineSteps:
    """What LLM does of it; LLM sets the fields."""

    config: EngineConfig
    runner: Runner
    scheduler: Scheduler
    processor: OutputProcessor
    structured: StructuredOutput
    metrics: EngineMetrics | None
    stats: StatsLogger | None
    step_log: StepLog | None
    lock: threading.RLock
    unread: deque[Pending]  # the steps in flight, the oldest first
    max_unread: int  # a step more is launched only once the oldest is read
    touched: dict[str, Family]  # queued requests with news that step() has not returned yet

    def _advance(self) -> tuple[int, list[Family]]:
        """Runs one step, for all. Returns how many tokens it brought, and the families that got them."""
        with self.lock:
            try:
                touched = self._run_step()
                families = self.processor.families_of(touched)
                self.touched |= {family.id: family for family in families if family.queued}
            except BaseException:
                # half done, here or on the device, or interrupted by the user: nobody can go on from it
                self._abandon()
                raise
            return sum(r.samples and r.error is None for r in touched), families

    def _run_step(self) -> list[Request]:
        """Plans and launches a step, then reads the oldest if `max_unread` are in flight, or none could be planned.

        Returns the requests that got a token, and those that ended because of their grammar.
        """
        for request in self.structured.take_ready():
            self.scheduler.compiled(request)
        plan = self.scheduler.schedule()
        if self.metrics:
            self.metrics.planned(plan)
        if plan and self.structured.is_late(plan):
            # only the head waits for the tokens that its mask depends on
            hidden, touched = self.runner.launch_forward(plan), []
            while self.unread:
                touched += self._read_oldest()
            self.unread.append(self.runner.launch_head(plan, hidden, self._mask(plan)))
        else:
            if plan:
                self.unread.append(self.runner.launch(plan, self._mask(plan)))
            if plan is None and not self.unread:
                self.structured.wait()
            is_full = plan is None or len(self.unread) >= self.max_unread
            touched = self._read_oldest() if self.unread and is_full else []
        if self.metrics and self.stats:
            self.metrics.read(touched)
            self.stats.after_step()
        return touched + self._end_failed()

    def _mask(self, plan: Plan) -> np.ndarray | None:
        """What the grammars of a plan's requests allow, if there are any."""
        mask = self.structured.mask(plan)
        if mask is not None and self.step_log:
            self.step_log.masked(plan, mask)
        return mask

    def _read_oldest(self) -> list[Request]:
        return self._absorb(self.unread.popleft())

    def _end_failed(self) -> list[Request]:
        """Ends requests that cannot go on in their grammar, and returns them."""
        failed = self.structured.take_failed()
        for request in failed:
            if request.finish_reason is None:
                self.scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason = "error", None
            self.processor.finish(request)
        if self.metrics and failed:
            self.metrics.ended(failed)
        return failed

    def _abandon(self) -> None:
        """Ends all requests with "error" and starts from an empty cache."""
        self.unread.clear()
        self.scheduler.abandon()
        self.structured.clear()
        if self.metrics:
            self.metrics.ended(m.request for family in self.processor.families.values() for m in family.members)
        self.runner.reset()
        self.touched |= {family.id: family for family in self.processor.families.values() if family.queued}

    def _absorb(self, pending: Pending) -> list[Request]:
        """Takes in what a step sampled and read. Returns the requests that got a token, or end as computed only."""
        result = pending.result()
        plan = pending.plan
        for request, read, found in zip(readers(self.scheduler, plan), plan.reads, result.reads, strict=True):
            if request:
                self.processor.push_read(request, read, found)
        touched = self.scheduler.update(pending.plan, result.token_ids)
        if self.step_log:
            self.step_log.append(pending.plan, result.token_ids, result.digests)
        touched = self.structured.take_tokens(touched)
        at = {chunk.request_id: i for i, chunk in enumerate(pending.plan.sampled)}
        for request in touched:
            if not request.samples:
                continue
            stop = self.processor.push(request, result, at[request.id])
            if stop is not None and request.finish_reason != "stop":
                if request.finish_reason is None:
                    self.scheduler.finish(request, "stop", stop)
                    self.processor.finish(request)
                request.finish_reason, request.stop_reason = "stop", stop
        return touched
