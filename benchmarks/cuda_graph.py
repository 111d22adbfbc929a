"""Calls on this GPU recorded as a CUDA graph, and how long they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

ENOUGH, MOST = 10_000, 20  # microseconds, and replays, of which one time is the mean
TIMES = 5


def graph_of(calls: Sequence[Callable[[], Any]]) -> Callable[[int], float]:
    """Records all of them, in their order; what it returns replays them so many times and says the microseconds of one
    call. The first call is run once before, so that whatever it needs once is there."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()

    def replay(times: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(times):
            graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1000 / times / len(calls)

    replay(1)
    return replay


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call in a graph of all: the median of some times, each of several replays."""
    replay = graph_of(calls)
    many = max(1, min(MOST, int(ENOUGH / (replay(1) * len(calls)))))
    return statistics.median(replay(many) for _ in range(TIMES))
