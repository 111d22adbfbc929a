"""What XLA makes of the four programs: the cache is donated whole, and no temporary grows with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from tiny import TINY, numpy_weights, spec_of

from octavo.engine.backend_jax import JaxBackend
from octavo.engine.batch import READ_TILE
from octavo.engine.config import engine_config
from octavo.engine.memory_plan import HEAD_COPIES, reading_bytes
from octavo.engine.runner import HEAD, cache_specs, empty_cache
from octavo.models import llama, step
from octavo.models.interface import Reading, Sampling, StepInput, map_tree
from octavo.models.layouts.paged import HeadMajor, TokenMajor
from octavo.models.logprobs import of_known
from octavo.models.sampling import PARAMS, VARIANTS

ROWS, LENGTH, BLOCKS = 4, 128, 2048  # of rows, tokens of a row, blocks in the smaller cache
LAYOUTS = {"token_major": TokenMajor(8), "head_major": HeadMajor(8)}
SLACK = 1 << 20  # bytes


@cache
def backend_of(attention):
    return JaxBackend(attention=attention)


def _make(layout, num_blocks, attention="cpu"):
    """Backend, model, weights and an empty cache."""
    model, backend = spec_of(TINY), backend_of(attention)
    weights = map_tree(lambda s, x: backend.place_weight(x, s), model.weights, numpy_weights(TINY))
    specs = cache_specs(model, LAYOUTS[layout], [num_blocks] * len(model.groups), ROWS, LENGTH)
    return backend, model, weights, empty_cache(specs, backend)


def _inputs(num_tokens, decode):
    starts = np.linspace(0, num_tokens, ROWS + 1).astype(np.int32)
    tables = np.arange(1, 1 + ROWS * 16, dtype=np.int32).reshape(ROWS, 16)
    return StepInput(np.arange(ROWS, dtype=np.int32), starts, (tables, tables), num_tokens, decode)


def _bytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _forward(backend, model, layout):
    fn = partial(step.forward, model=model, layout=LAYOUTS[layout], max_num_seqs=ROWS)
    return backend.compile(fn, ("weights", "cache", "inputs"), ("hidden", "cache"), consumes="cache")


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize(("num_tokens", "decode"), [(ROWS, True), (64, False)], ids=["decode", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_aliases_the_cache_and_holds_no_second_one(layout, num_tokens, decode, attention):
    temporaries = []
    for num_blocks in (BLOCKS, 4 * BLOCKS):
        backend, model, weights, state = _make(layout, num_blocks, attention)
        lowered = _forward(backend, model, layout).lower(weights, state, _inputs(num_tokens, decode))
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= _bytes(state)
        temporaries.append(memory.temp_size_in_bytes)
    # one array of the cache, copied, would be this much more
    assert _bytes(state.groups[0][0]["k"]) > 3 * SLACK
    assert abs(temporaries[1] - temporaries[0]) < SLACK


@pytest.mark.parametrize("variant", VARIANTS)
def test_head_aliases_the_rows(variant):
    backend, model, weights, state = _make("token_major", 16)
    run = backend.compile(
        partial(step.head, model=model), ("weights", "rows", "hidden", "sampling"), ("output", "rows"), consumes="rows"
    )
    rows = np.arange(ROWS, dtype=np.int32)
    hidden = np.zeros((ROWS, TINY.embed_dim), np.float32)
    memory = run.lower(weights, state.rows, hidden, Sampling(rows, rows, variant)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= _bytes(state.rows)


@pytest.mark.parametrize("num_logprobs", [0, 20, -1])
def test_reading_a_prompt_takes_what_the_memory_plan_says_however_many_tokens(num_logprobs):
    """Temporaries of a tile, and its results twice: one tile is on its way to the host while the next is made."""
    config = replace(TINY, vocab_size=16384)
    model, backend = spec_of(config), backend_of("cpu")
    weights = map_tree(lambda s, x: backend.place_weight(x, s), model.weights, numpy_weights(config))
    args = ("weights", "rows", "hidden", "reading"), ("output", "rows"), "rows"
    run, places = backend.compile(partial(of_known, model=model), *args), np.zeros(READ_TILE, np.int32)
    rows, ids = {"num_computed": jax.numpy.zeros(4, "int32")}, np.zeros((READ_TILE, 128), np.int32)
    num = model.vocab_size if num_logprobs == -1 else num_logprobs
    planned = reading_bytes(engine_config(model, max_logprobs=max(num_logprobs, -1), backend="jax"), model)
    for num_tokens in (128, 2048):
        hidden = np.zeros((num_tokens, config.embed_dim), np.float32)
        reading = Reading(places, places, num_tokens, num, "raw_logprobs", ids)
        memory = run.lower(weights, rows, hidden, reading).compile().memory_analysis()
        assert planned / 3 < memory.temp_size_in_bytes + 2 * memory.output_size_in_bytes < planned


def test_the_largest_head_holds_no_more_than_the_memory_plan_says():
    """In [R, V] arrays, at sizes where nothing else counts."""
    config = llama.LlamaConfig(**(vars(TINY) | {"vocab_size": 20_000, "num_layers": 1, "windows": (None,)}))
    model, backend = llama.spec(config), backend_of("cpu")
    specs = cache_specs(model, LAYOUTS["token_major"], [2], 32, LENGTH)
    run = backend.compile(partial(step.head, model=model), *HEAD)
    like = partial(map_tree, lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or "float32"))
    rows, mask = np.zeros(32, np.int32), np.zeros((32, 20_000 // 32), np.int32)
    for variant, packed in ((v, m) for v in ("truncate", "penalties") for m in (None, mask)):
        sampling = Sampling(rows, rows, variant, 20, mask_RW=packed)
        lowered = run.lower(like(model.weights), like(specs.rows), np.zeros((32, TINY.embed_dim), np.float32), sampling)
        copies = lowered.compile().memory_analysis().temp_size_in_bytes / (4 * 32 * 20_000)
        assert HEAD_COPIES / 3 < copies < HEAD_COPIES


def test_set_rows_aliases_the_rows():
    backend, _, _, state = _make("token_major", 16)
    run = backend.compile(step.set_rows, ("rows", "at", "values"), ("rows",), consumes="rows")
    values = {name: np.zeros((1, *x.shape[1:]), x.dtype) for name, x in state.rows.items()}
    assert values["params"].shape == (1, len(PARAMS))
    memory = run.lower(state.rows, np.zeros(1, np.int32), values).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= _bytes(state.rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_move_blocks_aliases_the_groups_and_copies_only_the_blocks(layout):
    backend, _, _, state = _make(layout, 4 * BLOCKS)
    run = backend.compile(step.move_blocks, ("groups", "source", "target"), ("groups",), consumes="groups")
    pairs = (np.array([1, 2], np.int32),) * 2, (np.array([3, 4], np.int32),) * 2
    memory = run.lower(state.groups, *pairs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= _bytes(state.groups)
    assert memory.temp_size_in_bytes < SLACK


def test_an_old_cache_raises_on_use_and_a_second_step_compiles_nothing():
    backend, model, weights, old = _make("token_major", 80)
    run = _forward(backend, model, "token_major")
    _, new = run(weights, old, _inputs(ROWS, True))
    before = backend.num_compiles()
    _, new = run(weights, new, _inputs(ROWS, True))
    assert backend.num_compiles() == before
    for x in (old.groups[0][0]["k"], old.groups[1][1]["v"], old.rows["num_computed"]):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(x)
    assert backend.read(new.rows["num_computed"])[:ROWS].tolist() == [2] * ROWS
