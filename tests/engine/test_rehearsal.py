"""Kernels compiled ahead of a warm-up: what is rehearsed is what is launched, and nothing comes of it."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorder import graphs_on_a_cpu
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, spec_of, tokens, weights_of
from triton.backends.compiler import GPUTarget

from octavo.engine import LLM
from octavo.engine.backend_torch import TorchBackend
from octavo.engine.graph_torch import arrays_of, describe
from octavo.engine.parallel.pipeline import Stage
from octavo.engine.runner import Runner
from octavo.engine.warm_up import rehearsal
from octavo.kernels_triton import ahead, compiling, remembered
from octavo.kernels_triton.products import Packed
from octavo.models import qwen3_moe
from octavo.models.interface import Mixture, ModelSpec, Routing
from octavo.models.stage import stage_of, stage_tree


class Watched:
    """Ops that note what each is given: shapes, dtypes and static values."""

    def __init__(self, ops: Any, seen: list[Any]):
        self.ops, self.seen = ops, seen

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name == "xp" or not callable(op):
            return op

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "for_step":
                return Watched(op(*args), self.seen)
            given = [(x.shape, x.product) if isinstance(x, Packed) else x for x in (*args, *kwargs.values())]
            self.seen.append((name, describe(given, [])))
            return op(*args, **kwargs)

        return watched


def of_one_kind() -> ModelSpec:
    return spec_of(replace(EIGHT_HEADS, num_layers=3, windows=()))


def of_kinds() -> ModelSpec:
    """Six layers of four kinds: with and without a window, with and without experts."""
    config = replace(EIGHT_HEADS, num_layers=6, windows=(None, 8, None, 8, None, 8))
    return qwen3_moe.spec(config, Mixture(4, 24, (2, 3), Routing(2, normalise=True)))


@pytest.mark.parametrize(("make", "kinds"), [(of_one_kind, 1), (of_kinds, 4)])
def test_one_layer_of_each_kind_launches_what_all_do(make: Any, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    graphs_on_a_cpu(monkeypatch)
    llm = LLM(model, weights=weights_of(model), backend="torch", block_size=8, max_num_seqs=4, max_model_len=64,
              max_num_batched_tokens=32, num_gpu_blocks_override=10, warmup="lazy", threads=1)  # fmt: skip
    want = tokens(llm, PROMPTS[:2])
    rehearsed: list[Any] = []
    launched: list[Any] = []
    plain = llm.backend.ops
    state = [x.clone() for x in arrays_of(llm.runner.cache)]
    for seen, calls, run in ((rehearsed, rehearsal, "rehearse"), (launched, Runner.every_call, "prepare")):
        llm.backend.ops = Watched(plain, seen)
        llm.runner.use(llm.runner.model, llm.runner.layout)
        for program, xs in calls(llm.runner):
            getattr(program, run)(*xs)
        if run == "rehearse":
            for before, after in zip(state, arrays_of(llm.runner.cache), strict=True):
                # the null block, and the scratch row
                at = slice(1, None) if before.ndim > 2 else slice(None, -1)
                np.testing.assert_array_equal(before[at], after[at])
    assert {name for name, _ in rehearsed} >= {"einsum", "attend_new"}
    assert {*rehearsed} == {*launched}
    num_writes = [sum(name == "attend_new" for name, _ in seen) for seen in (rehearsed, launched)]
    # all are recorded, and one decode step, alone and joined in two ways, and one mixed step are run before
    assert (num_writes[0] + 4 * kinds) * len(model.attention) == num_writes[1] * kinds
    llm.backend.ops = plain
    llm.runner.use(llm.runner.model, llm.runner.layout)
    assert tokens(llm, PROMPTS[:2], GREEDY) == want


def test_missing_kernels_are_compiled_and_not_launched() -> None:
    """For an H200 that is not there, in a process of its own: here Triton is the interpreter."""
    script = Path(__file__).parents[1] / "kernels" / "rehearse_triton.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    first, then = done.stdout.split("rehearsed\n")
    kernels = ["norm_kernel", "qk_norm_kernel"]
    # made by a process; threads find them in any order
    found = [f"found {n}" for n in kernels]
    assert first.splitlines()[0] == "zeros True" and sorted(first.splitlines()[1:]) == found
    then, recalled = then.split("remembered ")
    known, larger = then.split("larger\n")
    assert known.splitlines() == [f"launched {n}" for n in (kernels[0], *kernels)]
    assert larger.splitlines() == ["made norm_kernel", "launched norm_kernel"]
    lines = recalled.splitlines()
    assert lines[0] == "False" and sorted(lines[1:3]) == found and lines[3] == "True"
    assert lines[4:7] == known.splitlines()
    assert lines[7:] == ["found norm_kernel", "launched norm_kernel", "missed norm_kernel", "changed False"]


def test_modules_of_kernels_want_nothing_of_torch() -> None:
    """The process that compiles imports them with an empty module in torch's place."""
    package = Path(compiling.__file__).parent
    modules = [p.stem for p in sorted(package.glob("*.py")) if re.search(r"^@(triton|gluon)\.jit", p.read_text(), re.M)]
    assert "fused" in modules and "hopper_kernels" in modules
    code = (
        f"import sys; sys.path[:] = {sys.path}; from importlib import import_module as load; "
        f"load('octavo.kernels_triton.compiling').without_torch(); "
        f"[load('octavo.kernels_triton.' + m) for m in {modules}]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_process_that_ends_early_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was asked for; the kernels are made where they are loaded."""
    monkeypatch.setattr(compiling, "CODE", "raise SystemExit(3)")
    with compiling.process(GPUTarget("cuda", 90, 32)) as ask:
        for _ in range(100):
            ask("m", "f", "x" * 4096)
            time.sleep(0.01)
    assert "ended with 3" in caplog.text


class Rehearsed:
    """Stands for Triton's side on a CPU: how often programs were rehearsed, and what is found missing later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.times, self.late = 0, []
        monkeypatch.setattr(ahead, "rehearsal", self.rehearsal)
        monkeypatch.setattr(remembered, "recall", lambda path, device: path.exists())
        monkeypatch.setattr(remembered, "noted", self.noted)

    @contextmanager
    def rehearsal(self, device: Any, told: Any) -> Iterator[None]:
        self.times += 1
        yield
        told(SimpleNamespace(module="m", name="f", jit_function=SimpleNamespace(cache_key="k")), "{}")

    @contextmanager
    def noted(self, kernels: list[Any]) -> Iterator[None]:
        yield
        kernels += self.late


def test_an_engine_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, seen = of_one_kind(), Rehearsed(monkeypatch)
    graphs_on_a_cpu(monkeypatch)

    def start(**arguments: Any) -> int:
        """How often that has rehearsed."""
        given = {"block_size": 8, "max_num_seqs": 2, "max_model_len": 32, "num_gpu_blocks_override": 10} | arguments
        llm = LLM(model, weights=weights_of(model), backend="torch", warmup="lazy", threads=1, **given)
        llm.backend.compiled, llm.backend.device = tmp_path, torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        before = seen.times
        llm.backend.rehearse(iter(()), llm.runner.recipe)
        llm.backend.precompile(iter(()), llm.runner.recipe)
        return seen.times - before

    assert [start(), start(), start(num_gpu_blocks_override=12)] == [1, 0, 0]
    assert [start(max_num_seqs=4), start(max_num_seqs=4)] == [1, 0]
    (tmp_path / "triton").rename(tmp_path / "lost")
    assert [start(), start()] == [1, 0]
    seen.late = [remembered.Kernel("m", "g", "k", "{}")]
    assert [start(), start()] == [0, 1]
    seen.late = []
    assert start() == 0


def test_a_stage_rehearses_what_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two stages: its rows come from the one before."""
    model = of_one_kind()
    graphs_on_a_cpu(monkeypatch)
    llm = LLM(model, weights=weights_of(model), backend="torch", block_size=8, max_num_seqs=4, max_model_len=64,
              max_num_batched_tokens=32, num_gpu_blocks_override=10, warmup="lazy", threads=1)  # fmt: skip
    layers, runner = range(1, 3), llm.runner
    stage = Stage(
        llm.backend, stage_of(model, layers), llm.layout, stage_tree(model, layers, runner.weights),
        num_blocks=(10,), max_num_seqs=4, max_model_len=64, shapes=replace(runner.shapes, joined=()),
    )  # fmt: skip
    seen: list[Any] = []
    for calls, run in ((rehearsal(stage), "rehearse"), (stage.every_call(), "prepare")):
        seen.append(set())
        for program, xs in calls:
            getattr(program, run)(*xs)
            seen[-1].add((getattr(program.fn.func, "func", program.fn.func).__name__, len(xs)))
    assert seen[0] == seen[1] and ("forward_all", 3) in seen[0]


def test_nothing_is_collected_while_programs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, precompile = of_one_kind(), [], TorchBackend.precompile
    graphs_on_a_cpu(monkeypatch)

    def watched(self: TorchBackend, *args: Any) -> None:
        seen.append(gc.isenabled())
        precompile(self, *args)

    monkeypatch.setattr(TorchBackend, "precompile", watched)
    llm = LLM(model, weights=weights_of(model), backend="torch", block_size=8, max_num_seqs=2, max_model_len=32,
              max_num_batched_tokens=32, num_gpu_blocks_override=10, warmup="lazy", threads=1)  # fmt: skip
    assert llm.runner.warm_up() > 0
    assert seen == [False] and gc.isenabled()
