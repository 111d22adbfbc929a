"""Programs as graphs, with a recorder that stands for CUDA's."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorder import Recorder, graphs_on_a_cpu
from tiny import GREEDY, PROMPTS, RANDOM, engine, tokens

from octavo.engine import backend_torch
from octavo.engine.backend_torch import TorchBackend, Void
from octavo.engine.batch import Shapes, at_least
from octavo.engine.graph_torch import GraphPool, Inputs
from octavo.models.interface import ArraySpec, CacheState, StepInput


def spec(*shape: int, dtype: str | None = None) -> ArraySpec:
    return ArraySpec(shape, (None,) * len(shape), dtype)


@pytest.mark.parametrize("warmup", ["lazy", pytest.param("all", marks=pytest.mark.slow)])
def test_an_engine_on_graphs_makes_the_same_tokens(monkeypatch: pytest.MonkeyPatch, warmup: str) -> None:
    """With preemptions, hits, forks and sampling; after a warm-up nothing is recorded."""
    options: dict[str, Any] = {"backend": "torch", "num_gpu_blocks_override": 15, "max_model_len": 104}
    want_greedy = tokens(engine(**options), PROMPTS[:6])
    want = tokens(engine(**options), PROMPTS[:3], replace(RANDOM, n=2))
    recorder = graphs_on_a_cpu(monkeypatch)
    llm = engine(**options, warmup=warmup)
    before = llm.backend.num_compiles()
    assert tokens(llm, PROMPTS[:6]) == want_greedy
    assert tokens(llm, PROMPTS[:3], replace(RANDOM, n=2)) == want
    assert llm.scheduler.num_preemptions > 0
    assert recorder.replays > 50
    assert (llm.backend.num_compiles() == before) == (warmup == "all")


@pytest.mark.parametrize("warmup", ["lazy", pytest.param("all", marks=pytest.mark.slow)])
def test_graphs_are_dropped_by_a_sleep_and_recorded_anew(monkeypatch: pytest.MonkeyPatch, warmup: str) -> None:
    """They hold addresses: of weights that come back elsewhere too. After a warm-up nothing is recorded by requests."""
    want = tokens(engine(backend="torch"), PROMPTS[:3])
    graphs_on_a_cpu(monkeypatch)
    llm = engine(backend="torch", enable_sleep_mode=True, warmup=warmup)
    assert tokens(llm, PROMPTS[:3]) == want
    held = [weakref.ref(graph) for program in llm.backend.programs for graph in program.graphs.values()]
    assert held
    llm.sleep(level=1)
    gc.collect()
    assert not any(ref() for ref in held)
    llm.wake_up()
    before = llm.backend.num_compiles()
    assert tokens(llm, PROMPTS[:3]) == want
    assert (llm.backend.num_compiles() == before) == (warmup == "all")


def test_a_new_cache_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    want = tokens(engine(backend="torch"), PROMPTS[:3])
    graphs_on_a_cpu(monkeypatch)
    llm = engine(backend="torch")
    assert tokens(llm, PROMPTS[:3]) == want
    before = llm.backend.num_compiles()
    llm.runner.reset()
    llm.scheduler.abandon()
    assert tokens(llm, PROMPTS[:3]) == want
    assert llm.backend.num_compiles() > before


def test_what_a_replay_returns_outlives_the_next_one() -> None:
    backend = TorchBackend()
    backend.capture = Recorder()

    def program(cache: Any, x: Any, *, ops: Any) -> tuple:
        return x * 2, ops.scatter(cache, (x,), x * 10)

    run = backend.compile(program, ("cache", "x"), ("y", "cache"), "cache")
    cache, outs, olds = backend.zeros(spec(9, dtype="int32")), [], []
    for i in range(5):
        olds.append(cache)
        out, cache = run(cache, np.array([i, i + 1], np.int32))
        outs.append(out)
    assert [o.tolist() for o in outs] == [[2 * i, 2 * i + 2] for i in range(5)]
    assert cache.tolist() == [0, 10, 20, 30, 40, 50, 0, 0, 0]
    assert all(isinstance(x, Void) for x in olds) and not isinstance(cache, Void)
    assert backend.num_compiles() == 1


def test_what_a_replay_returns_outlives_another_programs() -> None:
    """All share one memory."""
    backend, x = TorchBackend(), np.array([1, 2], np.int32)
    backend.capture = Recorder()

    def made(factor: int) -> Any:
        def program(cache: Any, x: Any, *, ops: Any) -> tuple:
            return x * factor, cache

        return backend.compile(program, ("cache", "x"), ("y", "cache"), "cache")

    cache, runs, outs = backend.zeros(spec(1)), [made(factor) for factor in (3, 5)], []
    for run in runs * 3:
        out, cache = run(cache, x)
        outs.append(out)
    assert [out.tolist() for out in outs] == [[3, 6], [5, 10]] * 3


def test_state_that_a_program_makes_anew_stays_where_it_was() -> None:
    """A layout may return new arrays instead of writing in place."""
    backend = TorchBackend()
    backend.capture = Recorder()
    run = backend.compile(lambda cache, x, *, ops: cache + x, ("cache", "x"), ("cache",), "cache")
    cache = backend.zeros(spec(3))
    address = cache.data_ptr()
    for i in range(4):
        cache = run(cache, np.full(3, i, np.float32))
        assert cache.data_ptr() == address
    assert cache.tolist() == [6, 6, 6]
    assert backend.num_compiles() == 1


def sums() -> tuple[Any, TorchBackend]:
    """A program on graphs that adds a step's rows to a cache, and such a backend."""
    backend = TorchBackend()
    backend.capture = Recorder()

    def program(cache: Any, inputs: Any, *, ops: Any) -> tuple:
        cache.rows["tokens"].add_(inputs.rows_S)
        return inputs.rows_S + 0, cache

    return backend.compile(program, ("cache", "inputs"), ("y", "cache"), "cache"), backend


