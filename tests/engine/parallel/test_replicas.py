"""An engine of several replicas, on virtual devices of one process: what everybody sees is what one replica gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import GREEDY, PROMPTS, TINY, spec_of, weights_of

from octavo.engine import LLM, QueueFullError, SamplingParams
from octavo.engine.config import engine_config
from octavo.engine.lab.plant import change_plans
from octavo.engine.lab.replaying import replay
from octavo.engine.routing import ROUTINGS, LeastLoaded

pytest.importorskip("jax")
MODEL = spec_of(replace(TINY, num_layers=1, windows=()))
SAMPLED = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=6, ignore_eos=True)


def make(size: int = 2, **more: Any) -> LLM:
    return LLM(
        MODEL, weights=weights_of(MODEL), backend="jax", data_parallel_size=size, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=32, max_model_len=128, num_gpu_blocks_override=64, warmup="lazy", **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> LLM:
    return make(disable_log_stats=False)


def finish(llm: LLM) -> dict[str, Any]:
    """The last output of each request that is queued."""
    found = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
    return found


def add(llm: LLM, *names: str, **more: Any) -> None:
    for i, name in enumerate(names):
        llm.add_request(name, PROMPTS[i], replace(GREEDY, max_tokens=6, ignore_eos=True, **more))


def places(llm: LLM) -> list[int]:
    """How many requests each replica has."""
    return [len(r.scheduler.alive) for r in llm.replicas]


def failing(f: Callable, error: BaseException, after: int = 0) -> Callable:
    """f, but the call behind the first `after` raises."""
    calls = iter(range(10**9))

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise error
        return f(*args, **kwargs)

    return run


def test_requests_spread_and_samples_of_one_stay_together(pair: LLM) -> None:
    for name in "abc":
        pair.add_request(name, PROMPTS[0], SAMPLED)
    assert places(pair) == [4, 2]
    assert {r.replica for r in pair.processor.requests("b")} == {1}
    outputs = finish(pair)
    first, *others = [[o.token_ids for o in output.outputs] for output in outputs.values()]
    assert others == [first, first]


def test_an_abort_frees_the_blocks_where_they_are(pair: LLM) -> None:
    add(pair, "a", "b", "c", "d")
    pair.step()
    assert places(pair) == [2, 2] and all(r.scheduler.blocks.usage() > 0 for r in pair.replicas)
    pair.abort(["b", "d"])
    assert places(pair) == [2, 0] and pair.replicas[1].scheduler.blocks.usage() == 0
    assert finish(pair).keys() == {"a", "c"}


def test_metrics_and_stats_are_of_all(pair: LLM) -> None:
    before = {m.labels["engine"]: m.value for m in pair.get_metrics() if m.name == "vllm:generation_tokens"}
    add(pair, "a", "b", "c")
    stats = pair.get_stats()
    assert (stats.num_waiting, stats.num_blocks, stats.max_num_seqs) == (3, 2 * 63, 4)
    finish(pair)
    after = {m.labels["engine"]: m.value for m in pair.get_metrics() if m.name == "vllm:generation_tokens"}
    assert {i: after[i] - before[i] for i in after} == {"0": 12, "1": 6}
    assert 'vllm:generation_tokens_total{engine="1",model_name="llama"}' in pair.metrics_text()
    assert pair.get_stats().num_free_blocks == 2 * 63


def test_limits_and_the_prefix_cache_are_those_of_each(pair: LLM) -> None:
    add(pair, "a", "b", "c", "d")
    pair.step()
    pair.set_limits(max_num_seqs=1)
    assert [len(r.scheduler.running) for r in pair.replicas] == [1, 1]
    assert not pair.reset_prefix_cache()
    finish(pair)
    pair.set_limits(max_num_seqs=4)
    assert all(r.scheduler.blocks.pools[0].holder for r in pair.replicas)
    assert pair.reset_prefix_cache()
    assert not any(r.scheduler.blocks.pools[0].holder for r in pair.replicas)


def test_one_queue_bounds_all(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "config", replace(pair.config, max_num_queued_reqs=1))
    pair.set_limits(max_num_seqs=1)
    add(pair, "a", "b", "c")
    with pytest.raises(QueueFullError, match="2 would wait"):
        add(pair, "d")
    assert finish(pair).keys() == {"a", "b", "c"}
    pair.set_limits(max_num_seqs=4)


@pytest.mark.parametrize("max_unread", [2, 1])
def test_a_step_that_fails_ends_the_requests_of_its_replica_alone(
    max_unread: int, pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pair
    monkeypatch.setattr(llm, "max_unread", max_unread)
    want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)]
    for at, where in ((1, "launch"), (0, "launch"), (1, "update")):
        for i, name in enumerate("abcd"):
            llm.add_request(name, PROMPTS[i], GREEDY)
        replica = llm.replicas[at]
        owner = replica.runner if where == "launch" else replica.scheduler
        error = RuntimeError("planted")
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, failing(getattr(owner, where), error, after=2))
            outputs, raised = {}, []
            while llm.has_unfinished_requests():
                try:
                    outputs |= {output.request_id: output.outputs[0] for output in llm.step()}
                except RuntimeError as caught:
                    raised.append(caught)
        assert raised == [error]
        lost = {0: "ac", 1: "bd"}[at]
        for i, name in enumerate("abcd"):
            assert outputs[name].finish_reason == ("error" if name in lost else "length")
            if name not in lost:
                assert outputs[name].token_ids == want[i]
        again = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)]
        assert again == want


class Slow:
    """A step in flight that is not there before the test says so."""

    is_there = False

    def __init__(self, pending: Any):
        self.plan, self.result = pending.plan, pending.result

    def is_ready(self) -> bool:
        return Slow.is_there


@pytest.mark.parametrize("max_unread", [2, 1])
def test_nobody_waits_for_the_slowest(max_unread: int, pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = pair.generate(PROMPTS[:2], replace(GREEDY, max_tokens=6, ignore_eos=True), use_tqdm=False)
    runner = pair.replicas[0].runner
    launch = runner.launch
    monkeypatch.setattr(pair, "max_unread", max_unread)
    monkeypatch.setattr(runner, "launch", lambda plan, mask=None: Slow(launch(plan, mask)))
    add(pair, "slow", "quick")
    (slow,), outputs = pair.processor.requests("slow"), dict[str, Any]()
    while "quick" not in outputs or not outputs["quick"].finished:
        assert not slow.output and len(pair.replicas[0].unread) <= max_unread
        outputs |= {output.request_id: output for output in pair.step()}
    monkeypatch.setattr(Slow, "is_there", True)
    outputs |= finish(pair)
    assert [outputs[name].outputs[0].token_ids for name in ("slow", "quick")] == [o.outputs[0].token_ids for o in want]


def test_a_step_in_flight_elsewhere_fails_for_who_asked_for_it(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, error = pair, RuntimeError("planted")
    want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)]
    # when the one launches its third step, that of the other is in flight
    for owner, where in ((llm.replicas[0].runner, "launch"), (llm.replicas[1].scheduler, "update")):
        monkeypatch.setattr(owner, where, failing(getattr(owner, where), error, after=2))
    with pytest.raises(RuntimeError, match="planted"):
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)] == want


def test_what_interrupts_between_replicas_ends_all(pair: LLM) -> None:
    llm = pair
    add(llm, "a", "b")
    llm.structured.take_failed = failing(llm.structured.take_failed, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    del llm.structured.take_failed
    outputs = finish(llm)
    assert [outputs[name].outputs[0].finish_reason for name in "ab"] == ["error", "error"]


@pytest.mark.slow
def test_each_replica_logs_what_one_engine_can_replay(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    llm = make(step_log=str(path))
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    for r in llm.replicas:
        assert r.step_log
        r.step_log.close()
    for log in (path, tmp_path / "steps.1.jsonl"):
        found = replay(log, model=MODEL, weights=weights_of(MODEL), progress=False)
        assert found.difference is None and found.num_tokens > 0


def test_who_looks_inside_wants_one_replica(pair: LLM) -> None:
    with pytest.raises(ValueError, match="data_parallel_size 2"):
        change_plans(pair, lambda plan: plan)


def test_prefixes_are_routed_on_where_there_are_any(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(pair.routing, LeastLoaded)
    with pytest.raises(ValueError, match="needs enable_prefix_caching"):
        engine_config(MODEL, data_parallel_size=2, data_parallel_routing="prefix", enable_prefix_caching=False)
    with pytest.raises(ValueError, match="'prefix' with data_parallel_size 1 chooses nothing"):
        engine_config(MODEL, data_parallel_routing="prefix")
    config = engine_config(MODEL, data_parallel_size=2, data_parallel_routing="prefix")
    routing = ROUTINGS[config.data_parallel_routing]
    monkeypatch.setattr(pair, "routing", routing([r.scheduler for r in pair.replicas]))
    llm = pair
    shared = [list(range(1, 41)), list(range(50, 90))]
    for turn in range(3):
        asked = [prompt[:40] + [turn + 1] for prompt in shared]
        outputs = llm.generate([{"prompt_token_ids": p} for p in asked], GREEDY, use_tqdm=False)
        assert turn == 0 or all(o.num_cached_tokens == 40 for o in outputs)
    assert all(r.scheduler.num_hit_tokens for r in llm.replicas)
