"""Where a step goes: wall time, waiting for the device, and kernels by name with microseconds and launches."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..collector import Seldom
from ..llm import LLM
from ..sampling_params import SamplingParams

STEPS = 8
# name: requests, prompt tokens, how many steps until the measured ones; None: the prefill itself
CASES = {
    "decode 1": (1, 128, 20),
    "decode 64": (64, 128, 20),
    "decode 256": (256, 512, 40),
    "prefill 2 x 4096": (2, 4096, None),
}


def profile(llm: LLM, vocab: int) -> dict[str, Any]:
    """Of each case: microseconds a step, of which the host waited, and what ran on the GPU."""
    return {name: profile_case(llm, vocab, *case) for name, case in CASES.items()}


def profiler(backend: str) -> Any:
    """The backend's `events` and `peak_memory`."""
    return import_module(f"..profile_{backend}", __name__)


def profile_case(llm: LLM, vocab: int, count: int, length: int, warm: int | None) -> dict[str, Any]:
    rng, events = random.Random(count), profiler(llm.backend.name).events

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
        found |= busiest(events(drain), 1)
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
    # as `generate` runs them
    with Seldom():
        for _ in range(STEPS):
            llm.step()
    wall, llm.backend.read = time.perf_counter() - started, read
    found = {"wall_us": round(wall / STEPS * 1e6), "waited_us": round(waited[0] / STEPS * 1e6)}
    found |= busiest(events(lambda: [llm.step() for _ in range(STEPS)]), STEPS)
    drain()
    return found


def busiest(events: Sequence[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Of (kernel, microseconds): what a step takes in all, and (microseconds, launches, kernel) of the largest."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, microseconds in events:
        times[name][0] += microseconds / steps
        times[name][1] += 1 / steps
    rows = sorted(((round(us, 1), round(n, 1), name[:70]) for name, (us, n) in times.items()), reverse=True)
    launches = round(sum(n for _, n in times.values()))
    return {"device_us": round(sum(us for us, _ in times.values()), 1), "launches": launches, "kernels": rows[:22]}