def step_of(*rows: int, extra: dict[str, Any] | None = None) -> StepInput:
    return StepInput(np.array(rows, np.int32), np.zeros(1, np.int32), (), len(rows), True, extra or {})


def test_the_very_same_step_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, backend = sums()
    fills: list[int] = []
    monkeypatch.setattr(Inputs, "fill", lambda self, arrays, fill=Inputs.fill: (fills.append(1), fill(self, arrays)))
    cache, one, two, seen = (
        CacheState((), {"tokens": backend.zeros(spec(2, dtype="int32"))}),
        step_of(1, 2),
        step_of(5, 6),
        [],
    )
    for step in (one, one, one, two, one, one, step_of(1, 2)):
        out, cache = run(cache, step)
        seen.append(out.tolist())
    assert seen == [[1, 2]] * 3 + [[5, 6]] + [[1, 2]] * 3
    assert cache.rows["tokens"].tolist() == [11, 18]
    assert len(fills) == 4


def test_what_lies_on_the_device_is_copied_each_time() -> None:
    run, backend = sums()
    cache, more = CacheState((), {"tokens": backend.zeros(spec(2, dtype="int32"))}), torch.zeros(2)
    step = step_of(1, 2, extra={"more": more})
    for i in range(4):
        more.fill_(i)
        _, cache = run(cache, step)
        (inputs,) = backend.programs[0].inputs.values()
        assert inputs.places[-1].tolist() == [i, i]


def test_a_cache_that_was_handed_on_raises() -> None:
    run, backend = sums()
    old = CacheState((), {"tokens": backend.zeros(spec(2, dtype="int32"))})
    for _ in range(3):
        _, new = run(old, step_of(1, 2))
        for touch in (lambda x: x.rows, lambda x: x.groups, lambda x: replace(x, rows={})):
            with pytest.raises(RuntimeError, match="consumed by a later step"):
                touch(old)
        old = new
    assert backend.num_compiles() == 1


def test_small_decode_steps_are_joined_with_their_head(monkeypatch: pytest.MonkeyPatch) -> None:
    want = tokens(engine(backend="torch"), PROMPTS[:3])
    want_random = tokens(engine(backend="torch"), PROMPTS[:3], RANDOM)
    monkeypatch.setattr(backend_torch, "JOINED_SEQS", 2)
    graphs_on_a_cpu(monkeypatch)
    llm = engine(backend="torch")
    sizes: dict[str, set[int]] = {"forward_and_head": set(), "forward": set()}
    for name, found in sizes.items():
        program = getattr(llm.runner, name)
        monkeypatch.setattr(llm.runner, name, lambda *xs, f=found, p=program: (f.add(xs[2].num_tokens), p(*xs))[1])
    assert tokens(llm, PROMPTS[:3]) == want
    assert sizes["forward_and_head"] <= {1, 2} and sizes["forward"] == {4}
    # a head of another kind is a program of its own
    sizes["forward_and_head"].clear()
    assert tokens(llm, PROMPTS[:3], RANDOM) == want_random
    assert not sizes["forward_and_head"]


