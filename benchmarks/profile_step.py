"""Where a step goes: wall time, waiting for the device, and kernels by name with microseconds and launches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

STEPS = 8
# name: requests, prompt tokens, how many steps until the measured ones; None: the prefill itself
CASES = {
    "decode 1": (1, 128, 20),
    "decode 64": (64, 128, 20),
    "decode 256": (256, 512, 40),
    "prefill 2 x 4096": (2, 4096, None),
}


def profile(llm: Any, backend: str, vocab: int) -> dict[str, Any]:
    """Of each case: microseconds a step, of which the host waited, and what ran on the device."""
    return {name: profile_case(llm, backend, vocab, *case) for name, case in CASES.items()}


def profile_case(llm: Any, backend: str, vocab: int, count: int, length: int, warm: int | None) -> dict[str, Any]:
    import random

    from octavo.engine import SamplingParams

    rng = random.Random(count)

    def add(tokens: int) -> None:
        for i in range(count):
            ids = [rng.randrange(100, vocab - 100) for _ in range(length)]
            llm.add_request(f"p{i}", ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def drain() -> None:
        while llm.has_unfinished_requests():
            llm.step()

    if warm is None:
        add(1)
        started = time.perf_counter()
        drain()
        found = {"wall_us": round((time.perf_counter() - started) * 1e6)}
        add(1)
        found |= PROFILERS[backend](drain, 1)
        return found
    add(warm + 4 * STEPS)
    for _ in range(warm):
        llm.step()
    waited, read = [0.0], llm.backend.read

    def timed(x: Any) -> Any:
        started = time.perf_counter()
        try:
            return read(x)
        finally:
            waited[0] += time.perf_counter() - started

    llm.backend.read = timed
    started = time.perf_counter()
    for _ in range(STEPS):
        llm.step()
    wall, llm.backend.read = time.perf_counter() - started, read
    found = {"wall_us": round(wall / STEPS * 1e6), "waited_us": round(waited[0] / STEPS * 1e6)}
    found |= PROFILERS[backend](lambda: [llm.step() for _ in range(STEPS)], STEPS)
    drain()
    return found


def profile_torch(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    return busiest([(e.name, e.device_time_total) for e in on_device], steps)


def profile_jax(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    import tempfile
    from pathlib import Path

    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        # the lines of a GPU that are no streams tell the same kernels again, by module and operation
        lines = [x for p in planes if p.name.startswith("/device:GPU") for x in p.lines if x.name.startswith("Stream")]
        return busiest([(e.name, e.duration_ns / 1000) for line in lines for e in line.events], steps)


def busiest(events: list[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Of (kernel, microseconds): what a step takes in all, and (microseconds, launches, kernel) of the largest."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, microseconds in events:
        times[name][0] += microseconds / steps
        times[name][1] += 1 / steps
    rows = sorted(((round(us, 1), round(n, 1), name[:70]) for name, (us, n) in times.items()), reverse=True)
    launches = round(sum(n for _, n in times.values()))
    return {"device_us": round(sum(us for us, _ in times.values()), 1), "launches": launches, "kernels": rows[:22]}


PROFILERS = {"torch": profile_torch, "jax": profile_jax}
