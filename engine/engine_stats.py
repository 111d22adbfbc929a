"""How an engine stands, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .scheduler import Scheduler

LIMITS = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class EngineStats:
    """Requests, blocks and limits of this moment, and what was counted since the start."""

    num_running: int  # those of which nothing but the end is unread included
    num_waiting: int
    num_blocks: int  # of the fullest cache group, the null block left out
    num_free_blocks: int
    max_num_seqs: int  # of each replica, as set_limits has left it
    max_num_batched_tokens: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int  # computed
    num_queried_tokens: int  # of the prefix cache
    num_hit_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        """The used part, 0 to 1, of the fullest cache group."""
        return 1 - self.num_free_blocks / self.num_blocks


def stats_of(schedulers: Sequence[Scheduler]) -> EngineStats:
    """That of an engine whose replicas have these schedulers: sums, but limits are those of each replica."""
    each = [_stats_of(s) for s in schedulers]
    names = [f.name for f in fields(EngineStats) if f.name not in LIMITS]
    return replace(each[0], **{name: sum(getattr(stats, name) for stats in each) for name in names})


def _stats_of(s: Scheduler) -> EngineStats:
    fullest = min(s.blocks.pools, key=lambda pool: len(pool.free) / (pool.num_blocks - 1))
    return EngineStats(
        num_running=s.num_running,
        num_waiting=len(s.waiting),
        num_blocks=fullest.num_blocks - 1,
        num_free_blocks=len(fullest.free),
        max_num_seqs=s.limits.max_num_seqs,
        max_num_batched_tokens=s.limits.max_num_batched_tokens,
        num_steps=s.step,
        num_preemptions=s.num_preemptions,
        num_prompt_tokens=s.num_prompt_tokens,
        num_queried_tokens=s.num_queried_tokens,
        num_hit_tokens=s.num_hit_tokens,
    )
