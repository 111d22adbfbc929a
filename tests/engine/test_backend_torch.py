"""The torch backend: what is placed, what is consumed, and where things lie from step to step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tiny import TINY, VOCAB, numpy_weights, spec_of

from octavo.engine import backend_torch
from octavo.engine.backend_torch import TorchBackend, Void, map_arrays, physical_cores
from octavo.engine.batch import Shapes
from octavo.engine.plan import Admission, Chunk, Plan, TableWrite
from octavo.engine.runner import Runner
from octavo.engine.sampling_params import SamplingParams
from octavo.models.interface import ArraySpec, StepInput, leaves, map_tree
from octavo.models.layouts.paged import TokenMajor

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ROWS, LENGTH = 3, 128


def _spec(*shape: int, dtype: str | None = None) -> ArraySpec:
    return ArraySpec(shape, (None,) * len(shape), dtype)


def _runner(backend: TorchBackend) -> Runner:
    model = spec_of(TINY)
    weights = map_tree(backend.place_weight, numpy_weights(TINY), model.weights)
    shapes = Shapes.chain(ROWS, 64, LENGTH, 8, VOCAB, exact=True)
    size = {"num_blocks": [60, 60], "max_num_seqs": ROWS, "max_model_len": LENGTH, "shapes": shapes}
    return Runner(backend, model, TokenMajor(8), weights, **size)


def _plans(num_steps: int) -> list[Plan]:
    """One request: its prompt, then a token a step. All its blocks are there from the start."""
    admission = Admission(0, tuple(PROMPT), 0, len(PROMPT), (1, 2), SamplingParams(temperature=0).row())
    writes = tuple(TableWrite(g, 0, 0, tuple(range(1, 17))) for g in range(2))
    plans = [Plan(0, (Chunk("a", 0, 0, len(PROMPT), True),), (admission,), writes)]
    return plans + [Plan(n, (Chunk("a", 0, len(PROMPT) + n - 1, 1, True),)) for n in range(1, num_steps)]


def _addresses(tree: Any) -> list[int]:
    return [x.data_ptr() for x in leaves(tree)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_place_copies_and_reads_back(dtype):
    backend = TorchBackend(dtype=dtype)
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    placed = backend.place(x, _spec(5, 3))
    want = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert placed.dtype == getattr(torch, dtype)
    x[:] = 7
    read = backend.read(placed)
    assert read.dtype == want.dtype
    assert np.array_equal(read, want)
    read[:] = 1
    assert np.array_equal(backend.read(placed), want)


def test_the_dtype_of_a_spec_wins():
    backend = TorchBackend(dtype="bfloat16")
    assert backend.place(np.array([1, 2]), _spec(2, dtype="int32")).dtype == torch.int32
    assert backend.zeros(_spec(2, dtype="float32")).dtype == torch.float32
    assert backend.zeros(_spec(2, 3)).dtype == torch.bfloat16
    assert backend.zeros(_spec(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("strided", [False, True])
def test_bfloat16_from_a_checkpoint_stays_exact(strided):
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    x = x.T if strided else x
    x.flags.writeable = False
    for dtype in ("bfloat16", "float32"):
        read = TorchBackend(dtype=dtype).place(x, _spec(*x.shape))
        assert np.array_equal(TorchBackend().read(read).astype(np.float32), x.astype(np.float32))


def test_a_placed_weight_reads_as_it_was():
    backend = TorchBackend()
    x = np.random.default_rng(2).standard_normal((6, 5)).astype(np.float32)
    tree = {"w": [backend.place_weight(x, ArraySpec((6, 5), (None, None), product="tf,fe->te"))]}
    assert np.array_equal(backend.read_tree(tree)["w"][0], x)


def test_a_consumed_array_raises_however_it_is_touched():
    backend = TorchBackend()
    old = {"a": (backend.zeros(_spec(4, 3)),), "b": [backend.zeros(_spec(2))]}
    new = backend.consume(old)
    for x in leaves(old):
        assert isinstance(x, Void)
        for touch in (lambda x: x + 1, np.asarray, lambda x: x[0], lambda x: x.numpy(), backend.read, repr):
            with pytest.raises(RuntimeError, match="consumed by a later step"):
                touch(x)
    assert all(backend.read(x).sum() == 0 for x in leaves(new))
    assert backend.read(new["a"][0] + 1).sum() == 12


def test_pure_mode_leaves_the_old_value():
    backend = TorchBackend(pure=True)
    run = backend.compile(
        lambda cache, at, ops: ops.scatter(cache, (at,), at * 10), ("cache", "at"), ("cache",), "cache"
    )
    old = backend.place(np.arange(5), _spec(5, dtype="int32"))
    new = run(old, np.array([1, 3], np.int32))
    assert backend.read(old).tolist() == [0, 1, 2, 3, 4]
    assert backend.read(new).tolist() == [0, 10, 2, 30, 4]


def test_inputs_and_cache_lie_still_for_a_hundred_steps():
    """Every argument of every program, by shape: what a CUDA graph will need."""
    backend, seen = TorchBackend(), {}
    compile = backend.compile

    def spying(fn, args, outs, consumes):
        def spy(*xs, ops):
            for name, x in zip(args, xs, strict=True):
                arrays = []
                map_arrays(arrays.append, x)
                key = (fn, name, tuple(a.shape for a in arrays if isinstance(a, torch.Tensor)))
                seen.setdefault(key, []).append([a.data_ptr() for a in arrays if isinstance(a, torch.Tensor)])
            return fn(*xs, ops=ops)

        return compile(spy, args, outs, consumes)

    backend.compile = spying
    runner = _runner(backend)
    before = _addresses(runner.cache.groups)
    for plan in _plans(104):
        runner.launch(plan).result()
    assert _addresses(runner.cache.groups) == before
    assert max(map(len, seen.values())) >= 100
    names = {"weights", "last_weights", "cache", "inputs", "rows", "hidden", "sampling", "at", "values"}
    assert {name for _, name, _ in seen} == names
    moved = [(name, shapes) for (_, name, shapes), found in seen.items() if any(f != found[0] for f in found)]
    assert not moved


def test_a_numpy_input_may_be_reused_at_once():
    """Inputs are copied: the host may write its buffer while a result that came of it is alive."""
    backend, x = TorchBackend(), np.arange(4, dtype=np.int32)
    run = backend.compile(lambda cache, x, ops: (x + 0, cache), ("cache", "x"), ("y", "cache"), "cache")
    first, cache = run(backend.zeros(_spec(1)), x)
    x[:] = 9
    second, _ = run(cache, x)
    assert backend.read(first).tolist() == [0, 1, 2, 3]
    assert backend.read(second).tolist() == [9, 9, 9, 9]


def test_static_fields_of_inputs_pass_through():
    backend = TorchBackend()
    inputs = StepInput(np.zeros(2, np.int32), np.zeros(3, np.int32), (np.zeros((2, 4), np.int32),), 17, True)

    def program(cache, inputs, *, ops):
        return (inputs.num_tokens, inputs.decode, inputs.block_tables[0].dtype), cache

    found, _ = backend.compile(program, ("cache", "inputs"), ("found", "cache"), "cache")(
        backend.zeros(_spec(1)), inputs
    )
    assert found == (17, True, torch.int32)


def test_pure_and_in_place_give_the_same_tokens_and_cache():
    results = []
    for pure in (False, True):
        backend = TorchBackend(pure=pure)
        runner = _runner(backend)
        first = runner.cache
        tokens = [runner.launch(plan).result().token_ids for plan in _plans(20)]
        results.append((tokens, backend.read_tree(runner.cache)))
        if pure:
            assert all(not backend.read(x).any() for x in leaves(first.groups))
        else:
            assert all(isinstance(x, Void) for x in leaves(first.groups) + leaves(first.rows))
    assert results[0][0] == results[1][0]
    assert len({t for tokens in results[0][0] for t in tokens}) > 1
    for a, b in zip(leaves(results[0][1].groups), leaves(results[1][1].groups), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(results[0][1].rows["tokens"], results[1][1].rows["tokens"])


def test_nothing_is_ever_compiled():
    backend = TorchBackend()
    runner = _runner(backend)
    for plan in _plans(3):
        runner.launch(plan)
    assert backend.num_compiles() == 0
    assert backend.eager


def test_float32_is_not_rounded_below_it():
    torch.set_float32_matmul_precision("medium")
    try:
        TorchBackend()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_threads_are_those_asked_for_or_the_cores_of_this_process(monkeypatch):
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    try:
        TorchBackend(threads=1)
        assert torch.get_num_threads() == 1
        for told, threads in ((1, 1), (10**6, physical_cores())):
            monkeypatch.setattr(backend_torch, "TOLD", told)
            TorchBackend()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"dtype": "float8"}, "'float8' is not one of float32"), ({"threads": 0}, "0 is not positive")],
    ids=["dtype", "threads"],
)
def test_bad_options_are_named(options, what):
    with pytest.raises(ValueError, match=what):
        TorchBackend(**options)


@pytest.mark.parametrize("told", [None, "77"])
def test_threads_that_wait_soon_sleep(told: str | None) -> None:
    """Unless the user says otherwise. What libgomp has read it says itself."""
    env = {**os.environ, "OMP_DISPLAY_ENV": "verbose"} | ({"GOMP_SPINCOUNT": told} if told else {})
    if told is None:
        env.pop("GOMP_SPINCOUNT", None)
    script = "from octavo.engine.backend import get_backend; get_backend('torch')"
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stderr
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("this torch has another OpenMP than libgomp")
    assert f"GOMP_SPINCOUNT = '{told or 5000}'" in said


def test_kernels_for_a_cpu_are_compiled_into_a_folder_that_is_named(tmp_path: Path) -> None:
    native = TorchBackend(compiled=str(tmp_path)).ops.native
    assert native is not None and native.dtype == torch.float32
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    assert TorchBackend().ops.native is None
    assert TorchBackend(compiled=str(tmp_path), eager=True).ops.native is None


@pytest.mark.parametrize("told", [None, "0"])
def test_large_arrays_lie_in_huge_pages(told: str | None) -> None:
    """Unless the user says otherwise. torch reads it when it first allocates one."""
    env = {name: x for name, x in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    env |= {"THP_MEM_ALLOC_ENABLE": told} if told else {}
    script = "import os; from octavo.engine.backend import get_backend; get_backend('torch'); print(os.environ[NAME])"
    script = script.replace("NAME", "'THP_MEM_ALLOC_ENABLE'")
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert said.split() == [told or "1"]
