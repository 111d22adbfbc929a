"""Writes docs/metrics.md: python -m octavo.engine.metrics_docs > docs/metrics.md"""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import LATENCY, PER_TOKEN, PHASE
from .metrics_table import ALIASES, EXPERT_METRICS, METRICS, POOL_METRICS, PREFIX, Metric

# vLLM's names that would never change here
LEFT_OUT = {
    "lora_requests_info": "there are no adapters yet",
    "external_prefix_cache_queries, external_prefix_cache_hits": "there is no second cache yet",
    "mm_cache_queries, mm_cache_hits": "there are no images yet",
    "spec_decode_num_drafts, spec_decode_num_draft_tokens, spec_decode_num_accepted_tokens": "nobody drafts yet",
    "corrupted_requests": "nobody looks for NaN in logits",
    "kv_block_lifetime_seconds, kv_block_idle_before_evict_seconds, kv_block_reuse_gap_seconds": "the block pool has "
    "no clock",
}

HEAD = """# Metrics

Made by `python -m octavo.engine.metrics_docs`; do not edit.

`LLM(..., disable_log_stats=False)` counts and times what the engine does, and logs one line every 10 seconds of work
(logger `octavo`). The default, as in vLLM's `LLM`, is off, and costs nothing.

```python
llm = LLM("smollm2", disable_log_stats=False)
llm.generate("The capital of France is")
for metric in llm.get_metrics():  # Counter, Gauge or Histogram, with name, labels and value; no library needed
    print(metric)
print(llm.metrics_text())  # what Prometheus scrapes
llm.metrics_registry()  # a prometheus_client registry of this engine's own, for an exporter of yours
```

`AsyncLLM` has the first two as coroutines. A request arrives there when its engine's process takes it, already
tokenised. `llm.get_metrics()` gives a `Histogram` a `quantile(0.99)`. Each `RequestOutput.metrics` has the
times of one request.

The names are vLLM's, its prefix `vllm:` too, so that dashboards and alerts written for it work unchanged; so are the
labels on each, `model_name` and `engine`, which is the replica's number (0 without `data_parallel_size`). In the text a
counter's name ends in `_total`. All times are read from one monotonic clock by
the loop that runs the steps: "planned" is when the scheduler's plan admits a request, and a token's time is when the
host reads it.

| Name | Kind | Label | What |
|---|---|---|---|"""

POOL_HEAD = """
With `tokenizer_pool_size` of 2 or more also, under octavo's own prefix:

| Name | Kind | Label | What |
|---|---|---|---|"""

EXPERT_HEAD = """
With `expert_load_metrics=True`, of a model with experts, counted on the device and read when somebody asks:

| Name | Kind | Label | What |
|---|---|---|---|"""

TAIL = """
`vllm:cache_config_info` is a gauge of 1 whose labels say how the cache is set up.

## What adds up

- queue + prefill + decode is at most e2e of each request; inference is prefill + decode.
- `prefix_cache_hits` is at most `prefix_cache_queries`; the sources of `prompt_tokens_by_source` make `prompt_tokens`.
- Requests queued less those that have ended (`request_success` over all reasons) are running or waiting.
- Aborted and failed requests are counted in `request_success` alone: what was cut short says nothing of how long one
  takes.

## How exact P95 and P99 are

Time to first token, end-to-end and inter-token latency have ten buckets a decade, each bound at most 1.28 times the one
before: a quantile read from them is within 28 % of the exact one, mostly much closer since it is interpolated. The four
phases have five a decade (a factor of 1.6).

| Bounds | From | To | Buckets |
|---|---|---|---|
{bounds}

```
histogram_quantile(0.99, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))
```

## Other names

The tuning guides' names are exported beside them, as they are.

| Name | Is |
|---|---|
{aliases}

## Of vLLM's names, not exported

Nothing is exported that never changes.

| Name | Why |
|---|---|
{left_out}
"""


def markdown() -> str:
    """docs/metrics.md."""
    rows, pool, experts = _rows(METRICS), _rows(POOL_METRICS), _rows(EXPERT_METRICS)
    bounds = (("TTFT, end-to-end", LATENCY), ("inter-token, per output token", PER_TOKEN), ("phases", PHASE))
    tail = TAIL.format(
        bounds="\n".join(f"| {name} | {b[0]:g} s | {b[-1]:g} s | {len(b)} |" for name, b in bounds),
        aliases="\n".join(f"| `{old}` | `{PREFIX}{name}` |" for old, name in ALIASES.items()),
        left_out="\n".join(f"| {_codes(names)} | {why} |" for names, why in LEFT_OUT.items()),
    )
    return "\n".join([HEAD, *rows, POOL_HEAD, *pool, EXPERT_HEAD, *experts, tail])


def _rows(metrics: Sequence[Metric]) -> list[str]:
    return [f"| `{m.full_name}` | {m.kind} | {f'`{m.label}`' if m.label else ''} | {m.doc} |" for m in metrics]


def _codes(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    print(markdown(), end="")
