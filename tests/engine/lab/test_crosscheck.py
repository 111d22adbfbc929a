"""Implementations agree with the oracle; a planted fault is named by layer and op, or by block."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from tiny import GREEDY, PROMPTS, SHARED, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine.lab.crosschecking import Comparison, crosscheck, several_libraries
from octavo.engine.lab.errors import Error, kl_divergence, ulp_bits
from octavo.engine.lab.plant import change_layer, change_plans
from octavo.engine.lab.subjects import make_subject
from octavo.engine.plan import Plan, Transfer
from octavo.models.layouts import Int8

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
    assert found.verdict == "agrees with oracle"
    assert [row["op"] for row in found.by_op()][:3] == ["embed", "attn_norm", "qkv"]
    rows = found.by_layer()
    assert len(rows) == len(found.ops) and [r["layer"] for r in rows[1 : 1 + OPS]] == [0] * OPS


def test_the_reference_is_the_first_without_an_oracle():
    reference, other = (f"{BACKENDS[0]}:{name}" for name in ("reference", "cpu"))
    (found,) = check(reference, other, free_running=False)
    assert (found.name, found.reference, found.ok) == (other, reference, True)


def wrong_rope(layer: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(w: Any, cache: Any, x: Any, step: Any, *rest: Any) -> Any:
        ropes = {name: replace(r, cos_TD=r.cos_TD * 0.98) for name, r in step.ropes.items()}
        return layer(w, cache, x, replace(step, ropes=ropes), *rest)

    return wrong


def wrong_epsilon(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: layer(*args, eps=1e-4)


def wrong_scale(layer: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        *start, spec, ops, layout = args
        return layer(*start, replace(spec, scale=spec.scale * 1.01), ops, layout)

    return wrong


def breaking(n: int, change: Callable[..., Any], backend: str = BACKENDS[0]) -> Callable[..., Any]:
    """What a user's file has: makes an implementation, and changes a layer of it."""

    def broken(make: Callable[..., Any]) -> Any:
        subject = make(f"{backend}:reference")
        change_layer(subject, n, change)
        return subject

    return broken


# found by name: this file is a user's
rope_of_2, epsilon_of_1, scale_of_3 = breaking(2, wrong_rope), breaking(1, wrong_epsilon), breaking(3, wrong_scale)
rope_of_2_last, epsilon_of_1_last, scale_of_3_last = (
    breaking(2, wrong_rope, BACKENDS[-1]), breaking(1, wrong_epsilon, BACKENDS[-1]),
    breaking(3, wrong_scale, BACKENDS[-1]),
)  # fmt: skip


@pytest.mark.parametrize("which", ["", "_last"], ids=[BACKENDS[0], f"{BACKENDS[-1]}-last"])
@pytest.mark.parametrize(
    ("name", "n", "op"),
    [("rope_of_2", 2, "rope"), ("epsilon_of_1", 1, "attn_norm"), ("scale_of_3", 3, "attention")],
    ids=["rope", "epsilon", "scale"],
)
def test_a_fault_is_named_by_layer_and_op(name, n, op, which):
    (found,) = check("oracle", f"{__file__}:{name}{which}", prompts=SOME[:1], free_running=False)
    assert not found.ok and found.fault is not None
    assert (found.fault.layer, found.fault.op) == (n, op)
    assert found.verdict.startswith(f"layer {n}, {op}: relative error")


def wrong_int8(backend: str, factor: float) -> Callable[..., Any]:
    """Layer 2 of an int8 layout keeps scales of kv head 1's keys that are off."""

    class Wrong(Int8):
        def attention(self, ops: Any, cache: Any, parts: Any, step: Any, spec: Any) -> Any:
            return super().attention(ScalingOps(ops, factor), cache, parts, step, spec)

    def broken(make: Callable[..., Any]) -> Any:
        subject = make(f"{backend}:reference")
        wrong = Wrong(subject.block_size)
        change_layer(subject, 2, lambda layer: lambda *args: layer(*args[:-1], wrong))
        return subject

    return broken


class ScalingOps:
    """ops, but for the scales that rope_write is given."""

    def __init__(self, ops: Any, factor: float):
        self.ops, self.factor = ops, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def rope_write(self, q: Any, new: Any, *rest: Any) -> Any:
        scale_TK, head_K = new["k_scale"], self.ops.arange(2, like=rest[-1].blocks_T)
        new = new | {"k_scale": self.ops.xp.where(head_K == 1, scale_TK * self.factor, scale_TK)}
        return self.ops.rope_write(q, new, *rest)


