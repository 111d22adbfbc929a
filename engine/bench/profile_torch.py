"""What runs on a GPU under torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def events(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of all that runs on the GPU meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return [(e.name, e.device_time_total) for e in profiler.events() or () if e.device_type.name == "CUDA"]


def peak_memory() -> int:
    """Bytes that this process had at most of the GPU."""
    return torch.cuda.max_memory_reserved()
