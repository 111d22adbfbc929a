"""What the host does in front of a step's head and behind it: masks, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .output_processor import OutputProcessor
from .plan import Plan
from .reads import readers
from .replica import Replica
from .request import Request
from .structured_output import StructuredOutput


@dataclass(frozen=True)
class Intake:
    """That of all replicas of an engine."""

    processor: OutputProcessor
    structured: StructuredOutput

    def mask(self, replica: Replica, plan: Plan) -> np.ndarray | None:
        """What the grammars of a plan's requests allow, if there are any."""
        mask = self.structured.mask(plan)
        if mask is not None and replica.step_log:
            replica.step_log.masked(plan, mask)
        return mask

    def read_oldest(self, replica: Replica) -> list[Request]:
        """Takes in what its oldest step in flight sampled and read.

        Returns the requests that got a token, or end as computed only.
        """
        pending, scheduler = replica.unread.popleft(), replica.scheduler
        result = pending.result()
        plan = pending.plan
        for request, read, found in zip(readers(scheduler, plan), plan.reads, result.reads, strict=True):
            if request:
                self.processor.push_read(request, read, found)
        if replica.routed and result.routed is not None:
            self.processor.gather_experts(replica.routed.take(plan, result.routed))
        touched = scheduler.update(plan, result.token_ids)
        if replica.step_log:
            replica.step_log.append(plan, result.token_ids, result.digests)
        touched = self.structured.take_tokens(touched)
        at = {chunk.request_id: i for i, chunk in enumerate(plan.sampled)}
        for request in touched:
            if not request.samples:
                continue
            stop = self.processor.push(request, result, at[request.id])
            if stop is not None and request.finish_reason != "stop":
                # also of what has just ended by its length
                scheduler.finish(request, "stop", stop)
                self.processor.finish(request)
        return touched