def wrong_block(make: Callable[..., Any]) -> Any:
    """Of the first request's table, block 2 becomes block 1."""

    def change(plan: Plan) -> Plan:
        writes = [
            replace(w, blocks=(*w.blocks[:2], w.blocks[1], *w.blocks[3:]))
            if (w.group, w.row, w.index) == (0, 0, 0) and len(w.blocks) > 3
            else w
            for w in plan.table_writes
        ]
        return replace(plan, table_writes=tuple(writes))

    subject = make(f"{BACKENDS[0]}:reference")
    change_plans(subject, change)
    return subject


def stale_block(make: Callable[..., Any]) -> Any:
    """The last block that a request hits holds what its first does."""
    subject = make(f"{BACKENDS[0]}:reference")

    def change(plan: Plan) -> Plan:
        stale = []
        for a in plan.admitted:
            table = next(w.blocks for w in plan.table_writes if (w.group, w.row, w.index) == (0, a.row, 0))
            if a.num_computed:
                stale.append(Transfer(0, table[0], table[a.num_computed // subject.block_size - 1]))
        return replace(plan, transfers=plan.transfers + tuple(stale))

    change_plans(subject, change)
    return subject


scale_of_head, scale_of_head_last = wrong_int8(BACKENDS[0], 1.02), wrong_int8(BACKENDS[-1], 1.02)


@pytest.mark.parametrize("which", ["", "_last"], ids=[BACKENDS[0], f"{BACKENDS[-1]}-last"])
def test_a_scale_that_is_off_by_2_percent_is_named_and_rounding_is_not(which):
    """Codes of 8 bits differ by one where a number lies between two: no fault, however far it has gone on."""
    backend = BACKENDS[-1] if which else BACKENDS[0]
    names = "oracle", f"{backend}:reference", f"{__file__}:scale_of_head{which}"
    right, wrong = check(*names, layout="int8", prompts=SOME[:2], free_running=False, separate=False)
    assert right.ok, right.verdict
    assert wrong.fault is not None and (wrong.fault.layer, wrong.fault.op) == (2, "rope.k_scale")
    assert wrong.fault.block is not None and wrong.fault.block.startswith("kv head 1")
    assert 0.015 < wrong.fault.error < 0.025


def test_a_wrong_entry_of_a_block_table_is_named():
    (found,) = check("oracle", f"{__file__}:wrong_block", prompts=SOME[:1], free_running=False)
    assert found.fault is not None and found.fault.block is not None
    assert (found.fault.layer, found.fault.op) == (0, "rope.k")
    assert found.fault.block == "block 2 of the sequence: the block table has 2, and should have 3"


def test_a_stale_last_block_of_a_hit_is_named():
    (found,) = check(
        "oracle", f"{__file__}:stale_block", prompts=[SOME[0], SOME[3]], free_running=False, max_num_seqs=1
    )
    assert found.fault is not None and found.fault.block is not None
    assert (found.fault.layer, found.fault.op, found.fault.request_id) == (0, "attention", "1")
    assert found.fault.block.startswith("block 4 of the sequence")


def test_processes_of_their_own_find_the_same():
    """Each implementation is made there, shown the steps, and asked for its tables and blocks."""
    names = "oracle", f"{BACKENDS[0]}:reference", f"{__file__}:wrong_block"
    assert several_libraries(names) and not several_libraries(names[:2])
    options: dict[str, Any] = {"prompts": SOME[:1], "max_tokens": 2}
    right, wrong = check(*names, separate=True, **options)
    assert right.ok and right.free_agreement == 1.0
    here = check(*names, separate=False, **options)[1]
    assert wrong.fault == here.fault and wrong.fault is not None and wrong.fault.block is not None
    assert wrong.to_json() == here.to_json()


def test_errors_of_a_process_are_told():
    with pytest.raises(ValueError, match=r"there is no file nowhere\.py"):
        check("oracle", "nowhere.py:broken", separate=True)


def test_what_a_users_file_returns_must_be_a_subject(tmp_path):
    (tmp_path / "mine.py").write_text("def nothing(make):\n    return 3\n")
    with pytest.raises(ValueError, match="returns 3"):
        check("oracle", f"{tmp_path}/mine.py:nothing", separate=False)


def test_a_layer_that_is_not_there_cannot_be_changed():
    subject = make_subject(f"{BACKENDS[0]}:reference", spec_of(TINY), numpy_weights(TINY), {"max_model_len": 32})
    with pytest.raises(ValueError, match="layers 0 to 3"):
        change_layer(subject, 4, wrong_rope)


def test_a_changed_layer_is_changed_in_every_program():
    """Not only where taps are asked for: the greedy tokens are other ones."""
    few = replace(GREEDY, max_tokens=3)
    for backend in BACKENDS:
        llm = engine(backend=backend)
        before = tokens(llm, PROMPTS[:1], few)
        change_layer(llm, 1, lambda layer: lambda *args: (args[2] * 0, layer(*args)[1]))
        llm.reset_prefix_cache()
        assert tokens(llm, PROMPTS[:1], few) != before


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="it takes two"):
        check("oracle")
    with pytest.raises(ValueError, match="'jix:cpu' is no implementation"):
        check("oracle", "jix:cpu")
    with pytest.raises(ValueError, match="no prompts"):
        check("oracle", "torch", prompts=[])


def test_errors_are_what_they_say():
    error = Error("x")
    a, b = np.array([[1.0, 2.0], [0.5, 4.0]]), np.array([[1.0, 2.5], [0.5, 4.0]])
    assert error.add(a, b).tolist() == [0.2, 0.0]
    assert (error.max_abs, error.max_rel) == (0.5, 0.2)
    assert Error("y").add(np.array([[np.nan]]), np.array([[1.0]])).tolist() == [np.inf]
    one = np.array([1.0, 1.0, 1.0, -1e-45, 0.0], np.float32)
    other = np.array([1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0 + 5 * 2**-23, 1e-45, -0.0], np.float32)
    assert ulp_bits(one, other) == {0: 2, 1: 1, 2: 1, 3: 1}
    error.ulps.clear()
    error.ulps.update({0: 250, 2: 1, 3: 499, 10: 150, 11: 99, 32: 1})
    assert error.histogram() == {"0": "25", "1-7": "50", "8-63": "", "64-1023": "15", "1024-": "10"}


def test_kl_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 50))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (b, a))
    np.testing.assert_allclose(kl_divergence(a, b), (p * np.log(p / q)).sum(-1))


