"""Sleep: an engine that keeps its processes and programs, and gives its device's memory to others for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .checks import sequence
from .child import Caught
from .config import EngineConfig
from .engine_steps import EngineSteps
from .errors import AsleepError

log = logging.getLogger("octavo")

# what can be woken by itself
TAGS = ("weights", "kv_cache")
LEVELS, MODES = (1, 2), ("abort", "wait")
GAP = 1e-4  # seconds between two steps that are waited for


def check_sleep(config: EngineConfig, level: int, mode: str) -> None:
    """Raises ValueError for a sleep that there is not."""
    if not config.enable_sleep_mode:
        raise ValueError("sleep: this engine was made without enable_sleep_mode=True")
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is not 1 (weights to the host) or 2 (weights dropped)")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")


class Sleeps(EngineSteps):
    """What LLM does of it."""

    config: EngineConfig
    lock: threading.RLock
    abort: Callable[[Sequence[str]], None]
    asleep: tuple[str, ...] = ()  # of TAGS
    sleep_level = 0
    num_falling = 0  # calls of `sleep` that run

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the device's memory: the cache, cached prefixes with it, and the weights.

        At level 1 these wait in the host's memory, at level 2 they are gone; wake_up brings them back. Programs stay.
        Requests that are running are aborted, or with mode="wait" run to their end first, or until another thread
        aborts them; those that come meanwhile are refused with AsleepError. An engine that is asleep stays as it is,
        whatever the level. Raises ValueError without enable_sleep_mode=True.
        """
        check_sleep(self.config, level, mode)
        with self.lock:
            if mode == "abort" and not self.asleep:
                self.abort(list(self.processor.families))
            self.num_falling += 1
        try:
            while not self._fall_asleep(level, mode):
                # who gives a lock back and takes it at once leaves it to nobody
                time.sleep(GAP)
        finally:
            with self.lock:
                self.num_falling -= 1

    def _fall_asleep(self, level: int, mode: str) -> bool:
        """Sleeps if nothing is left to compute, else runs a step of that. Returns whether the engine is asleep."""
        with self.lock:
            if self.asleep:
                log.warning("sleep: the engine is asleep already")
                return True
            if any(r.is_busy for r in self.replicas):
                self._step_before(mode)
                return False
            for r in self.replicas:
                r.scheduler.reset_prefix_cache()
                self.routing.forget(r.index)
            # from here on only wake_up helps, however far the rest comes
            self._now_asleep(TAGS, level)
            for runner in self.runners:
                runner.sleep(level)
            return True

    def _step_before(self, mode: str) -> None:
        """Runs a step. If it fails, that is of those who are waited for, or of somebody who is gone."""
        with Caught() as caught:
            self._advance()
        if caught.error is not None:
            is_failure = isinstance(caught.error, Exception)
            if mode == "wait" or not is_failure or not all(r.runner.has_cache for r in self.replicas):
                raise caught.error
            log.warning("sleep: a step of requests that were aborted has failed: %s", caught.error)

    def wake_up(self, tags: Sequence[str] | None = None, *, weights: Any = None) -> None:
        """Brings back what sleep has freed: all that is asleep, or "weights" or "kv_cache" alone.

        Requests are served once all is awake. `weights`: other weights, a tree as for LLM(weights=); without it the old
        ones come from the host, or at level 2 from the checkpoint. Where one of the tags is awake nothing happens, but
        a warning. Raises ValueError for other tags, for `weights` that nothing is to take, and where weights that were
        given as arrays are gone.
        """
        wanted = TAGS if tags is None else tuple(sequence("tags", tags))
        if unknown := [tag for tag in wanted if tag not in TAGS]:
            raise ValueError(f"tags {unknown!r}: there are {', '.join(TAGS)}")
        with self.lock:
            wanted = self.asleep if tags is None else wanted
            if not self.asleep or (awake := [tag for tag in wanted if tag not in self.asleep]):
                who = f"{', '.join(awake)} is awake" if self.asleep else "the engine is awake"
                if weights is not None:
                    raise ValueError(f"weights= is given, and {who}: sleep() first")
                log.warning("wake_up: %s", who)
                return
            if weights is not None and "weights" not in wanted:
                raise ValueError(f"weights= is given, and tags {list(wanted)} do not name 'weights'")
            if "weights" in wanted:
                self.runner.check_weights(weights)
            # those elsewhere first: while they load they wait for what rank 0 loads
            waits = [runner.wake_up(wanted, weights) for runner in reversed(self.runners)]
            for wait in waits:
                if wait:
                    wait()
            left = tuple(tag for tag in self.asleep if tag not in wanted)
            if not left and self.runner.backend.binds_addresses and self.config.warmup == "all":
                for runner in self.runners:
                    runner.warm_up()
            self._now_asleep(left, self.sleep_level)

    def is_sleeping(self) -> bool:
        """Whether anything is asleep."""
        return bool(self.asleep)

    def _now_asleep(self, tags: tuple[str, ...], level: int) -> None:
        self.asleep, self.sleep_level = tags, level
        for r in self.replicas:
            if r.metrics:
                r.metrics.sleep_level = level if tags else 0

    def _check_awake(self) -> None:
        """Raises AsleepError if the engine is asleep, or about to be."""
        if self.num_falling:
            raise AsleepError("the engine is about to sleep: wake_up() once it does")
        if self.asleep:
            raise AsleepError(f"the engine is asleep ({', '.join(self.asleep)}): wake_up() first")
