"""Implementations agree with the oracle; a planted fault is named by layer and op, or by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from tiny import PROMPTS, SHARED, TINY, numpy_weights, spec_of

from octavo.engine.lab import crosscheck as module
from octavo.engine.lab.crosscheck import Comparison, EngineSubject, crosscheck
from octavo.engine.lab.errors import Error, kl_divergence, ulp_bits

SOME = [SHARED + [3, 4], [1, 5, 9, 2], PROMPTS[3], SHARED + [3, 9]]
LAYERS = 4
OPS = 13  # taps of a layer, its output included


def check(*against: str, prompts: Any = SOME, **arguments: Any) -> list[Comparison]:
    options: dict[str, Any] = {"prompts": prompts, "max_tokens": 4, "block_size": 8, "weights": numpy_weights(TINY)}
    return crosscheck(spec_of(TINY), against, **options | arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_implementation_agrees_with_the_oracle(backend):
    (found,) = check("oracle", f"{backend}:cpu")
    assert found.ok and found.fault is None and found.free_agreement == 1.0
    assert found.num_tokens == found.num_agreeing == 16
    assert max(found.kl) < 1e-9
    assert len(found.ops) == LAYERS * OPS + 2  # "embed" and "norm"
    # it is fp32 that is compared, not the oracle with itself
    assert all(0 < e.max_rel < 2e-5 for name, e in found.ops.items() if name != "embed")
    assert all(e.ulps.total() for e in found.ops.values())


def test_the_reference_is_the_first_without_an_oracle():
    reference, other = (f"{BACKENDS[0]}:{name}" for name in ("reference", "cpu"))
    (found,) = check(reference, other, free_running=False)
    assert (found.name, found.reference, found.ok) == (other, reference, True)


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[EngineSubject], None]) -> None:
    """Has `fault` break every subject that is not the oracle."""
    made = module.make_subject

    def broken(name: str, *args: Any) -> EngineSubject:
        subject = made(name, *args)
        assert isinstance(subject, EngineSubject)
        if name != "oracle":
            fault(subject)
        return subject

    monkeypatch.setattr(module, "make_subject", broken)


def break_layer(subject: EngineSubject, n: int, change: Callable[..., Any]) -> None:
    """Replaces the layer function in layer n: change(layer, args) -> what it returns."""
    layer = subject.parts.model.layer
    at = iter(range(1 << 30))

    def counted(*args: Any) -> Any:
        return change(layer, args) if next(at) % LAYERS == n else layer(*args)

    rebuild(subject, replace(subject.parts.model, layer=counted))


def rebuild(subject: EngineSubject, model: Any) -> None:
    """Compiles the runner's forward programs for another ModelSpec."""
    from functools import partial

    from octavo.models import step

    r = subject.runner
    layout = subject.parts.layout
    forward, forward_all = (
        partial(f, model=model, layout=layout, max_num_seqs=r.scratch) for f in (step.forward, step.forward_all)
    )
    compile = r.backend.compile
    r.forward = compile(forward, ("weights", "cache", "inputs"), ("hidden", "cache"), "cache")
    r.forward_all = compile(forward_all, ("weights", "cache", "inputs"), ("hidden", "rows_of_all", "cache"), "cache")


def wrong_rope(layer: Callable[..., Any], args: tuple) -> Any:
    w, cache, x, step, spec, *rest = args
    ropes = {name: replace(r, cos_TD=r.cos_TD * 0.98) for name, r in step.ropes.items()}
    return layer(w, cache, x, replace(step, ropes=ropes), spec, *rest)


def wrong_epsilon(layer: Callable[..., Any], args: tuple) -> Any:
    return layer(*args, eps=1e-4)


def wrong_scale(layer: Callable[..., Any], args: tuple) -> Any:
    *start, spec, ops, layout = args
    return layer(*start, replace(spec, scale=spec.scale * 1.01), ops, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "change", "op"),
    [(2, wrong_rope, "rope"), (1, wrong_epsilon, "attn_norm"), (3, wrong_scale, "attention")],
    ids=["rope", "epsilon", "scale"],
)
def test_a_fault_is_named_by_layer_and_op(monkeypatch, backend, n, change, op):
    plant(monkeypatch, lambda subject: break_layer(subject, n, change))
    (found,) = check("oracle", f"{backend}:reference", prompts=SOME[:1], free_running=False)
    assert not found.ok and found.fault is not None
    assert (found.fault.layer, found.fault.op) == (n, op)
    assert str(found.fault).startswith(f"layer {n}, {op}: relative error")


