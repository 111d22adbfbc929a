"""What is counted and timed, against counts made by hand and times of a clock that the test turns."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
from collections import Counter as Tally
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from backends import BACKENDS
from batches import ENGINE, model_folder
from tiny import GREEDY, PROMPTS, RANDOM, TINY, VOCAB, engine, spec_of

from octavo.engine import LLM, AsyncLLM, QueueFullError, SamplingParams
from octavo.engine.metrics import LATENCY, PER_TOKEN, PHASE, Buckets, EngineMetrics
from octavo.engine.metrics_docs import markdown
from octavo.engine.metrics_export import Counter, Exporter, Gauge, Histogram, Metric
from octavo.engine.metrics_table import ALIASES, METRICS

PHASES = ("queue", "prefill", "decode")


def watched(**arguments) -> LLM:
    """A tiny engine that keeps metrics. One thread: this is about the host."""
    return engine(disable_log_stats=False, **({"threads": 1} if "torch" in BACKENDS else {}), **arguments)


class Clock:
    """One that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(monkeypatch: pytest.MonkeyPatch, **arguments) -> tuple[LLM, Clock]:
    """An engine whose requests come, and whose steps end, when the test's clock says."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    llm = watched(**arguments)
    assert llm.metrics is not None
    llm.metrics.clock = clock
    return llm, clock


def named(llm: LLM) -> dict[str, Metric]:
    """The metrics without labels of their own, by name."""
    return {m.name.removeprefix("vllm:"): m for m in llm.get_metrics()}


def value(llm: LLM, name: str, **labels: str) -> float:
    """The one number of that name and these labels."""
    (found,) = [m for m in llm.get_metrics() if m.name == f"vllm:{name}" and labels.items() <= m.labels.items()]
    assert isinstance(found, Counter | Gauge)
    return found.value


def histogram(llm: LLM, name: str) -> Histogram:
    found = named(llm)[name]
    assert isinstance(found, Histogram)
    return found


def finish(llm: LLM) -> None:
    while llm.has_unfinished_requests():
        llm.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_times_of_one_request(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    llm, clock = timed(monkeypatch, async_scheduling=overlap, max_num_seqs=1, max_num_batched_tokens=64)
    llm.add_request("long", PROMPTS[0], replace(GREEDY, max_tokens=4, ignore_eos=True))
    clock.now += 1
    llm.add_request("short", PROMPTS[1], replace(GREEDY, max_tokens=3, ignore_eos=True))
    steps = {}
    while llm.has_unfinished_requests():
        clock.now += 10
        for output in llm.step():
            steps.setdefault(output.request_id, []).append(clock.now)
            if output.finished:
                metrics = output.metrics
                assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)
                assert metrics.first_token_ts == steps[output.request_id][0]
                assert metrics.last_token_ts == steps[output.request_id][-1]
                arrived = {"long": 100, "short": 101}[output.request_id]
                assert metrics.queued_ts == arrived
                assert metrics.latency == pytest.approx(clock.now - arrived)
                assert metrics.first_token_latency == pytest.approx(steps[output.request_id][0] - arrived)
    # long is planned in the step that ends at 111; short when long's row is free
    first = {name: at[0] for name, at in steps.items()}
    last = {name: at[-1] for name, at in steps.items()}
    wait = {"long": 111 - 100, "short": first["short"] - (10 if overlap else 0) - 101}
    assert histogram(llm, "request_queue_time_seconds").sum == pytest.approx(sum(wait.values()))
    assert histogram(llm, "request_prefill_time_seconds").sum == (20 if overlap else 0)
    assert histogram(llm, "request_decode_time_seconds").sum == pytest.approx(30 + 20)
    assert histogram(llm, "request_time_per_output_token_seconds").sum == pytest.approx(20)
    assert histogram(llm, "inter_token_latency_seconds").count == 3 + 2
    assert histogram(llm, "inter_token_latency_seconds").sum == pytest.approx(50)
    ttft, e2e = histogram(llm, "time_to_first_token_seconds"), histogram(llm, "e2e_request_latency_seconds")
    assert ttft.sum == pytest.approx(first["long"] - 100 + first["short"] - 101)
    assert e2e.sum == pytest.approx(last["long"] - 100 + last["short"] - 101)
    assert ttft.count == e2e.count == 2


def test_counters_are_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = watched()
    outputs = llm.generate([PROMPTS[5], PROMPTS[5], PROMPTS[0]], replace(GREEDY, ignore_eos=True), use_tqdm=False)
    outputs += llm.generate(PROMPTS[2], replace(RANDOM, n=3, ignore_eos=True, max_tokens=5), use_tqdm=False)
    samples = [sample for o in outputs for sample in o.outputs]
    assert value(llm, "generation_tokens") == sum(len(s.token_ids) for s in samples) == 3 * 24 + 15
    assert value(llm, "request_success", finished_reason="length") == 6
    assert sum(llm.metrics.ends.values()) == 6
    cached, lengths = value(llm, "prompt_tokens_cached"), 41 + 41 + 9 + 3 * 43
    assert cached == value(llm, "prefix_cache_hits") <= value(llm, "prefix_cache_queries") == lengths
    assert value(llm, "prompt_tokens") == lengths
    assert value(llm, "prompt_tokens_by_source", source="local_cache_hit") == cached >= 40 + 2 * 40
    assert value(llm, "prompt_tokens_by_source", source="local_compute") == lengths - cached
    for name, total, count in (
        ("request_prompt_tokens", lengths, 6),
        ("request_generation_tokens", 3 * 24 + 15, 6),
        ("request_max_num_generation_tokens", 3 * 24 + 5, 4),
        ("request_params_n", 1 + 1 + 1 + 3, 4),
        ("request_params_max_tokens", 3 * 24 + 15, 6),
        ("request_num_preemptions", 0, 6),
        ("request_prefill_kv_computed_tokens", lengths - cached, 6),
    ):
        assert (histogram(llm, name).sum, histogram(llm, name).count) == (total, count), name
    # every token but the last of each request is computed once
    assert histogram(llm, "iteration_tokens_total").sum == lengths - cached + (3 * 24 + 15) - 6
    assert value(llm, "kv_cache_usage_perc") == 0 == value(llm, "num_requests_running")


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_hold_at_every_step(overlap: bool) -> None:
    """Too few blocks, aborts, n, a failing step: queued less ended are running or waiting, whatever happens."""
    llm, rng = (
        watched(num_gpu_blocks_override=20, async_scheduling=overlap),
        np.random.default_rng(3),
    )
    metrics, queued = llm.metrics, 0
    launch = llm.runner.launch

    def fail(*_):
        raise OSError("planted")

    for step in range(110):
        if step < 90 and rng.random() < 0.3:
            n = int(rng.integers(1, 4))
            prompt = PROMPTS[rng.integers(len(PROMPTS))]
            llm.add_request(f"r{step}", prompt, replace(RANDOM, n=n, max_tokens=int(rng.integers(1, 24))))
            queued += n
        if rng.random() < 0.05 and llm.processor.families:
            llm.abort(str(rng.choice(list(llm.processor.families))))
        llm.runner.launch = fail if step == 60 else launch
        try:
            llm.step()
        except OSError:
            assert step == 60
        s, found = llm.scheduler, llm.get_metrics()
        by_name = {m.name: m for m in found}
        ended = sum(m.value for m in found if m.name == "vllm:request_success")
        waiting = sum(m.value for m in found if m.name == "vllm:num_requests_waiting_by_reason")
        assert metrics.num_queued == queued
        assert queued - ended == len(s.running) + len(s.waiting)
        assert waiting == by_name["vllm:num_requests_waiting"].value == len(s.waiting)
        assert by_name["vllm:prefix_cache_hits"].value <= by_name["vllm:prefix_cache_queries"].value
        times = [histogram(llm, f"request_{phase}_time_seconds").sum for phase in PHASES]
        assert sum(times) <= by_name["vllm:e2e_request_latency_seconds"].sum + 1e-9
    finish(llm)
    assert metrics.ends["abort"] and metrics.ends["error"] and metrics.ends["length"]
    assert sum(metrics.ends.values()) == queued
    assert histogram(llm, "e2e_request_latency_seconds").count == metrics.ends["length"] + metrics.ends["stop"]
    assert value(llm, "num_preemptions") > 0
    assert not metrics.siblings, "of every family somebody waits to be counted"


def test_phases_of_each_request_fit_into_its_latency() -> None:
    llm = watched(num_gpu_blocks_override=20)
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        m = output.metrics
        assert m.queued_ts <= m.scheduled_ts <= m.first_token_ts <= m.last_token_ts
        assert m.last_token_ts - m.queued_ts <= m.latency + 1e-9
        assert m.arrival_time <= m.first_token_time <= m.finished_time


def test_a_stop_string_that_ends_with_the_last_token_counts_once_as_stop(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    llm = watched(tokenizer=str(tmp_path))
    params = replace(GREEDY, max_tokens=3)
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert llm.metrics.ends == {"length": 1}
    stop = f"w{whole.outputs[0].token_ids[-1]}"
    for max_tokens in (8, 3):
        (output,) = llm.generate(PROMPTS[0], replace(params, max_tokens=max_tokens, stop=stop), use_tqdm=False)
        assert output.outputs[0].stop_reason == stop
    assert llm.metrics.ends == {"length": 1, "stop": 2}


def test_who_waits_and_why() -> None:
    llm = watched(max_num_seqs=2, async_scheduling=False)
    reasons = lambda: llm.metrics.waiting_by_reason()  # noqa: E731
    for i in range(5):
        llm.add_request(str(i), PROMPTS[0], replace(GREEDY, max_tokens=4))
    assert reasons() == {"not_seen": 5}
    llm.step()
    assert reasons() == {"no_seat": 3}
    llm.abort(["0", "1", "2", "3", "4"])
    assert reasons() == {}
    llm.add_request("family", PROMPTS[2], replace(RANDOM, n=2, max_tokens=4))
    llm.add_request("second", PROMPTS[0], replace(GREEDY, max_tokens=4))
    llm.add_request("third", PROMPTS[0], replace(GREEDY, max_tokens=4))
    llm.step()
    # the first of the family computes the prompt for both
    assert reasons() == {"sibling": 1, "no_seat": 1}
    llm.abort("family")
    assert sum(reasons().values()) == len(llm.scheduler.waiting)
    finish(llm)


@pytest.mark.parametrize("bounds, ratio", [(LATENCY, 1.29), (PER_TOKEN, 1.29), (PHASE, 1.61)])
@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
def test_quantiles_are_exact_to_a_bucket(bounds: tuple[float, ...], ratio: float, q: float) -> None:
    rng = np.random.default_rng(5)
    exact, buckets = np.sort(rng.lognormal(math.log(bounds[len(bounds) // 2]), 1.0, 5000)), Buckets(bounds)
    for x in exact:
        buckets.add(float(x))
    names = [*map(repr, bounds), "+Inf"]
    h = Histogram("t", {}, 5000, buckets.total, dict(zip(names, np.cumsum(buckets.counts).tolist())))
    want, got = exact[math.ceil(q * 5000) - 1], h.quantile(q)
    above = next(b for b in bounds if b >= want)
    below = max(b for b in bounds if b < want)
    assert below <= got <= above and 1 < above / below < ratio
    assert buckets.total == pytest.approx(exact.sum())


def test_quantiles_at_the_edges() -> None:
    empty = Histogram("t", {}, 0, 0.0, {"1.0": 0, "2.0": 0, "+Inf": 0})
    assert empty.quantile(0.5) is None
    one = Histogram("t", {}, 4, 6.0, {"1.0": 0, "2.0": 4, "+Inf": 4})
    assert [one.quantile(q) for q in (0.25, 0.5, 1)] == [1.25, 1.5, 2.0]
    assert Histogram("t", {}, 1, 9.0, {"1.0": 0, "2.0": 0, "+Inf": 1}).quantile(0.99) == 2.0
    with pytest.raises(ValueError, match=r"1\.5"):
        one.quantile(1.5)


def test_percentiles_of_a_run_that_the_clock_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """P95 and P99 as Prometheus reads them off, against those of all the times that the steps took."""
    llm, clock = timed(monkeypatch, max_num_seqs=1, async_scheduling=False)
    rng, gaps, latencies = np.random.default_rng(1), [], []
    for i in range(25):
        llm.add_request(str(i), PROMPTS[1], replace(GREEDY, max_tokens=4, ignore_eos=True))
        start = clock.now
        for token in range(4):
            seconds = float(rng.lognormal(-3, 0.7))
            clock.now += seconds
            gaps += [seconds] if token else []
            llm.step()
        latencies.append(clock.now - start)
    for name, exact in (("inter_token_latency_seconds", gaps), ("e2e_request_latency_seconds", latencies)):
        h = histogram(llm, name)
        assert h.count == len(exact)
        for q in (0.95, 0.99):
            want = sorted(exact)[math.ceil(q * len(exact)) - 1]
            assert want / 1.29 < h.quantile(q) < want * 1.29


def test_the_exposition_says_the_same() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    llm = watched()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    families = {f.name: f for f in text_string_to_metric_families(llm.metrics_text())}
    ours = llm.get_metrics()
    for m in ours:
        samples = families[m.name].samples
        for suffix, want, labels in _samples(m):
            (found,) = [s for s in samples if s.name == m.name + suffix and s.labels == labels]
            assert found.value == want, m
    names = {m.name for m in ours} | {f"vllm:{m.name}" for m in METRICS}
    assert set(families) == names | set(ALIASES)
    for alias, name in ALIASES.items():
        assert families[alias].type == families[f"vllm:{name}"].type
        assert [s.value for s in families[alias].samples] == [s.value for s in families[f"vllm:{name}"].samples]
    assert families["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"] == "120,120"
    assert all("model_name" in s.labels for f in families.values() for s in f.samples)


def _samples(m: Metric) -> list[tuple[str, float, dict[str, str]]]:
    if isinstance(m, Histogram):
        buckets = [("_bucket", float(n), m.labels | {"le": le}) for le, n in m.buckets.items()]
        return [*buckets, ("_count", float(m.count), m.labels), ("_sum", m.sum, m.labels)]
    return [("_total" if isinstance(m, Counter) else "", float(m.value), m.labels)]


def test_values_are_picklable_and_the_registry_is_the_engines_own() -> None:
    one, two = watched(), watched()
    one.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert pickle.loads(pickle.dumps(one.get_metrics())) == one.get_metrics()
    labels = {"model_name": "llama", "engine": "0"}
    assert one.metrics_registry().get_sample_value("vllm:generation_tokens_total", labels) == 24
    assert two.metrics_registry().get_sample_value("vllm:generation_tokens_total", labels) == 0
    with pytest.raises(ValueError, match="Duplicated"):
        one.metrics_registry().register(two._exporter)


def test_a_model_has_the_name_that_it_was_given(tmp_path: Path) -> None:
    for model in (tmp_path / "m", str(tmp_path / "m")):
        assert _labels(model) == {"model_name": str(tmp_path / "m")}
    assert _labels(spec_of(TINY)) == {"model_name": "llama"}


def _labels(model) -> dict[str, str]:
    return Exporter(model, []).labels


def test_nothing_is_kept_when_statistics_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise AssertionError("asked while off")

    for name in ("__init__", "queued", "planned", "read", "ended"):
        monkeypatch.setattr(EngineMetrics, name, refuse)
    llm = engine()
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.metrics.scheduled_ts is None and output.metrics.latency > 0
    assert output.metrics.num_generation_tokens == 24
    for ask in (llm.get_metrics, llm.metrics_text, llm.metrics_registry):
        with pytest.raises(ValueError, match="disable_log_stats=False"):
            ask()


def test_every_metric_changes() -> None:
    """Nothing is exported that is never updated."""
    llm = watched(num_gpu_blocks_override=20, async_scheduling=False, max_num_queued_reqs=len(PROMPTS) - 2)
    seen: dict[str, set] = {}

    def look() -> None:
        for m in llm.get_metrics():
            now = m.count if isinstance(m, Histogram) else m.value
            seen.setdefault(m.name, set()).add((now, tuple(m.labels.values())))

    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, GREEDY)
    llm.add_request("n", PROMPTS[0], replace(RANDOM, n=2))
    look()
    with pytest.raises(QueueFullError):
        llm.add_request("rejected", PROMPTS[0], replace(RANDOM, n=3))
    while llm.has_unfinished_requests():
        look()
        llm.step()
    look()
    assert value(llm, "admission_rejections") == 3
    still = {name for name, values in seen.items() if len(values) < 2} - {"vllm:cache_config_info"}
    assert not still
    assert set(seen) == {"vllm:cache_config_info", *(f"vllm:{m.name}" for m in METRICS)}


def test_a_tokenizer_pool_is_measured(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    llm = watched(tokenizer=str(tmp_path), tokenizer_pool_size=2)
    assert _pooled(llm) == {"queue_length": 0, "mean_wait_seconds": 0, "restarts": 0}
    llm.generate(["w1 w2"] * 9, replace(GREEDY, max_tokens=1), use_tqdm=False)
    (pid, *_) = llm.tokenizer_pool.pids
    os.kill(pid, signal.SIGKILL)
    llm.generate(["w1 w2"] * 9, replace(GREEDY, max_tokens=1), use_tqdm=False)
    stats, found = llm.tokenizer_pool.stats, _pooled(llm)
    assert found == {"queue_length": 0, "mean_wait_seconds": stats.mean_wait, "restarts": stats.num_restarts}
    assert stats.num_taken >= 18 and found["mean_wait_seconds"] > 0
    assert f'octavo:tokenizer_pool_restarts_total{{model_name="llama"}} {stats.num_restarts}.0' in llm.metrics_text()
    assert not _pooled(watched(tokenizer=str(tmp_path)))
    llm.tokenizer_pool.close()


def _pooled(llm: LLM) -> dict[str, float]:
    return _of_pool(llm.get_metrics())


def _of_pool(found: list[Metric]) -> dict[str, float]:
    start = "octavo:tokenizer_pool_"
    return {m.name.removeprefix(start): m.value for m in found if m.name.startswith(start)}


def test_an_engine_in_another_process_is_measured_with_the_pool_in_this_one(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    llm = AsyncLLM(str(model_folder(tmp_path / "m")), disable_log_stats=False, tokenizer_pool_size=2, **ENGINE)

    async def work() -> tuple[list[Metric], str]:
        async for _ in llm.generate("w1 w2", SamplingParams(max_tokens=5, temperature=0), "a"):
            pass
        return await llm.get_metrics(), await llm.metrics_text()

    try:
        found, text = asyncio.run(work())
        stats = llm.tokenizer_pool.stats
    finally:
        llm.shutdown()
    assert _of_pool(found) == {"queue_length": 0, "mean_wait_seconds": stats.mean_wait, "restarts": 0}
    assert stats.num_taken == 1
    (generated,) = [m.value for m in found if m.name == "vllm:generation_tokens"]
    assert generated == 5
    families = {f.name: f.samples for f in text_string_to_metric_families(text)}
    assert families["vllm:generation_tokens"][0].value == 5
    assert families["octavo:tokenizer_pool_mean_wait_seconds"][0].value == stats.mean_wait
    assert {s.labels["model_name"] for samples in families.values() for s in samples} == {str(tmp_path / "m")}


def test_no_name_occurs_twice() -> None:
    assert max(Tally(m.name for m in METRICS).values()) == 1


def test_the_docs_are_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text() == markdown()
