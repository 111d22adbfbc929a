"""Microseconds of CPU time of one scheduling step, without a model: schedule, a fake step, update.

`requests` decode side by side; one that ends is replaced at once by a new one with the same prompt length, so that the
measurement holds admissions, block hashing and freeing as well as the steady state.

    python benchmarks/scheduler.py --steps 100000 --json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque
from collections.abc import Sequence

from octavo.engine.block_manager import BlockManager
from octavo.engine.limits import SchedulerConfig
from octavo.engine.plan import Plan
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler

BUDGET, MODEL_LEN = 2048, 4096  # tokens


def make_scheduler(
    requests: int, windows: Sequence[int | None], block_size: int, caching: bool, policy: str
) -> Scheduler:
    """A scheduler whose pools hold all requests at their longest, and half of that again for the prefix cache."""
    num_blocks = requests * (MODEL_LEN // block_size) * 3 // 2 + 1
    blocks = BlockManager(windows, [num_blocks] * len(windows), block_size, caching, BUDGET)
    return Scheduler(SchedulerConfig(requests, BUDGET, MODEL_LEN, policy=policy), blocks)


def keep_busy(scheduler: Scheduler, target: int, made: int, prompt_len: int, max_tokens: int) -> int:
    """Adds requests until `target` are alive; returns how many have been made. No two prompts begin alike."""
    while len(scheduler.alive) < target:
        # lengths differ, so that requests do not all end in the same step
        length = max_tokens // 2 + made * 7919 % (max_tokens // 2 + 1)
        prompt = [made % 50000, made // 50000] + [1] * (prompt_len - 2)
        scheduler.add(Request(str(made), prompt, SamplingParams(max_tokens=length, temperature=0.0), arrival=made))
        made += 1
    return made


def measure(scheduler: Scheduler, steps: int, requests: int, prompt_len: int, max_tokens: int, overlap: bool) -> float:
    """CPU seconds of all steps, new requests included."""
    made, unread = 0, deque[Plan]()
    start = time.process_time()
    for step in range(steps):
        made = keep_busy(scheduler, requests, made, prompt_len, max_tokens)
        plan = scheduler.schedule()
        if plan is not None:
            unread.append(plan)
        if unread and (not overlap or plan is None or len(unread) > 1):
            read = unread.popleft()
            scheduler.update(read, [step & 32767] * len(read.sampled))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens, at least 2")
    parser.add_argument("--max-tokens", type=int, default=1024, help="the longest output; the shortest is half of it")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--window", type=int, help="adds a second cache group with this window")
    parser.add_argument("--policy", choices=["fcfs", "priority"], default="fcfs")
    parser.add_argument("--no-caching", action="store_true", help="turns prefix caching off")
    parser.add_argument("--overlap", action="store_true", help="reads each step after the next one is planned")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    windows = [None] if args.window is None else [None, args.window]
    scheduler = make_scheduler(args.requests, windows, args.block_size, not args.no_caching, args.policy)
    seconds = measure(scheduler, args.steps, args.requests, args.prompt_len, args.max_tokens, args.overlap)
    result = {
        "us_per_step": round(seconds / args.steps * 1e6, 1),
        "minutes_per_million_steps": round(seconds / args.steps * 1e6 / 60, 2),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **vars(args),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['us_per_step']} us a step, {result['minutes_per_million_steps']} minutes a million steps")


if __name__ == "__main__":
    main()
