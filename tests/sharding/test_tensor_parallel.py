"""Tensor parallelism on virtual devices: one shard_map round each program, or the same annotations under plain jit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from tiny import EIGHT_HEADS, spec_of, weights_of
from tolerances import tolerance

from octavo.engine.backend_jax import JaxBackend
from octavo.engine.runner import cache_specs, empty_cache
from octavo.models import llama, moe, step
from octavo.models.interface import Mixture, ModelSpec, Routing, Sampling, StepInput, leaves, map_tree
from octavo.models.layouts.paged import TokenMajor
from octavo.sharding.mesh_jax import make_mesh
from octavo.sharding.rules import SEQUENCE, TENSOR, ShardingRules

LAYOUT, COUNTS, STEPS, LENGTH, BLOCKS = TokenMajor(8), (13, 1, 30), 6, 64, 40
ROWS = len(COUNTS)
ATTENTION = {"local": "cpu", "shard_map": "cpu", "auto": "reference"}
# of the 44 tokens of the first step, 2 and 4 devices share out the rows; of the 3 of the others nobody does
RULES = {
    "tensor": TENSOR,
    "sequence": TENSOR | SEQUENCE,
    "experts": {k: v for k, v in TENSOR.items() if k != "expert_mlp"} | {"experts": "tp"} | SEQUENCE,
    "little": {"kv_heads": "tp"} | SEQUENCE,
}


@cache
def _model(name) -> ModelSpec:
    """Dense; or with biases, and experts with a shared one behind its gate in the second layer."""
    if name == "dense":
        return spec_of(EIGHT_HEADS)
    config = replace(EIGHT_HEADS, qkv_bias=True, out_bias=True, mlp_bias=True)
    mixture = Mixture(8, 24, (1,), Routing(2, normalise=True), shared_dim=40, shared_gate=True)
    return moe.with_experts(llama.spec(config), "moe", mixture)


def _backend(mode, size, rules):
    if mode == "local":
        return JaxBackend(attention=ATTENTION[mode])
    mesh = make_mesh({"tp": size})
    return JaxBackend(attention=ATTENTION[mode], mode=mode, rules=ShardingRules(RULES[rules]), mesh=mesh)


def _admitted(rows, backend):
    """The rows with prompts, parameters and keys: row 0 greedy, the others sampled."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, EIGHT_HEADS.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    values = {
        "tokens": tokens,
        "num_computed": np.zeros(ROWS, np.int32),
        "prompt_len": np.array(COUNTS, np.int32),
        "keys": rng.integers(0, 2**31, (ROWS, 2)).astype(np.int32),
        "params": np.array([[0, 0, 1, 0], [0.9, 20, 0.9, 0.01], [1, 0, 1, 0]], np.float32),
        "min_tokens": np.zeros(ROWS, np.int32),
        "stop_ids": np.zeros(rows["stop_ids"][:ROWS].shape, np.int32),
    }
    run = backend.compile(step.set_rows, ("rows", "at", "values"), ("rows",), consumes="rows")
    return run(rows, np.arange(ROWS, dtype=np.int32), values)


def _inputs(counts):
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.arange(1, 1 + ROWS * 8, dtype=np.int32).reshape(ROWS, 8)
    return StepInput(np.arange(ROWS, dtype=np.int32), starts, (table, table), sum(counts), max(counts) == 1)


def _prepared(model, backend):
    """Weights and a state with prompts on the backend's devices."""
    specs = cache_specs(model, LAYOUT, [BLOCKS] * len(model.groups), ROWS, LENGTH)
    for name, tree in (("weights", model.weights), ("cache", specs), ("rows", specs.rows), ("groups", specs.groups)):
        backend.declare(name, tree)
    weights = map_tree(lambda s, x: backend.place_weight(x, s), model.weights, weights_of(model))
    state = empty_cache(specs, backend)
    return weights, step.with_rows(state, _admitted(state.rows, backend))


