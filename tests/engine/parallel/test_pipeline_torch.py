"""Pipelines of torch processes: the tokens of one device, what was planned, and no hang when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch  # noqa: F401
from embedded import embedded_model
from graphed import PLAIN
from oracle import greedy
from ranks import ASTRAY, FALLING
from recorder import graphs_on_a_cpu
from sleepy import SECONDS, SLEEPY, sleeps
from spied import FAILS, FOLDER, SPY, held, reports
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.engine.errors import DivergenceError, RankLostError

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2.json"
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def make(config: Any = TINY, pp: int = 2, **arguments: Any) -> LLM:
    """Chunks of 16 tokens, and room for so little that somebody is preempted; a batch a stage in flight."""
    few = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 16, "max_model_len": 120, "state_check_interval": 4}
    return engine(config, backend="torch", device="cpu", pipeline_parallel_size=pp, **(few | arguments))


def want(config: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(spec_of(config), numpy_weights(config), p, GREEDY.max_tokens) for p in prompts]


def check_tokens(llm: LLM, config: Any) -> None:
    """Against the oracle, with hits and preemptions; and of forks, against one device."""
    for _ in range(2):
        assert tokens(llm, PROMPTS[:5]) == want(config, PROMPTS[:5])
    assert llm.scheduler.num_preemptions > 0 and llm.scheduler.num_hit_tokens > 0
    one = engine(config, backend="torch", max_num_seqs=2)
    pair = [x.generate(PROMPTS[3:5], replace(RANDOM, n=2), use_tqdm=False) for x in (one, llm)]
    assert [[o.token_ids for o in r.outputs] for r in pair[0]] == [[o.token_ids for o in r.outputs] for r in pair[1]]


def assert_sends_planned(llm: LLM, said: dict[int, dict[str, Any]], steps: Counter[int]) -> None:
    """Who is not in the last stage sent each step's hidden rows once. `steps` by their padded number of tokens."""
    (planned,) = [c for c in llm.memory_plan.collectives if c.kind == "send"]
    tp = llm.config.tensor_parallel_size
    senders = [rank for rank in said if rank >= tp]
    assert len(senders) == planned.count * tp
    for rank, found in said.items():
        sent = {size: n for kind, names, size, n in found["counts"] if kind == "send" and names == ["pp"]}
        assert sent == ({planned.bytes_of(t, 0): n for t, n in steps.items()} if rank in senders else {})


def assert_sums_planned(llm: LLM, said: dict[int, dict[str, Any]], steps: Counter[int]) -> None:
    """The stages' first shards together did the sums of each step."""
    planned, found = Counter[int](), Counter[int]()
    for c in llm.memory_plan.collectives:
        if c.kind == "all-reduce":
            for num_tokens, count in steps.items():
                planned[c.bytes_of(num_tokens, 0)] += c.count * count
    for rank in range(0, llm.config.num_shards, llm.config.tensor_parallel_size):
        found.update({size: n for kind, _, size, n in said[rank]["counts"] if kind == "all-reduce"})
    assert found == planned


