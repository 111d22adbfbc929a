"""What the log says of a preemption."""

from __future__ import annotations

import logging

from .request import Request

log = logging.getLogger("octavo.engine.scheduler")


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
