"""Tensor parallelism on virtual devices: one shard_map round each program, or the same annotations under plain jit."""

from __future__ import annotations

from functools import cache, partial

import jax
import numpy as np
import pytest
from tiny import EIGHT_HEADS, numpy_weights, spec_of
from tolerances import tolerance

from octavo.engine.backend_jax import JaxBackend
from octavo.engine.runner import cache_specs, empty_cache
from octavo.models import step
from octavo.models.interface import Sampling, StepInput, leaves, map_tree
from octavo.models.layouts.paged import TokenMajor
from octavo.sharding.mesh_jax import make_mesh
from octavo.sharding.rules import TENSOR, ShardingRules

LAYOUT, COUNTS, STEPS, LENGTH, BLOCKS = TokenMajor(8), (13, 1, 30), 6, 64, 40
ROWS = len(COUNTS)
ATTENTION = {"local": "cpu", "shard_map": "cpu", "auto": "reference"}


def _backend(mode, size):
    if mode == "local":
        return JaxBackend(attention=ATTENTION[mode])
    mesh = make_mesh({"tp": size})
    return JaxBackend(attention=ATTENTION[mode], mode=mode, rules=ShardingRules(TENSOR), mesh=mesh)


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


@cache
def run_steps(mode, size):
    """Tokens [steps, rows], last hidden rows, and the state they leave: a ragged prefill, then decode steps."""
    model, backend = spec_of(EIGHT_HEADS), _backend(mode, size)
    specs = cache_specs(model, LAYOUT, [BLOCKS] * len(model.groups), ROWS, LENGTH)
    for name, tree in (("weights", model.weights), ("cache", specs), ("rows", specs.rows), ("groups", specs.groups)):
        backend.declare(name, tree)
    weights = map_tree(lambda s, x: backend.place_weight(x, s), model.weights, numpy_weights(EIGHT_HEADS))
    state = empty_cache(specs, backend)
    state = step.with_rows(state, _admitted(state.rows, backend))
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


@pytest.mark.parametrize("mode", ["shard_map", "auto"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_steps_do_not_depend_on_the_number_of_devices(mode, size):
    (ids, logprobs, hidden), _, state = run_steps(mode, size)
    (want_ids, want_logprobs, want_hidden), _, _ = run_steps("local", 1)
    assert ids.tolist() == want_ids.tolist()
    np.testing.assert_allclose(logprobs, want_logprobs, rtol=0, atol=tolerance("float32", "logits"))
    np.testing.assert_allclose(hidden, want_hidden, rtol=0, atol=tolerance("float32", "logits"))
    assert state.rows["num_computed"][:ROWS].tolist() == [n + STEPS - 1 for n in COUNTS]


@pytest.mark.parametrize("mode", ["shard_map", "auto"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_device_holds_its_share_of_weights_and_cache(mode, size):
    _, weights, state = run_steps(mode, size)
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
