"""Who is preempted, and what the log says of it."""

from __future__ import annotations

import logging

from .request import Request
from .waiting import rank

log = logging.getLogger("octavo.engine.scheduler")


def victim(running: dict[Request, None], policy: str) -> Request:
    """Who goes first: the one admitted last, or under the priority policy the one of the greatest rank."""
    return next(reversed(running)) if policy == "fcfs" else max(running, key=rank)


def warn(r: Request, num_preemptions: int) -> None:
    """Says that there is too little room: at preemption 1, 2, 4, 8 ..."""
    if num_preemptions & (num_preemptions - 1) == 0:
        log.warning(
            "request %s is preempted and will be computed again: the KV cache has too few free blocks. If this "
            "happens often, give it more (gpu_memory_utilization, kv_cache_memory_bytes) or run fewer requests at "
            "once (max_num_seqs). total_cumulative_preemption_cnt=%d",
            r.id,
            num_preemptions,
        )
