"""The simulator decides as an engine does, and its times are those of its cost model."""

from __future__ import annotations

import gc
import random
import sys

import numpy as np
import pytest
from embedded import embedded_model

from octavo.engine import LLM, SamplingParams
from octavo.engine.lab.cost import fit
from octavo.engine.lab.quantiles import Quantiles
from octavo.engine.lab.rerun import rerun
from octavo.engine.lab.simulate import Arrival, Cost, Simulation, cost_from, make_scheduler, read_trace
from octavo.engine.plan import Chunk, Plan

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
SECOND = Cost(1.0, 0, 0, 0)  # a step takes one


def run(arrivals, cost=SECOND, overlap=False, num_blocks=400, **limits):
    return Simulation(make_scheduler(num_blocks, **LIMITS | limits), cost, overlap=overlap).run(arrivals)


def test_one_request_takes_a_step_a_token():
    """Two chunks of prompt, then a step for each token but the first, which the last chunk gave."""
    report = run([Arrival(5.0, 100, 10)])
    assert (report.num_steps, report.num_tokens, report.num_requests) == (11, 10, 1)
    assert report.seconds == 16.0
    assert report.ttft.total == 2.0 and report.latency.total == 11.0 and report.per_token.total == 1.0


def test_costs_are_added_up():
    cost = Cost(base=1.0, per_token=0.1, per_sequence=0.01, per_context=0.001)
    plan = Plan(0, (Chunk("a", 0, 0, 5, True), Chunk("b", 1, 7, 1, True)))
    assert cost.seconds(plan) == pytest.approx(1.0 + 0.6 + 0.02 + 0.013)
    with pytest.raises(ValueError, match="per_tokn"):
        cost_from({"per_tokn": 1})
    with pytest.raises(ValueError, match="base -1"):
        Cost(base=-1)


def test_overlap_changes_no_count_of_tokens():
    rng = random.Random(3)
    arrivals = [Arrival(i * 0.1, rng.randint(1, 90), rng.randint(1, 30), n=rng.choice([1, 3])) for i in range(60)]
    one, other = (run(arrivals, Cost(0.1, 0, 0, 0), overlap, 20) for overlap in (False, True))
    assert one.num_tokens == other.num_tokens == sum(a.output * a.n for a in arrivals)
    assert one.num_preemptions and other.num_preemptions
    assert one.num_requests == other.num_requests == sum(a.n for a in arrivals)


def test_shared_prefixes_are_hit_and_others_are_not():
    shared = [Arrival(i * 100.0, 80, 2, prefix="a", prefix_len=64) for i in range(10)]
    assert run(shared).hit_rate == pytest.approx(9 * 64 / 800)
    assert run([Arrival(i * 100.0, 80, 2) for i in range(10)]).hit_rate == 0
    assert run(shared, num_blocks=400, enable_prefix_caching=False).hit_rate == 0


def test_quantiles_are_right_to_one_part_in_a_hundred():
    values = np.random.default_rng(0).lognormal(-3, 1.5, 20_000)
    q = Quantiles()
    for v in values.tolist():
        q.add(v)
    for part in (0.01, 0.5, 0.95, 0.99):
        assert q.quantile(part) == pytest.approx(np.quantile(values, part, method="inverted_cdf"), rel=0.01)
    assert q.quantile(1.0) == values.max()
    assert len(q.buckets) < 2000


def test_a_cost_model_is_found_again():
    rng = random.Random(1)
    cost = Cost(base=3e-3, per_token=2e-5, per_sequence=0.0, per_context=4e-8)
    plans = []
    for _ in range(200):
        chunks = [
            Chunk(str(i), i, rng.randint(0, 5000), rng.choice([1, 1, 64]), True) for i in range(rng.randint(1, 40))
        ]
        plans.append(Plan(0, tuple(chunks)))
    found = fit([(p, cost.seconds(p)) for p in plans])
    assert found.base == pytest.approx(cost.base, rel=1e-3) and found.per_context == pytest.approx(4e-8, rel=1e-3)
    assert found.per_token == pytest.approx(2e-5, rel=1e-3) and found.per_sequence < 1e-8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1"),
        ('{"arrival": 0, "prompt": 4}', "line 1.*output"),
        ('{"arrival": 0, "prompt": 4, "output": 0}', "output 0"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "prefix_len": 9}', "prefix_len 9 is more than"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "prefix_len": 2}', "prefix_len 2 needs a prefix"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "priority": "x"}', "priority 'x'"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "colour": 9}', "colour"),
        ('{"arrival": 2, "prompt": 4, "output": 1}\n{"arrival": 1, "prompt": 4, "output": 1}', "line 2 arrives at 1"),
    ],
)
def test_a_wrong_trace_is_named_by_line(tmp_path, text, message):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_trace(tmp_path / "trace"))


def test_what_is_no_text_is_named(tmp_path):
    (tmp_path / "trace").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="trace: line 1: 'utf-8' codec"):
        list(read_trace(tmp_path / "trace"))


def test_memory_does_not_grow_with_requests_that_have_ended():
    simulation = Simulation(make_scheduler(200, **LIMITS), Cost(0.01, 0, 0, 0))
    simulation.run(Arrival(i * 0.05, 20, 4) for i in range(3000))
    held = (
        simulation.arrived,
        simulation.first,
        simulation.unread,
        simulation.scheduler.alive,
        simulation.scheduler.events,
    )
    assert [len(x) for x in held[:4]] == [0, 0, 0, 0] and len(held[4]) < 10
    assert simulation.report.num_requests == 3000


@pytest.mark.slow
def test_memory_is_the_same_at_20_000_requests_and_at_100_000():
    """By counting what Python has allocated: one object kept of each request would be 80,000 more."""
    allocated = {}

    def arrivals():
        for i in range(100_001):
            if i in (20_000, 100_000):
                gc.collect()
                allocated[i] = sys.getallocatedblocks()
            yield Arrival(i * 0.02, 20 + i % 20, 2, prefix=str(i % 50), prefix_len=16)

    simulation = Simulation(make_scheduler(400, **LIMITS), Cost(1e-3, 0, 0, 0))
    assert simulation.run(arrivals()).num_requests == 100_001
    assert allocated[100_000] - allocated[20_000] < 8_000


@pytest.mark.slow
def test_the_decisions_of_a_real_run_are_made_again(tmp_path):
    """200 requests on SmolLM2 with hits, n and preemptions, added while others run."""
    path, rng = tmp_path / "steps.jsonl", random.Random(9)
    llm = LLM(
        embedded_model(), max_num_seqs=16, max_num_batched_tokens=128, max_model_len=256, num_gpu_blocks_override=24,
        step_log=str(path),
    )  # fmt: skip
    text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
    for i in range(200):
        params = SamplingParams(max_tokens=rng.randint(2, 24), temperature=0.7, seed=i, n=rng.choice([1, 1, 1, 2]))
        llm.add_request(str(i), text * rng.randint(1, 5) + str(i), params)
        for _ in range(rng.randint(0, 2)):
            llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.scheduler.num_preemptions and llm.scheduler.num_hit_tokens
    found = rerun(path)
    assert found.difference is None and len(found.requests) > 200
    planned = sum('{"plan"' in line[:10] for line in path.read_text().splitlines())
    assert found.num_steps == planned == llm.scheduler.step
