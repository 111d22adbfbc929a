"""Requests sent to an engine at once, and when each of their tokens came."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..collector import Seldom
from ..llm import LLM
from ..progress import Progress
from ..sampling_params import RequestOutputKind, SamplingParams
from .workloads import Workload

PERCENTILES = (10, 25, 50, 75, 90, 99)  # as vLLM prints them


@dataclass
class Timed:
    """One request: when its tokens came, in seconds since the first request was asked for."""

    num_prompt_tokens: int
    times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [b - a for a, b in zip(self.times, self.times[1:])]


@dataclass(frozen=True)
class Run:
    """Some requests, all asked for at once, from then to the last token."""

    seconds: float
    requests: list[Timed]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(r.num_prompt_tokens for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(r.times) for r in self.requests)


def run(llm: LLM, asked: Workload, *, detokenize: bool = True, bar: Progress | None = None) -> Run:
    """Greedy, end-of-text ignored. Raises ValueError for what can never be served, RuntimeError if a request ends
    without all of its tokens."""
    found: dict[str, Timed] = {}
    started = time.perf_counter()
    kind = RequestOutputKind.DELTA
    try:
        for i, (ids, count) in enumerate(asked):
            params = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=detokenize, output_kind=kind
            )
            llm.add_request(f"bench-{i}", {"prompt_token_ids": ids}, params)
            found[f"bench-{i}"] = Timed(len(ids))
        with Seldom():
            while llm.has_unfinished_requests():
                outputs = llm.step()
                now, new = time.perf_counter() - started, 0
                for output in outputs:
                    count = len(output.outputs[0].token_ids)
                    found[output.request_id].times += [now] * count
                    new += count
                if bar:
                    bar.advance(new, sum(output.finished for output in outputs))
    finally:
        llm.abort(list(found))
    seconds = time.perf_counter() - started
    for timed, (_, count) in zip(found.values(), asked, strict=True):
        if len(timed.times) != count:
            raise RuntimeError(f"a request got {len(timed.times)} tokens, expected {count}")
    return Run(seconds, list(found.values()))


def check(llm: LLM, asked: Workload) -> None:
    """Raises ValueError for requests that would not get all of their tokens."""
    longest = llm.memory_plan.max_model_len
    for ids, count in asked:
        if len(ids) + count > longest:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {count} to make are longer than max_model_len {longest}: ask for "
                "fewer, or raise it"
            )


def latency(
    llm: LLM, asked: Workload, *, warmup: int, iterations: int, detokenize: bool = True, progress: bool = False
) -> dict[str, Any]:
    """One batch, again and again: seconds of each after the first `warmup`; times to first tokens and between tokens.

    Keys are those of vLLM's `vllm bench latency`, and more; seconds where none says milliseconds.
    """
    runs, compiles = [], 0
    with Progress(warmup + iterations, progress) as bar:
        for i in range(warmup + iterations):
            if i == warmup:
                compiles = llm.backend.num_compiles()
            runs.append(run(llm, asked, detokenize=detokenize))
            bar.advance(runs[-1].num_output_tokens, 1)
    runs = runs[warmup:]
    latencies = [r.seconds for r in runs]
    tokens = sum(r.num_output_tokens for r in runs)
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
        "output_tokens_per_second": tokens / sum(latencies),
        "latency_ms": _summary([1e3 * s for s in latencies]),
        **_token_times(runs),
        "num_compiles": llm.backend.num_compiles() - compiles,
        "latencies": latencies,
    }


def throughput(llm: LLM, asked: Workload, *, detokenize: bool = True, progress: bool = False) -> dict[str, Any]:
    """All requests at once: how many requests and tokens a second; how long single ones took, waiting included.

    Keys are those of vLLM's `vllm bench throughput`, and more.
    """
    compiles, preemptions = llm.backend.num_compiles(), llm.get_stats().num_preemptions
    with Progress(len(asked), progress) as bar:
        found = run(llm, asked, detokenize=detokenize, bar=bar)
    num_in, num_out, seconds = found.num_prompt_tokens, found.num_output_tokens, found.seconds
    return {
        "elapsed_time": seconds,
        "num_requests": len(asked),
        "num_prompt_tokens": num_in,
        "num_output_tokens": num_out,
        "total_num_tokens": num_in + num_out,
        "requests_per_second": len(asked) / seconds,
        "tokens_per_second": (num_in + num_out) / seconds,
        "output_tokens_per_second": num_out / seconds,
        "latency_ms": _summary([1e3 * r.times[-1] for r in found.requests]),
        **_token_times([found]),
        "num_compiles": llm.backend.num_compiles() - compiles,
        "num_preemptions": llm.get_stats().num_preemptions - preemptions,
    }


def _token_times(runs: Iterable[Run]) -> dict[str, Any]:
    requests = [r for each in runs for r in each.requests]
    return {
        "ttft_ms": _summary([1e3 * r.first for r in requests]),
        "itl_ms": _summary([1e3 * gap for r in requests for gap in r.gaps]),
    }


def _summary(values: Sequence[float]) -> dict[str, float] | None:
    """None if there are no values: requests of one token have no time between tokens."""
    if not values:
        return None
    return {"mean": sum(values) / len(values)} | {f"p{p}": percentile(values, p) for p in (50, 90, 99)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many per cent lie, between two values by a straight line."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
