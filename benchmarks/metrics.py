"""Microseconds of CPU time that metrics add to a step of decoding requests, and milliseconds of a scrape.

No model: schedule, a fake step, update, and what LLM asks of the metrics around them. Requests that end are replaced:
admissions and ends are in it.

    python benchmarks/metrics.py --requests 64
"""

from __future__ import annotations

import argparse
import json
import time

from scheduler import make_scheduler

from octavo.engine.metrics import EngineMetrics
from octavo.engine.metrics_table import METRICS
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams


def measure(requests: int, steps: int, max_tokens: int) -> tuple[float, EngineMetrics]:
    """CPU seconds spent in the metrics over all steps, and the metrics."""
    scheduler = make_scheduler(requests, [None], 16, True, "fcfs")
    metrics, spent, made = EngineMetrics(scheduler), 0, 0
    for _ in range(steps):
        while len(scheduler.alive) < requests:
            params = SamplingParams(max_tokens=max_tokens // 2 + made * 7919 % (max_tokens // 2), temperature=0.0)
            request = Request(str(made), [made % 50000, made // 50000] + [1] * 126, params, arrival=made)
            scheduler.add(request)
            start, made = time.process_time_ns(), made + 1
            metrics.queued(request)
            spent += time.process_time_ns() - start
        plan = scheduler.schedule()
        assert plan is not None
        start = time.process_time_ns()
        metrics.planned(plan)
        spent += time.process_time_ns() - start
        touched = scheduler.update(plan, [1] * len(plan.sampled))
        start = time.process_time_ns()
        metrics.read(touched)
        spent += time.process_time_ns() - start
    return spent / 1e9, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    seconds, metrics = measure(args.requests, args.steps, args.max_tokens)
    start = time.process_time()
    for m in METRICS:
        m.read(metrics)
    scrape = time.process_time() - start
    result = {"us_per_step": round(seconds / args.steps * 1e6, 1), "scrape_ms": round(scrape * 1e3, 3)}
    print(json.dumps(result | vars(args)))


if __name__ == "__main__":
    main()
