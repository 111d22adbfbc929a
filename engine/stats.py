"""One line of statistics every few seconds, as vLLM logs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from .metrics import EngineMetrics

log = logging.getLogger("octavo")

INTERVAL = 10.0  # seconds


class StatsLogger:
    """Logs what the metrics of all replicas say, at most every INTERVAL seconds of the clock, while steps are run."""

    def __init__(self, metrics: Sequence[EngineMetrics], clock: Callable[[], float] = time.perf_counter):
        self.metrics, self.clock = metrics, clock
        self.last, self.tokens = clock(), self._tokens()

    def after_step(self) -> None:
        """Logs if it is time."""
        now, schedulers = self.clock(), [m.scheduler for m in self.metrics]
        if now - self.last < INTERVAL:
            return
        seconds, tokens = now - self.last, self._tokens()
        num_queried = sum(s.num_queried_tokens for s in schedulers)
        hit_rate = sum(s.num_hit_tokens for s in schedulers) / num_queried if num_queried else 0.0
        log.info(
            "prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d requests, waiting: %d "
            "requests, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
            (tokens[0] - self.tokens[0]) / seconds,
            (tokens[1] - self.tokens[1]) / seconds,
            sum(s.num_running for s in schedulers),
            sum(len(s.waiting) for s in schedulers),
            100 * max(s.blocks.usage() for s in schedulers),
            100 * hit_rate,
            sum(s.num_preemptions for s in schedulers),
        )
        self.last, self.tokens = now, tokens

    def _tokens(self) -> tuple[int, int]:
        """Tokens so far: of prompts, computed; generated."""
        computed = sum(m.scheduler.num_prompt_tokens for m in self.metrics)
        return computed, sum(m.num_generation_tokens for m in self.metrics)