FAULTS = Path(__file__).parents[3] / "examples" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(len(BACKENDS) < 2, reason="the faults are planted into both backends")
@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ("wrong_rope", "", "layer 7, rope: relative error"),
        ("wrong_rope_jax", "", "layer 7, rope: relative error"),
        ("wrong_epsilon", "", "layer 12, attn_norm: relative error"),
        ("wrong_block", "", "block 2 of the sequence: the block table has"),
        ("stale_block", "--max-num-seqs 1", "block 1 of the sequence"),
        ("wrong_scale", "--layout int8", "layer 5, rope.k_scale: relative error"),
    ],
)
def test_a_fault_in_smollm2_is_named_in_the_first_line_of_one_command(fault, options, says):
    """The implementation beside it is not accused."""
    beside = "torch:cpu" if fault == "wrong_rope_jax" else "torch:reference"
    names = f"oracle,{beside},{FAULTS}:{fault}"
    command = [sys.executable, "-m", "octavo.engine.cli", "crosscheck", str(embedded_model()), "--against", names]
    started = time.monotonic()
    run = subprocess.run(
        [*command, "--no-free-running", "--max-tokens", "1", *options.split()], capture_output=True, text=True
    )
    assert run.returncode == 1, run.stderr
    first, second, *_ = run.stdout.splitlines()
    assert first.startswith(f"{FAULTS}:{fault}: layer ") and says in first
    assert second == f"{beside}: agrees with oracle"
    assert time.monotonic() - started < 120


@pytest.mark.slow
@pytest.mark.skipif(len(BACKENDS) < 2, reason="it names both backends")
def test_six_implementations_of_smollm2_agree():
    names = "jax:reference,jax:cpu,torch:reference,torch:cpu,hf,oracle"
    command = [sys.executable, "-m", "octavo.engine.cli", "crosscheck", str(embedded_model()), "--against", names]
    few = ["--max-tokens", "2", "--prompt", "The printer folded the sheet", "--json"]
    run = subprocess.run([*command, *few], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = {c["name"]: c for c in json.loads(run.stdout)}
    assert list(found) == names.split(",")[:-1] and all(c["ok"] and c["reference"] == "oracle" for c in found.values())
    assert all(c["free_agreement"] == 1 and c["max_kl"] < 1e-6 for c in found.values())
    # of transformers the rows between layers; of ours every op of every layer
    assert [len(c["ops"]) for c in found.values()] == [30 * OPS + 2] * 4 + [30]
