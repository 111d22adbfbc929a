"""One line of statistics every few seconds, as vLLM logs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .scheduler import Scheduler

log = logging.getLogger("octavo")

INTERVAL = 10.0  # seconds


class StatsLogger:
    """Logs how the engine does, at most every INTERVAL seconds of the given clock, while steps are run."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter):
        self.scheduler, self.clock = scheduler, clock
        self.last, self.num_prompt_tokens, self.num_generated = clock(), scheduler.num_prompt_tokens, 0

    def after_step(self, num_generated: int) -> None:
        """Takes in one step and the tokens that were read behind it."""
        self.num_generated += num_generated
        now, s = self.clock(), self.scheduler
        if now - self.last < INTERVAL:
            return
        seconds, prompt_tokens = now - self.last, s.num_prompt_tokens - self.num_prompt_tokens
        hit_rate = s.num_hit_tokens / s.num_queried_tokens if s.num_queried_tokens else 0.0
        log.info(
            "prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d requests, waiting: %d "
            "requests, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
            prompt_tokens / seconds,
            self.num_generated / seconds,
            len(s.running),
            len(s.waiting),
            100 * s.blocks.usage(),
            100 * hit_rate,
            s.num_preemptions,
        )
        self.last, self.num_prompt_tokens, self.num_generated = now, s.num_prompt_tokens, 0