@cache
def run_steps(mode, size, name, rules):
    """Tokens [steps, rows], last hidden rows, and the state they leave: a ragged prefill, then decode steps."""
    model, backend = _model(name), _backend(mode, size, rules)
    weights, state = _prepared(model, backend)
    forward, head = (partial(f, model=model) for f in (step.forward, step.head))
    forward = partial(forward, layout=LAYOUT, max_num_seqs=ROWS)
    forward = backend.compile(forward, ("weights", "cache", "inputs"), ("hidden", "cache"), consumes="cache")
    head = backend.compile(head, ("weights", "rows", "hidden", "sampling"), ("output", "rows"), consumes="rows")
    found, at = [], np.arange(ROWS, dtype=np.int32)
    for n in range(STEPS):
        hidden, state = forward(weights, state, _inputs((1,) * ROWS if n else COUNTS))
        output, rows = head(weights, state.rows, hidden, Sampling(at, at, "truncate", num_logprobs=3))
        state = step.with_rows(state, rows)
        found.append((backend.read(output.token_ids_R), backend.read(output.top_logprobs_RN), backend.read(hidden)))
    return [np.stack(x) for x in zip(*found, strict=True)], weights, state


SLOW = {"marks": pytest.mark.slow}
CASES = [
    *(("dense", "tensor", size) for size in (1, 2, 4, 8)),
    ("dense", "sequence", 4),
    pytest.param("moe", "experts", 2, **SLOW),
    pytest.param("moe", "sequence", 4, **SLOW),
    pytest.param("moe", "little", 2, **SLOW),
]


@pytest.mark.parametrize("mode", ["shard_map", "auto"])
@pytest.mark.parametrize(("name", "rules", "size"), CASES)
def test_steps_do_not_depend_on_the_number_of_devices(mode, name, rules, size):
    (ids, logprobs, hidden), _, state = run_steps(mode, size, name, rules)
    (want_ids, want_logprobs, want_hidden), _, _ = run_steps("local", 1, name, "tensor")
    assert ids.tolist() == want_ids.tolist()
    np.testing.assert_allclose(logprobs, want_logprobs, rtol=0, atol=tolerance("float32", "logits"))
    np.testing.assert_allclose(hidden, want_hidden, rtol=0, atol=tolerance("float32", "logits"))
    assert state.rows["num_computed"][:ROWS].tolist() == [n + STEPS - 1 for n in COUNTS]


@pytest.mark.slow
def test_taps_show_all_tokens_of_rows_that_are_shared_out():
    """What lies by tokens within a layer, before and behind its products and norms."""
    patterns = ("embed", "layer.?", "*_norm", "*.out", "*.residual", "*.down", "*.moe", "*.shared_down", "*.experts")
    found = []
    for backend in (_backend("local", 1, None), _backend("shard_map", 4, "experts")):
        weights, state = _prepared(_model("moe"), backend)
        program = partial(step.forward_all, model=_model("moe"), layout=LAYOUT, max_num_seqs=ROWS)
        outs = ("hidden", "rows_of_all", "cache")
        program = backend.compile(program, ("weights", "cache", "inputs"), outs, consumes="cache")
        _, rows, _ = program(weights, state, replace(_inputs(COUNTS), taps=patterns))
        found.append({name: backend.read(x) for name, x in rows.items()})
    want, got = found
    assert want.keys() == got.keys() >= {"embed", "layer.1", "layer.0.out", "layer.1.moe", "layer.1.mlp_norm"}
    for name, x in want.items():
        assert x.shape[0] == sum(COUNTS)
        np.testing.assert_allclose(got[name], x, rtol=0, atol=tolerance("float32", "logits"), err_msg=name)


@pytest.mark.parametrize("mode", ["shard_map", "auto"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_device_holds_its_share_of_weights_and_cache(mode, size):
    _, weights, state = run_steps(mode, size, "dense", "tensor")
    model, rules = spec_of(EIGHT_HEADS), ShardingRules(TENSOR)
    specs = cache_specs(model, LAYOUT, [BLOCKS] * len(model.groups), ROWS, LENGTH)
    for tree, arrays in ((model.weights, weights), (specs.groups, state.groups), (specs.rows, state.rows)):
        planned = sum(4 * np.prod(s.shape) // (size if any(map(rules.get, s.axes)) else 1) for s in leaves(tree))
        for device in jax.devices()[:size]:
            shards = [s for x in leaves(arrays) for s in x.addressable_shards if s.device == device]
            assert sum(s.data.nbytes for s in shards) == planned


def test_the_cpu_attention_refuses_what_the_compiler_shards():
    backend = JaxBackend(attention="cpu", mode="auto", rules=ShardingRules(TENSOR), mesh=make_mesh({"tp": 2}))
    with pytest.raises(NotImplementedError, match="'cpu': it flattens blocks"):
        backend.ops.attention(*(jax.numpy.ones((1, 2, 1, 8)),) * 3, "n p k d", None, spec_of(EIGHT_HEADS).attention[0])