def test_what_waits_for_the_device_is_not_recorded() -> None:
    backend = TorchBackend()
    backend.capture = Recorder(waits=True)
    run = backend.compile(lambda cache, x, *, ops: cache + x, ("cache", "x"), ("cache",), "cache")
    cache = backend.zeros(spec(3))
    for i in range(4):
        cache = run(cache, np.full(3, i, np.float32))
    assert cache.tolist() == [6, 6, 6]
    assert backend.num_compiles() == 0


def test_a_warm_up_runs_one_size_of_a_kind_and_records_all() -> None:
    backend = TorchBackend()
    backend.capture = recorder = Recorder()
    ran: list[tuple[int, int]] = []

    def program(cache: Any, x: Any, inputs: Any, *, ops: Any) -> Any:
        ran.append((len(x), inputs["num"]))
        return cache + x.sum()

    run = backend.compile(program, ("cache", "x", "inputs"), ("cache",), "cache")
    cache = backend.zeros(spec(3))
    calls = [(run, (cache, np.zeros(n, np.float32), {"num": num})) for n, num in ((2, 8), (3, 8), (4, 9), (2, -1))]
    backend.precompile(calls)
    assert ran == [(2, 8), (2, 8), (3, 8), (4, 9), (2, -1), (2, -1)]
    assert backend.num_compiles() == 4 and recorder.replays == 0
    assert run(cache, np.ones(3, np.float32), {"num": 8}).tolist() == [3, 3, 3]
    assert backend.num_compiles() == 4 and recorder.replays == 1


def test_of_a_kind_that_waits_no_size_is_recorded() -> None:
    backend = TorchBackend()
    backend.capture = Recorder(waits=True)
    run = backend.compile(lambda cache, x, *, ops: cache + x.sum(), ("cache", "x"), ("cache",), "cache")
    cache = backend.zeros(spec(3))
    backend.precompile([(run, (cache, np.zeros(n, np.float32))) for n in (2, 3)])
    assert backend.num_compiles() == 0
    assert run(cache, np.ones(2, np.float32)).tolist() == [2, 2, 2]


def test_inputs_lie_end_to_end_and_keep_their_values() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 9, (3, 5)).astype(np.int32), rng.random(2, np.float32), np.array([True])]
    inputs = Inputs(arrays, torch.device("cpu"))
    for turn in range(9):
        new = [x + turn if x.dtype != bool else x for x in arrays]
        inputs.fill(new)
        for got, want in zip(inputs.places, new, strict=True):
            assert got.numpy().dtype == want.dtype and np.array_equal(got.numpy(), want)
    assert len({x.untyped_storage().data_ptr() for x in inputs.places}) == 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> GraphPool:
    """Of no GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return GraphPool(torch.device("cpu"))


class Graph:
    """Takes a while to be made ready."""

    is_ready = False

    def instantiate(self) -> None:
        time.sleep(0.1)
        self.is_ready = True


def test_one_recording_that_cannot_be_replayed_leaves_the_others_whole(pool: GraphPool) -> None:
    graph = Graph()
    pool.unready = [pool.readier.submit(int, "none"), pool.readier.submit(graph.instantiate)]
    with pytest.raises(ValueError, match="none"):
        pool.finish()
    assert graph.is_ready and not pool.unready


def test_recordings_that_are_gone_are_held_by_nobody(pool: GraphPool) -> None:
    graph = Graph()
    pool.unready = [pool.readier.submit(graph.instantiate)]
    held = weakref.ref(graph)
    del graph
    pool.renew()
    assert held() is None and not pool.unready


def test_a_large_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_torch, "GRAPH_TOKENS", 8)
    graphs_on_a_cpu(monkeypatch)
    llm = engine(backend="torch", max_num_batched_tokens=64)
    tokens(llm, [PROMPTS[3]], replace(GREEDY, max_tokens=2))
    keys = [key for program in llm.backend.programs for key in program.graphs]
    shapes = {key[0][1][3] for key in keys if key[0][0] is StepInput}
    assert shapes
    assert max(n for n in shapes if isinstance(n, int)) <= 8


def test_shapes_of_graphs_waste_little() -> None:
    shapes = Shapes.chain(256, 8192, 4352, 16, 1000, graph_tokens=4096, any_width=True)
    assert (shapes.seqs[0], shapes.seqs[-1], len(shapes.widths)) == (1, 256, 1)
    for sizes, most in ((shapes.seqs, 256), (shapes.tokens, 8192)):
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for n in range(257, 8193, 7):
        size = at_least(shapes.tokens, n)
        assert size - n < (128 if n <= 2048 else 512 if n <= 4096 else 64)
    assert len([n for n in shapes.tokens if n <= 4096]) < 30
