"""Where one decode step of 64 requests goes: kernels by name, microseconds and launches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def profile(llm: Any, backend: str, vocab: int) -> dict[str, Any]:
    """Of one step in the middle of the decode-64 workload."""
    from workloads import workload

    from octavo.engine import SamplingParams

    for i, (prompt, _) in enumerate(workload("decode-64", vocab)):
        llm.add_request(f"p{i}", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(20):
        llm.step()
    found = PROFILERS[backend](llm)
    while llm.has_unfinished_requests():
        llm.step()
    return found


def profile_torch(llm: Any) -> dict[str, Any]:
    import torch

    steps = 4
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name][0] += event.device_time_total / steps
            times[event.name][1] += 1 / steps
    rows = sorted(((round(us, 1), round(n, 2), name[:90]) for name, (us, n) in times.items()), reverse=True)
    return {"total_us": round(sum(r[0] for r in rows), 1), "kernels": rows[:25]}


def profile_jax(llm: Any) -> dict[str, Any]:
    import tempfile
    from pathlib import Path

    import jax

    steps = 4
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                llm.step()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        # the lines of a GPU that are no streams tell the same kernels again, by module and operation
        lines = [x for p in planes if p.name.startswith("/device:GPU") for x in p.lines if x.name.startswith("Stream")]
        for event in (e for line in lines for e in line.events):
            times[event.name][0] += event.duration_ns / 1000 / steps
            times[event.name][1] += 1 / steps
    rows = sorted(((round(us, 1), round(n, 2), name[:90]) for name, (us, n) in times.items()), reverse=True)
    return {"total_us": round(sum(r[0] for r in rows), 1), "kernels": rows[:25]}


PROFILERS = {"torch": profile_torch, "jax": profile_jax}
