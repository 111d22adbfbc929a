"""The collectives of a step as planned, as compiled (JAX) and as run (torch)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch  # noqa: F401
from tiny import EIGHT_HEADS, PROMPTS, engine
from typer.testing import CliRunner

from octavo.engine import LLM, SamplingParams
from octavo.engine.cli import app
from octavo.engine.parallel.devices import kind_of_step
from octavo.engine.warm_up import padding
from octavo.models.interface import Sampling, StepInput

DTYPES = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}
MODELS = {"dense": lambda **a: engine(EIGHT_HEADS, **a), "moe": lambda **a: tiny_moe.engine(**a)}
EP, SP = {"enable_expert_parallel": True}, {"enable_sp": True}


def planned(llm: LLM, num_tokens: int, num_rows: int, seldom: bool = False) -> Counter[tuple[str, int]]:
    """(kind, bytes) of each collective of a step, one that is greedy or one that wants logprobs."""
    found: Counter[tuple[str, int]] = Counter()
    kind = kind_of_step(llm.config, num_tokens)
    for c in llm.memory_plan.collectives:
        if c.where == ("tokens" if seldom else "logits") or c.steps not in ("all", kind):
            continue
        found[c.kind, c.bytes_of(num_tokens, num_rows)] += c.count
    return found


def compiled(program: Any, *args: Any) -> Counter[tuple[str, int]]:
    """The same, counted in the program that XLA made."""
    found: Counter[tuple[str, int]] = Counter()
    text = program.lower(*args).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter"
    for dtype, dims, kind in re.findall(rf"= \(?(\w+)\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", text):
        found[kind, DTYPES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n]))] += 1
    return found


@pytest.mark.parametrize(
    "name, more",
    [
        pytest.param("dense", {}, id="dense"),
        pytest.param("moe", {}, id="moe", marks=pytest.mark.slow),
        pytest.param("moe", EP, id="moe-ep", marks=pytest.mark.slow),
        pytest.param("dense", SP, id="dense-sp"),
        pytest.param("moe", EP | SP, id="moe-ep-sp", marks=pytest.mark.slow),
    ],
)
def test_xla_compiles_the_collectives_that_were_planned(name: str, more: dict[str, Any]) -> None:
    llm = MODELS[name](backend="jax", tensor_parallel_size=2, **more)
    runner, rows = llm.runner, np.arange(4, dtype=np.int32)
    inputs = padding(runner, 4, 4, True, runner.shapes.widths[0])
    found = compiled(runner.forward, runner.weights, runner.cache, inputs)
    hidden = np.zeros((4, llm.model.weights["embed"].shape[1]), np.float32)
    head = compiled(runner.head, runner.last_weights, runner.cache.rows, hidden, Sampling(rows, rows, "greedy"))
    assert found + head == planned(llm, 4, 4)
    head = compiled(runner.head, runner.last_weights, runner.cache.rows, hidden, Sampling(rows, rows, "sample"))
    assert found + head == planned(llm, 4, 4)
    for kind in (Sampling(rows, rows, "truncate"), Sampling(rows, rows, "greedy", num_logprobs=2)):
        head = compiled(runner.head, runner.last_weights, runner.cache.rows, hidden, kind)
        assert found + head == planned(llm, 4, 4, seldom=True)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, SP], ids=["whole", "sp"])
def test_the_programs_of_all_stages_have_the_collectives_that_were_planned(more: dict[str, Any]) -> None:
    llm = MODELS["dense"](backend="jax", tensor_parallel_size=2, pipeline_parallel_size=2, **more)
    first, last = llm.runner.stages
    calls = [next(call for call in stage.every_call() if is_step_of(4, call)) for stage in (first, last)]
    rows, hidden = np.arange(4, dtype=np.int32), np.zeros((4, llm.model.weights["embed"].shape[1]), np.float32)
    head = compiled(last.head, last.last_weights, last.cache.rows, hidden, Sampling(rows, rows, "greedy"))
    want = planned(llm, 4, 4)
    # rows that go on are in no program: the host puts them on the other devices
    sent = want.pop(("send", hidden.nbytes))
    assert sent == 1
    assert compiled(calls[0][0], *calls[0][1]) + compiled(calls[1][0], *calls[1][1]) + head == want


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_stages_of_replicas_that_share_experts_have_the_collectives_that_were_planned(tp: int) -> None:
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": tp}
    llm = MODELS["moe"](backend="jax", **sizes, **EP)
    first, last = llm.runner.stages
    calls = [next(call for call in stage.every_call() if is_step_of(4, call)) for stage in (first, last)]
    rows, hidden = np.arange(4, dtype=np.int32), np.zeros((2, 4, llm.model.weights["embed"].shape[1]), np.float32)
    sampling = last.same(Sampling(rows, rows, "greedy"))
    found = compiled(last.head, last.last_weights, last.cache.rows, hidden, sampling)
    for program, args in calls:
        found += compiled(program, *args)
    want = planned(llm, 4, 4)
    # of each replica as much
    assert want.pop(("send", hidden.nbytes // 2)) == 1
    assert found == want
    assert {kind for kind, _ in found} >= {"all-gather", "reduce-scatter"}
    there = [sorted(d.id for d in stage.cache.rows["tokens"].sharding.device_set) for stage in (first, last)]
    assert there == [devices_of(stage.devices) for stage in llm.memory_plan.stages]


def devices_of(names: str) -> list[int]:
    """Numbers of "0, 2" or "0-1, 4-5"."""
    ends = [list(map(int, part.split("-"))) for part in names.split(", ")]
    return [n for first, *last in ends for n in range(first, (last or [first])[0] + 1)]


def is_step_of(num_tokens: int, call: Any) -> bool:
    """Whether a warm-up's call is a decode step of so many tokens."""
    inputs = call[1][-1]
    return isinstance(inputs, StepInput) and inputs.decode and inputs.num_tokens == num_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, more",
    [("dense", {}), ("moe", {}), ("moe", EP), ("dense", SP), ("moe", EP | SP)],
    ids=["dense", "moe", "moe-ep", "dense-sp", "moe-ep-sp"],
)
def test_torch_runs_the_collectives_that_were_planned(name: str, more: dict[str, Any]) -> None:
    llm = MODELS[name](backend="torch", tensor_parallel_size=2, async_scheduling=False, **more)
    counts = llm.backend.mesh.counts  # pyright: ignore[reportAttributeAccessIssue]
    for rows in (3, 4):
        # hidden rows of three tokens cannot be shared by two
        for i in range(rows):
            llm.add_request(str(i), PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
        llm.step()
        before = Counter(counts)
        llm.step()
        found: Counter[tuple[str, int]] = Counter()
        for (kind, names, size), count in (counts - before).items():
            assert names == ("tp",)
            found[kind, size] += count
        assert found == planned(llm, rows, rows)
        llm.step()
    llm.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1002, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_plans_for_devices_that_are_not_there(folder: Path) -> None:
    words = ["plan", "--tp", "4", "--pp", "2", "--load-format", "dummy", "--backend", "torch", "--json", str(folder)]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert found["num_devices"] == 8
    assert [(s["devices"], s["layers"]) for s in found["stages"]] == [("4-7", "0-2"), ("0-3", "3-4")]
    # each device has a kv head of 8 (there are 2 for 4: stored twice), 2 query heads, 24 of 96, and 251 of 1,004 rows
    layer = 4 * (64 * 1 * 4 * 8 + 2 * 8 * 64 + 64 * 2 * 24 + 24 * 64 + 2 * 64)
    table, norm, ropes = 4 * 251 * 64, 4 * 64, 4 * 4
    assert [s["weights_bytes"] for s in found["stages"]] == [
        3 * layer + table + ropes,
        2 * layer + table + norm + ropes,
    ]
    blocks = found["groups"][0]["num_blocks"]
    assert [s["cache_bytes"] for s in found["stages"]] == [blocks * 16 * 2 * 8 * 4 * layers for layers in (3, 2)]
    each = {c["where"]: (c["kind"], c["count"], c["bytes_each"]) for c in found["collectives"]}
    assert each == {
        "embed": ("all-reduce", 1, 256), "out": ("all-reduce", 5, 256), "down": ("all-reduce", 5, 256),
        "tokens": ("all-gather", 1, 32), "logits": ("all-gather", 1, 4016), "stages": ("send", 1, 256),
    }  # fmt: skip
    assert found["collectives"][1]["step_bytes"] == 5 * 256 * found["max_num_seqs"]


def test_the_command_says_which_sizes_would_do(folder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--tp", "5", "--load-format", "dummy", str(folder)])
    assert result.exit_code == 1
    assert "num_kv_heads 2 is not divisible by tensor_parallel_size 5: 1, 2, 4, 8 would" in result.stderr


@pytest.mark.parametrize(
    ("tp", "more"),
    [(1, {}), pytest.param(2, {}, marks=pytest.mark.slow), pytest.param(2, SP, marks=pytest.mark.slow)],
)
def test_xla_compiles_the_collectives_of_replicas_that_share_experts(tp: int, more: dict[str, Any]) -> None:
    llm = tiny_moe.engine(backend="jax", data_parallel_size=2, tensor_parallel_size=tp, **EP, **more)
    runner, rows = llm.runner, np.arange(4, dtype=np.int32)
    inputs = runner.backend.replicas.same(padding(runner, 4, 4, True, runner.shapes.widths[0]))
    found = compiled(runner.forward, runner.weights, runner.cache, inputs)
    hidden = np.zeros((2, 4, llm.model.weights["embed"].shape[1]), np.float32)
    sampling = runner.backend.replicas.same(Sampling(rows, rows, "greedy"))
    found += compiled(runner.head, runner.last_weights, runner.cache.rows, hidden, sampling)
    assert found == planned(llm, 4, 4)
    assert {kind for kind, _ in found} >= {"all-gather", "reduce-scatter"}