def test_a_wrong_entry_of_a_block_table_is_named(monkeypatch):
    def fault(subject: EngineSubject) -> None:
        runner, write = subject.runner, subject.runner._write_tables

        def wrong(writes: Any) -> None:
            write(writes)
            for w in writes:
                # of the first request's table: block 2 becomes block 1
                if (w.group, w.row, w.index) == (0, 0, 0) and len(w.blocks) > 3:
                    runner.tables[0][0, 2] = w.blocks[1]

        runner._write_tables = wrong

    plant(monkeypatch, fault)
    (found,) = check("oracle", f"{BACKENDS[0]}:reference", prompts=SOME[:1], free_running=False)
    assert found.fault is not None and found.fault.block is not None
    assert (found.fault.layer, found.fault.op) == (0, "rope.k")
    assert found.fault.block == "block 2 of the sequence: the block table has 2, and should have 3"


def test_a_stale_last_block_of_a_hit_is_named(monkeypatch):
    """The last block that a request hits holds, on one side, what was there before."""

    def fault(subject: EngineSubject) -> None:
        runner, admit = subject.runner, subject.runner._admit

        def stale(admitted: Any) -> None:
            admit(admitted)
            for a in admitted:
                if a.num_computed:
                    last = runner.tables[0][a.row, a.num_computed // runner.block_size - 1]
                    assert last == 0
            marked.extend(a for a in admitted if a.num_computed)

        marked: list[Any] = []
        write = runner._write_tables

        def then_stale(writes: Any) -> None:
            write(writes)
            for a in marked:
                block = int(runner.tables[0][a.row, a.num_computed // runner.block_size - 1])
                for layer in runner.cache.groups[0]:
                    layer["k"][block] = 0.5
            marked.clear()

        runner._admit, runner._write_tables = stale, then_stale

    if "torch" not in BACKENDS:
        pytest.skip("writes into torch's cache in place")
    import torch

    plant(monkeypatch, fault)
    with torch.inference_mode():
        (found,) = check("oracle", "torch:reference", prompts=[SOME[0], SOME[3], SOME[0]], free_running=False,
                         max_num_seqs=1)  # fmt: skip
    assert found.fault is not None and found.fault.block is not None
    assert (found.fault.layer, found.fault.op) == (0, "attention")
    assert found.fault.block.startswith("block 4 of the sequence")


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="it takes two"):
        check("oracle")
    with pytest.raises(ValueError, match="'jix:cpu' is no implementation"):
        check("oracle", "jix:cpu")


def test_errors_are_what_they_say():
    error = Error("x")
    a, b = np.array([[1.0, 2.0], [0.5, 4.0]]), np.array([[1.0, 2.5], [0.5, 4.0]])
    assert error.add(a, b).tolist() == [0.2, 0.0]
    assert (error.max_abs, error.max_rel) == (0.5, 0.2)
    assert Error("y").add(np.array([[np.nan]]), np.array([[1.0]])).tolist() == [np.inf]
    one = np.array([1.0, 1.0, 1.0, -1e-45, 0.0], np.float32)
    other = np.array([1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0 + 5 * 2**-23, 1e-45, -0.0], np.float32)
    assert ulp_bits(one, other) == {0: 2, 1: 1, 2: 1, 3: 1}


def test_kl_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 50))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (b, a))
    np.testing.assert_allclose(kl_divergence(a, b), (p * np.log(p / q)).sum(-1))


def break_rope_of_layer_7(subject: EngineSubject) -> None:
    layer, at = subject.parts.model.layer, iter(range(1 << 30))

    def counted(*args: Any) -> Any:
        return wrong_rope(layer, args) if next(at) % 30 == 7 else layer(*args)

    rebuild(subject, replace(subject.parts.model, layer=counted))


@pytest.mark.slow
def test_a_wrong_rope_in_smollm2_is_named_on_the_command_line(monkeypatch, capsys):
    """In the report's first line; transformers, beside it, is not accused."""
    from typer.testing import CliRunner

    from octavo.engine.cli import app

    made = module.make_subject

    def broken(name: str, *args: Any) -> Any:
        subject = made(name, *args)
        if name == "torch:cpu":
            break_rope_of_layer_7(subject)
        return subject

    monkeypatch.setattr(module, "make_subject", broken)
    command = ["crosscheck", str(embedded_model()), "--against", "oracle,torch:cpu,hf", "--no-free-running"]
    run = CliRunner().invoke(
        app, [*command, "--prompt", "The printer folded the sheet three times", "--max-tokens", "2"]
    )
    assert run.exit_code == 1, run.output
    first, second, *_ = run.stdout.splitlines()
    assert first.startswith("torch:cpu: layer 7, rope: relative error")
    assert second == "hf: agrees with oracle"
