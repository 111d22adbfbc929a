"""One line of statistics every few seconds, as vLLM logs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .metrics import EngineMetrics

log = logging.getLogger("octavo")

INTERVAL = 10.0  # seconds


class StatsLogger:
    """Logs what the metrics say, at most every INTERVAL seconds of the given clock, while steps are run."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.perf_counter):
        self.metrics, self.clock = metrics, clock
        self.last, self.tokens = clock(), self._tokens()

    def after_step(self) -> None:
        """Logs if it is time."""
        now, s = self.clock(), self.metrics.scheduler
        if now - self.last < INTERVAL:
            return
        seconds, tokens = now - self.last, self._tokens()
        hit_rate = s.num_hit_tokens / s.num_queried_tokens if s.num_queried_tokens else 0.0
        log.info(
            "prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d requests, waiting: %d "
            "requests, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
            (tokens[0] - self.tokens[0]) / seconds,
            (tokens[1] - self.tokens[1]) / seconds,
            len(s.running),
            len(s.waiting),
            100 * s.blocks.usage(),
            100 * hit_rate,
            s.num_preemptions,
        )
        self.last, self.tokens = now, tokens

    def _tokens(self) -> tuple[int, int]:
        """Tokens so far: of prompts, computed; generated."""
        return self.metrics.scheduler.num_prompt_tokens, self.metrics.num_generation_tokens
