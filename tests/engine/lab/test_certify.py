"""A right backend keeps every guarantee; a fault of each kind breaks those that it should, and is said to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from golden.make_traces import SHAPED, make_trace
from tiny import PROMPTS, SHARED, TINY, numpy_weights, spec_of
from typer.testing import CliRunner

from octavo.engine.cli import app
from octavo.engine.lab.certifying import certify
from octavo.engine.lab.plant import change_layer, change_plans
from octavo.engine.lab.trace import SHIPPED, Trace, read_trace_file, trace_from_json
from octavo.engine.plan import Plan, Reason, Transfer

WANTED: list[tuple[list[int], dict[str, Any]]] = [
    (SHARED + [3, 4], {"temperature": 0.0, "max_tokens": 10}),
    (SHARED + [3, 9], {"temperature": 0.0, "max_tokens": 10}),
    ([1, 5, 9, 2], {"temperature": 0.0, "max_tokens": 6, "repetition_penalty": 1.2}),
    (PROMPTS[7], SHAPED | {"seed": 3, "max_tokens": 10}),
    (SHARED + [8], SHAPED | {"seed": 7, "max_tokens": 8, "n": 3}),
]
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "block_size": 8}
RNG = np.random.default_rng(0)  # goes on from engine to engine
HELD = (
    "greedy tokens", "same seed, same stream", "logprobs", "golden run", "batch invariance", "prefix-hit invariance",
    "chunking invariance", "preemption invariance", "forks", "no compile after warm-up", "overlapped = synchronous",
    "bit-exact replay",
)  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    made = make_trace(spec_of(TINY), numpy_weights(TINY), WANTED, OPTIONS | {"num_gpu_blocks_override": [13, 13]})
    return trace_from_json(json.loads(json.dumps(made)))


def run(trace: Trace, backend: str) -> dict[str, str]:
    """The evidence of what is broken, by name; and all held ones under ""."""
    found = certify(backend, trace=trace, model=spec_of(TINY), weights=numpy_weights(TINY), **QUIETLY[backend[:5]])
    assert tuple(g.name for g in found) == HELD
    return {g.name: g.evidence for g in found if not g.held}


QUIETLY: dict[str, dict[str, Any]] = {"torch": {"threads": 1}, "jax:c": {}, __file__[:5]: {"threads": 1}}


def test_the_tiny_trace_has_what_it_is_to_have(trace):
    reasons = {code for plan in trace.plans for _, code in plan.reasons}
    assert {Reason.PREEMPTED, Reason.RESUMED, Reason.FORKED} <= reasons
    assert any(a.num_computed for plan in trace.plans for a in plan.admitted)


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
def test_torch_keeps_its_guarantees(trace):
    assert run(trace, "torch:cpu") == {}


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")
def test_jax_keeps_its_guarantees(trace):
    assert run(trace, "jax:cpu") == {}


def layer_fault(n: int, change: Callable[..., Any]) -> Callable[..., Any]:
    def broken(make: Callable[..., Any]) -> Any:
        engine = make("torch:cpu")
        change_layer(engine, n, change)
        return engine

    return broken


def plan_fault(change: Callable[[Plan], Plan]) -> Callable[..., Any]:
    def broken(make: Callable[..., Any]) -> Any:
        engine = make("torch:cpu")
        change_plans(engine, change)
        return engine

    return broken


def wrong_rope(layer: Callable) -> Callable:
    def wrong(w: Any, cache: Any, x: Any, step: Any, *rest: Any) -> Any:
        ropes = {name: replace(r, cos_TD=r.cos_TD * 0.9) for name, r in step.ropes.items()}
        return layer(w, cache, x, replace(step, ropes=ropes), *rest)

    return wrong


def noisy(layer: Callable) -> Callable:
    """As if something were read that nobody has written."""

    def wrong(w: Any, cache: Any, x: Any, *rest: Any) -> Any:
        return layer(w, cache, x * (1 + 1e-6 * RNG.random()), *rest)

    return wrong


def size_of_step_matters(layer: Callable) -> Callable:
    def wrong(w: Any, cache: Any, x: Any, *rest: Any) -> Any:
        return layer(w, cache, x * (1 + 0.02 * (len(x) == 1)), *rest)

    return wrong


def other_keys(plan: Plan) -> Plan:
    return replace(plan, admitted=tuple(replace(a, key=(a.key[0] ^ 1, a.key[1])) for a in plan.admitted))


def no_copies(plan: Plan) -> Plan:
    return replace(plan, transfers=())


def stale(plan: Plan) -> Plan:
    found = []
    for a in plan.admitted:
        table = next(w.blocks for w in plan.table_writes if (w.group, w.row, w.index) == (0, a.row, 0))
        if a.num_computed >= 16:
            found.append(Transfer(0, table[0], table[a.num_computed // 8 - 1]))
    return replace(plan, transfers=plan.transfers + tuple(found))


# found by name: this file is a user's
rope, noise, size = layer_fault(2, wrong_rope), layer_fault(1, noisy), layer_fault(1, size_of_step_matters)
keys, copies, hits = plan_fault(other_keys), plan_fault(no_copies), plan_fault(stale)


@pytest.mark.skipif("torch" not in BACKENDS, reason="the faults are planted into torch")
@pytest.mark.parametrize(
    ("fault", "broken", "held"),
    [
        ("rope", {"greedy tokens", "logprobs", "golden run"}, {"bit-exact replay", "overlapped = synchronous"}),
        ("noise", {"bit-exact replay"}, {"greedy tokens", "logprobs", "batch invariance"}),
        ("size", {"batch invariance"}, {"bit-exact replay"}),
        ("keys", {"same seed, same stream", "golden run"}, {"greedy tokens", "logprobs", "batch invariance"}),
        ("copies", {"forks"}, {"greedy tokens", "bit-exact replay"}),
        ("hits", {"prefix-hit invariance"}, {"bit-exact replay"}),
    ],
)
def test_a_fault_breaks_what_it_should(trace, fault, broken, held):
    found = run(trace, f"{__file__}:{fault}")
    assert broken <= found.keys() and not held & found.keys(), found


def test_what_a_trace_does_not_bring_about_does_not_count_as_held(trace):
    """Without room to preempt, nothing is known of preemption."""
    if "torch" not in BACKENDS:
        pytest.skip("torch is not installed")
    roomy = replace(trace, options=trace.options | {"num_gpu_blocks_override": [60, 60]})
    found = run(roomy, "torch:cpu")
    assert list(found) == ["preemption invariance"] and "does not bring it about" in found["preemption invariance"]


def test_the_shipped_trace_is_small_and_whole():
    assert SHIPPED.stat().st_size < 300_000
    shipped = read_trace_file()
    reasons = {code for plan in shipped.plans for _, code in plan.reasons}
    assert {Reason.PREEMPTED, Reason.RESUMED, Reason.FORKED, Reason.NO_BUDGET} <= reasons
    sampled = sum(len(plan.sampled) for plan in shipped.plans)
    assert sampled == sum(len(s.tokens) for _, s in shipped.streams().values()) > 150
    # greedy, shaped, penalised, several samples
    assert {r.params["temperature"] for r in shipped.requests} >= {0.0, 0.9, 1.0}


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    run = CliRunner().invoke(app, ["certify", "torch", "--trace", str(tmp_path / "x.json")])
    assert run.exit_code == 1 and "no golden trace" in run.stderr
    (tmp_path / "x.json").write_text("nothing")
    run = CliRunner().invoke(app, ["certify", "torch", "--trace", str(tmp_path / "x.json")])
    assert run.exit_code == 1 and "x.json is no golden trace" in run.stderr and "no valid JSON" in run.stderr
    with pytest.raises(ValueError, match="'jix' is no implementation"):
        certify("jix")


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
@pytest.mark.parametrize("fault", [None, "wrong_rope"])
def test_smollm2_is_certified_on_the_command_line(fault):
    """And is not with a wrong rope in layer 7."""
    faults = Path(__file__).parents[3] / "examples" / "faults.py"
    backend = f"{faults}:{fault}" if fault else "torch"
    command = [sys.executable, "-m", "octavo.engine.cli", "certify", backend, "--model", str(embedded_model())]
    run = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True)
    lines = [line.split(":")[0].split(maxsplit=1) for line in run.stdout.splitlines()]
    assert [name for _, name in lines] == list(HELD), run.stderr
    broken = {name for said, name in lines if said == "BROKEN"}
    assert run.returncode == (1 if fault else 0)
    assert broken >= {"logprobs"} if fault else not broken
