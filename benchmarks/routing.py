"""Routing between replicas: the plain rule beside the prefix-aware one (docs/decisions/027).

In the simulator: the production schedulers and routings, on a virtual clock; a step takes what Cost says, so figures
compare rules and not machines. Workloads: `chat`, many system prompts of different popularity; `one`, all begin with
the same; `none`, nothing is shared; `turns`, conversations that come back longer.

With --engine: SmolLM2 on this machine's CPU, a process and a thread a replica, the rules in turns on one engine: waves
of requests, each with one of a few system prompts.

    python benchmarks/routing.py --replicas 4 --json
    python benchmarks/routing.py --replicas 2 --engine
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence

from octavo.engine import LLM, SamplingParams, routing
from octavo.engine.lab.quantiles import Quantiles
from octavo.engine.lab.rerun import quiet
from octavo.engine.lab.simulate import Arrival, Cost, Simulation, family_of, make_scheduler

BLOCKS, SEATS, BUDGET, MODEL_LEN = 4096, 64, 2048, 8192  # of each replica


def arrivals(workload: str, count: int, rate: float, seed: int) -> Iterator[Arrival]:
    """Requests at random times, `rate` a second; 0: all at once."""
    rng, now = random.Random(seed), 0.0
    for i in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        tail, output = rng.randint(20, 200), rng.randint(50, 200)
        if workload == "chat":
            # the k-th most popular of 100 is asked 1 / k as often as the first
            which = int(100 ** rng.random())
            length = 500 + 37 * which % 1500
            yield Arrival(now, length + tail, output, f"system {which}", length)
        elif workload == "one":
            yield Arrival(now, 1500 + tail, output, "system", 1500)
        elif workload == "turns":
            # each of 50 users comes back with all that was said
            turn, user = divmod(i, 50)
            yield Arrival(now, 200 + 150 * turn + tail, output, f"user {user}", 200 + 150 * turn)
        else:
            yield Arrival(now, 300 + tail, output)


def simulate(rule: str, trace: Sequence[Arrival], replicas: int) -> dict[str, float]:
    """Hit rate, seconds until the last token, and latencies, of one rule."""
    schedulers = [
        make_scheduler(BLOCKS, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, max_model_len=MODEL_LEN)
        for _ in range(replicas)
    ]
    simulations = [Simulation(s, Cost()) for s in schedulers]
    ttft, latency = Quantiles(), Quantiles()
    for s in simulations:
        s.report.ttft, s.report.latency = ttft, latency
    chooses = routing.ROUTINGS[rule](schedulers)
    with quiet():
        for number, a in enumerate(trace):
            for s in simulations:
                s.run_until(a.arrival)
            family = family_of(a, number)
            simulations[chooses.choose(family)].add(family, a.arrival)
        for s in simulations:
            s.run_until(float("inf"))
    hits, asked = sum(s.num_hit_tokens for s in schedulers), sum(s.num_queried_tokens for s in schedulers)
    seconds = max(s.clock for s in simulations)
    num_tokens = sum(s.report.num_tokens for s in simulations)
    return {
        "hit_rate": hits / asked,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "ttft_mean": ttft.total / ttft.count,
        "ttft_p99": ttft.quantile(0.99),
        "latency_mean": latency.total / latency.count,
    }


def measure(replicas: int, rounds: int, seed: int) -> None:
    """Prints hit rate and seconds of each rule, a line a round."""
    llm = LLM("smollm2", backend="torch", data_parallel_size=replicas, threads=1, max_num_seqs=8, max_model_len=1024,
              max_num_batched_tokens=512, kv_cache_memory_bytes=2**28)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for turn in range(rounds):
        rng = random.Random(seed + turn)
        systems = [[rng.randrange(1000, 40000) for _ in range(480)] for _ in range(3 * replicas)]
        waves = [
            [rng.choice(systems) + [rng.randrange(1000, 40000) for _ in range(20)] for _ in range(4 * replicas)]
            for _ in range(4)
        ]
        for rule, kind in routing.ROUTINGS.items():
            llm.routing = kind([r.scheduler for r in llm.replicas])
            llm.reset_prefix_cache()
            before, start = llm.get_stats(), time.perf_counter()
            for wave in waves:
                llm.generate([{"prompt_token_ids": ids} for ids in wave], params, use_tqdm=False)
            seconds, now = time.perf_counter() - start, llm.get_stats()
            hits, asked = now.num_hit_tokens - before.num_hit_tokens, now.num_queried_tokens - before.num_queried_tokens
            print(json.dumps({"round": turn, "rule": rule, "hit_rate": hits / asked, "seconds": seconds}), flush=True)
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rates", type=float, nargs="*", default=[0, 40, 80], help="requests a second; 0: at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true", help="run SmolLM2 instead of the simulator")
    parser.add_argument("--rounds", type=int, default=3, help="of the engine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.engine:
        measure(args.replicas, args.rounds, args.seed)
        return
    for workload in ("chat", "one", "turns", "none"):
        for rate in args.rates:
            trace = list(arrivals(workload, args.requests, rate, args.seed))
            for rule in routing.ROUTINGS:
                found = simulate(rule, trace, args.replicas)
                if args.json:
                    print(json.dumps({"workload": workload, "rate": rate, "rule": rule} | found))
                else:
                    values = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
                    print(f"{workload:6} {rate:5.0f}/s  {rule:12} {values}")


if __name__ == "__main__":
    main()