def assert_bytes_planned(llm: LLM, said: dict[int, dict[str, Any]]) -> None:
    """Of each rank: the last has the first stage."""
    tp, stages = llm.config.tensor_parallel_size, llm.memory_plan.stages
    for rank, found in said.items():
        stage = stages[len(stages) - 1 - rank // tp]
        first, _, last = stage.devices.partition("-")
        assert int(first) <= rank <= int(last or first)
        for name, planned in (("weights", stage.weights_bytes), ("cache", stage.cache_bytes)):
            assert abs(found[name] - planned) <= 0.02 * planned, (rank, name)


def counted_steps(llm: LLM) -> Counter[int]:
    """Counts the steps from now on, by their padded number of tokens."""
    steps: Counter[int] = Counter()
    launch = llm.runner.launch_forward

    def counted(plan: Any, taps: tuple[str, ...] = ()) -> Any:
        size = sum(c.num_tokens for c in plan.chunks)
        decode = all(c.num_tokens == 1 for c in plan.chunks)
        steps[size if decode else next(n for n in llm.runner.shapes.tokens if n >= size)] += 1
        return launch(plan, taps)

    llm.runner.launch_forward = counted
    return steps


def check(llm: LLM, config: Any, folder: Path) -> None:
    """Tokens, then what every rank held and sent."""
    steps = counted_steps(llm)
    check_tokens(llm, config)
    own = held(llm.runner)
    llm.shutdown()
    said = {0: own} | reports(folder)
    assert len(said) == llm.config.num_shards
    assert_sends_planned(llm, said, steps)
    assert_sums_planned(llm, said, steps)
    assert_bytes_planned(llm, said)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_two_stages_give_the_tokens_of_one_device(folder: Path) -> None:
    check(make(logits_processors=[SPY]), TINY, folder)


@pytest.mark.slow
@pytest.mark.parametrize("pp, tp", [(4, 1), (2, 2)])
def test_more_stages_and_shards(pp: int, tp: int, folder: Path) -> None:
    config = TINY if tp == 1 else EIGHT_HEADS
    check(make(config, pp, tensor_parallel_size=tp, logits_processors=[SPY]), config, folder)


def test_a_step_whose_head_fails_ends_its_requests_alone() -> None:
    """Others are in flight then, and their hidden rows on the way to nobody."""
    llm = make(logits_processors=[FALLING])
    for _ in range(2):
        with pytest.raises(ValueError, match="logits processor 'falling' returned"):
            llm.generate(PROMPTS[:4], [GREEDY, GREEDY, GREEDY, replace(GREEDY, extra_args={"falling": {}})],
                         use_tqdm=False)  # fmt: skip
        assert tokens(llm, PROMPTS[:3]) == want(TINY, PROMPTS[:3])
    # and one that is lost then
    kill(llm, 1)


def kill(llm: LLM, rank: int) -> None:
    """Ends a rank while a request runs; the engine must say so soon, whoever waits for whom."""
    assert llm.team is not None
    child = llm.team.peers[rank - 1].child
    assert child is not None
    for i in range(2):
        llm.add_request(str(i), PROMPTS[i], LONG)
    llm.step()
    os.kill(child.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises((RankLostError, RuntimeError)):
        for _ in range(200):
            llm.step()
    with pytest.raises(RankLostError, match=rf"rank {rank} \(process \d+\) ended with status -9"):
        tokens(llm, PROMPTS[:1])
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_first_stage_that_is_killed_ends_those_that_wait_for_others() -> None:
    """Rank 0 receives from rank 1, that from 2, and that from 3."""
    kill(make(pp=4), 3)


@pytest.mark.slow
def test_a_stage_that_fails_alone_ends_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILS, "6")
    llm = make(pp=3, logits_processors=[SPY])
    began = time.monotonic()
    with pytest.raises((RankLostError, RuntimeError)):
        tokens(llm, PROMPTS[:2])
    with pytest.raises(RankLostError, match="rank 2 failed: ValueError: the first stage fails alone"):
        tokens(llm, PROMPTS[:1])
    # of which it has three for the others to fail alike
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_shards_of_a_stage_that_differ_are_stopped() -> None:
    llm = make(EIGHT_HEADS, tensor_parallel_size=2, logits_processors=[ASTRAY], state_check_interval=8)
    params = replace(GREEDY, extra_args={"astray": {}}, max_tokens=80)
    with pytest.raises(DivergenceError, match="the rows of rank 1 differ from those of rank 0 behind step"):
        llm.generate([PROMPTS[0]], params, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_in_two_stages(tp: int) -> None:
    embedded_model()
    entries = [e for e in json.loads(GOLDEN.read_text())["entries"] if len(e["ids"]) < 100][::8]
    llm = LLM("smollm2", backend="torch", device="cpu", pipeline_parallel_size=2, tensor_parallel_size=tp,
              max_model_len=256, max_num_seqs=8)  # fmt: skip
    outputs = llm.generate([e["ids"] for e in entries], replace(GREEDY, max_tokens=16), use_tqdm=False)
    llm.shutdown()
    for e, output in zip(entries, outputs, strict=True):
        got, golden = list(output.outputs[0].token_ids), e["tokens"][:16]
        at = next((i for i, (a, b) in enumerate(zip(got, golden, strict=False)) if a != b), None)
        assert at is None or e["gap"][at] < tolerance("float32", "tie"), e["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_work_at_the_same_time(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 80 % of what were ideal: all stages always at work, but for the first batch and the last."""
    sleeps(monkeypatch)
    llm = make(pp=pp, logits_processors=[SLEEPY], num_gpu_blocks_override=120, max_num_seqs=2 * pp)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompts = [[n, 1, 2] for n in range(2 * pp)]
    best = 0.0
    for _ in range(2):
        before, began = llm.scheduler.step, time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        took, steps = time.monotonic() - began, llm.scheduler.step - before
        assert 14 * pp <= steps < 16 * pp
        best = max(best, (steps + pp - 1) * SECONDS / took)
        if best > 0.8:
            break
    print(f"{pp} sleeping stages: {best:.0%} of ideal overlap; one after the other were {1 / pp:.0%}")
    assert best > 0.8


@pytest.mark.slow
def test_what_is_received_lies_where_graphs_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled ahead in every rank, for every shape; and as on a GPU, rank 0 puts nothing off."""
    recorder = graphs_on_a_cpu(monkeypatch)
    llm = make(logits_processors=[PLAIN], warmup="all", max_model_len=80, state_check_interval=0)
    llm.runner.puts_off = False
    before = llm.backend.num_compiles()
    assert tokens(llm, PROMPTS[:3]) == want(TINY, PROMPTS[:3])
    assert recorder.replays > 20 and llm.backend.num_compiles() == before > 0


@pytest.mark.slow
def test_what_goes_along_with_hidden_rows_is_planned(folder: Path) -> None:
    """Experts of one layer from the first two stages, of two from the third."""
    llm = tiny_moe.engine(backend="torch", device="cpu", pipeline_parallel_size=4, enable_return_routed_experts=True,
                          logits_processors=[SPY])  # fmt: skip
    steps = counted_steps(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    llm.shutdown()
    planned = Counter[int]()
    for c in llm.memory_plan.collectives:
        for num_tokens, count in steps.items():
            planned[c.bytes_of(num_tokens, 0)] += c.count * count
    found = Counter[int]()
    for said in reports(folder).values():
        found.update({size: n for kind, _, size, n in said["counts"] if kind == "send"})
    assert found == planned and len(llm.memory_plan.collectives) == 2


def check_reads(llm: LLM, config: Any) -> None:
    """Rows of all layers, of several prompts in chunks, beside others that are generated from."""
    layers, prompts = [*range(config.num_layers), -1], [PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    one = engine(config, backend="torch", device="cpu")
    llm.add_request("beside", PROMPTS[1], GREEDY)
    for a, b in zip(*(x.hidden_states(prompts, layers, use_tqdm=False) for x in (llm, one)), strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids and list(a.hidden_states) == layers
        for n, rows in b.hidden_states.items():
            np.testing.assert_allclose(a.hidden_states[n], rows, rtol=0, atol=tolerance("float32", "logits"))
    for a, b in zip(*(x.embed(prompts, pooling="mean", use_tqdm=False) for x in (llm, one)), strict=True):
        np.testing.assert_allclose(a.outputs.embedding, b.outputs.embedding, rtol=0, atol=1e-5)
    llm.abort("beside")
    assert tokens(llm, PROMPTS[:2]) == want(config, PROMPTS[:2])
    llm.shutdown()


def test_rows_of_all_layers_reach_rank_0() -> None:
    check_reads(make(), TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "more"),
    [
        (4, {}),
        (2, {"tensor_parallel_size": 2, "enable_sp": True}),
        (2, {"data_parallel_size": 2}),
    ],
    ids=["pp4", "tp-sp", "dp"],
)
def test_rows_of_all_layers_of_stages_with_shards_and_replicas(pp: int, more: dict[str, Any]) -> None:
    config = EIGHT_HEADS if "tensor_parallel_size" in more else TINY
    check_reads(make(config, pp, **more), config)
