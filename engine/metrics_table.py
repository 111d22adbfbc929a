"""The metrics by name: what each means, and where it is read. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .metrics import Buckets, EngineMetrics
from .plan import Reason

PREFIX, OWN_PREFIX = "vllm:", "octavo:"
ENDS = tuple(map(str, (Reason.STOP, Reason.LENGTH, Reason.REPETITION, Reason.ABORT, Reason.ERROR)))

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level


@dataclass(frozen=True)
class Metric:
    """One metric. `read` gives its number, its buckets, or with a `label` a number for each value of that.

    Those of METRICS are read from an EngineMetrics, those of POOL_METRICS from a tokenizer pool's stats.
    """

    name: str  # without the prefix; a counter's exposition adds _total
    kind: str  # gauge, counter or histogram
    doc: str
    read: Callable[[Any], float | Buckets | Mapping[str, float]]
    label: str | None = None
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        return self.prefix + self.name


def _sources(m: EngineMetrics) -> dict[str, float]:
    s = m.scheduler
    return {"local_compute": s.num_prompt_tokens, "local_cache_hit": s.num_hit_tokens}


METRICS = (
    Metric(
        "num_requests_running",
        "gauge",
        "requests that have a row, or of which nothing but the end is unread",
        lambda m: m.scheduler.num_running,
    ),
    Metric("num_requests_waiting", "gauge", "requests that have none", lambda m: len(m.scheduler.waiting)),
    Metric(
        "num_requests_waiting_by_reason",
        "gauge",
        "the same by why, as of the last plan: no_seat, no_room, no_budget, after_preemption hold up the whole queue; "
        "in_flight, sibling and the like one request; not_seen: it came later",
        lambda m: m.waiting_by_reason(),
        "reason",
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "part of the blocks in use, 0 to 1, of the fullest cache group",
        lambda m: m.scheduler.blocks.usage(),
    ),
    Metric(
        "num_preemptions", "counter", "requests that lost their blocks to others", lambda m: m.scheduler.num_preemptions
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "prompt tokens looked up in the prefix cache, at a request's first admission",
        lambda m: m.scheduler.num_queried_tokens,
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "of these, found there, or taken over from a sibling (n > 1)",
        lambda m: m.scheduler.num_hit_tokens,
    ),
    Metric("prompt_tokens", "counter", "prompt tokens computed or found", lambda m: sum(_sources(m).values())),
    Metric(
        "prompt_tokens_by_source",
        "counter",
        "the same by source: local_compute (computed, after a preemption again), local_cache_hit",
        _sources,
        "source",
    ),
    Metric("prompt_tokens_cached", "counter", "prompt tokens found", lambda m: m.scheduler.num_hit_tokens),
    Metric("generation_tokens", "counter", "tokens sampled and kept", lambda m: m.num_generation_tokens),
    Metric(
        "request_success",
        "counter",
        "requests that have ended, by stop, length, repetition, abort or error; each of n samples is one",
        lambda m: {reason: m.ends[reason] for reason in dict.fromkeys((*ENDS, *m.ends))},
        "finished_reason",
    ),
    Metric(
        "admission_rejections",
        "counter",
        "requests that the queue had no room for (max_num_queued_reqs); they are counted nowhere else",
        lambda m: m.num_rejected,
    ),
    Metric(
        "engine_sleep_state",
        "gauge",
        "1 for what the engine is: awake, weights_offloaded (level 1) or discard_all (level 2)",
        lambda m: {state: int(level == m.sleep_level) for level, state in enumerate(SLEEP_STATES)},
        "sleep_state",
    ),
    Metric("time_to_first_token_seconds", "histogram", "arrival to first token", lambda m: m.first_token),
    Metric("inter_token_latency_seconds", "histogram", "a token to the next", lambda m: m.inter_token),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "mean of that over one request, if it has two tokens",
        lambda m: m.per_token,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "arrival to end", lambda m: m.latency),
    Metric("request_queue_time_seconds", "histogram", "queued to first planned", lambda m: m.queue),
    Metric("request_prefill_time_seconds", "histogram", "first planned to first token", lambda m: m.prefill),
    Metric("request_decode_time_seconds", "histogram", "first token to last", lambda m: m.decode),
    Metric("request_inference_time_seconds", "histogram", "first planned to last token", lambda m: m.inference),
    Metric("request_prompt_tokens", "histogram", "tokens of a prompt", lambda m: m.prompt_lengths),
    Metric("request_generation_tokens", "histogram", "tokens of an output", lambda m: m.output_lengths),
    Metric(
        "request_max_num_generation_tokens",
        "histogram",
        "tokens of the longest of a prompt's n outputs",
        lambda m: m.longest_outputs,
    ),
    Metric("request_params_n", "histogram", "n of a prompt", lambda m: m.samples),
    Metric("request_params_max_tokens", "histogram", "max_tokens, where it is given", lambda m: m.max_tokens),
    Metric("request_num_preemptions", "histogram", "preemptions of one request", lambda m: m.preemptions),
    Metric(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "prompt tokens of a request that were not found",
        lambda m: m.computed_lengths,
    ),
    Metric("iteration_tokens_total", "histogram", "tokens computed in one step", lambda m: m.step_tokens),
)

# of an engine with a tokenizer pool; vLLM has none
POOL_METRICS = (
    Metric(
        "tokenizer_pool_queue_length",
        "gauge",
        "texts that no tokenizer process has taken yet",
        lambda m: m.queue_length,
        prefix=OWN_PREFIX,
    ),
    Metric(
        "tokenizer_pool_mean_wait_seconds",
        "gauge",
        "mean of how long a text waited for one, since the start",
        lambda m: m.mean_wait,
        prefix=OWN_PREFIX,
    ),
    Metric(
        "tokenizer_pool_restarts",
        "counter",
        "tokenizer processes that had to be replaced",
        lambda m: m.num_restarts,
        prefix=OWN_PREFIX,
    ),
)


# of an engine that counts them; read from its ExpertLoad
EXPERT_METRICS = (
    Metric(
        "expert_tokens",
        "counter",
        "tokens that went through an expert, all layers together",
        lambda m: m.by_expert(),
        "expert",
        OWN_PREFIX,
    ),
    Metric(
        "expert_balancedness",
        "gauge",
        "mean load of a layer's experts beside the greatest: 1 is even",
        lambda m: m.balancedness(),
        "layer",
        OWN_PREFIX,
    ),
)


# names of the tuning guides, exported as they are: no prefix, no _total
ALIASES = {
    "vllm_running_requests": "num_requests_running",
    "gpu_cache_usage": "kv_cache_usage_perc",
    "request_latency_seconds": "e2e_request_latency_seconds",
}
