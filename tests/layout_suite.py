"""What any cache layout must pass: give it to these checks, on each backend.

An exact one gives the dense oracle's tokens. A lossy one attends exactly to what it holds, which a test says in numpy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from oracle import greedy
from tiny import GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens
from tolerances import tolerance

from octavo.engine.backend import Backend
from octavo.engine.lab.layout_checks import move_all, num_blocks, poisoned, random_tables, run_step, unused_blocks
from octavo.models.interface import AttentionSpec, CacheLayout

SPEC = AttentionSpec(num_kv_heads=2, group_size=3, k_dim=16, v_dim=16, scale=0.25, window=None)
CHUNKS = ((9, 1, 4), (1, 1, 1), (0, 20, 3))  # tokens of each of three sequences, step by step

# held(k [L, K, D], v, position) -> the keys and values that a query at this position finds in their place
Held = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def check_all(layout: CacheLayout, backend: Backend) -> None:
    """Every check of an exact layout."""
    check_size(layout)
    for window in (None, 7):
        check_attention_is_dense(layout, backend, window)
    check_moved_blocks_read_the_same(layout, backend)
    check_tokens(layout, backend.name)


def check_lossy(layout: CacheLayout, backend: Backend, held: Held) -> None:
    """Every check of a lossy layout, one whose blocks follow from their tokens, but check_tokens_are_the_same."""
    check_size(layout)
    for window in (None, 7):
        check_attention_is_dense(layout, backend, window, held)
    check_moved_blocks_read_the_same(layout, backend)


def check_size(layout: CacheLayout) -> None:
    """A layout is a file of under 50 lines, frozen, and says how large its arrays are."""
    assert len(Path(inspect.getfile(type(layout))).read_text().splitlines()) < 70
    assert len(inspect.getsource(type(layout)).splitlines()) < 50
    assert hash(layout) == hash(replace(layout))
    small, large = (layout.spec(SPEC, n) for n in (2, 5))
    assert {s.shape for s in small.values()} != {s.shape for s in large.values()}


def check_attention_is_dense(
    layout: CacheLayout, backend: Backend, window: int | None, held: Held = lambda k, v, position: (k, v)
) -> None:
    """Keys and values written over several ragged steps, blocks in random order, unwritten slots nan."""
    rng, spec = np.random.default_rng(5), replace(SPEC, window=window)
    lengths = np.sum(CHUNKS, axis=0)
    q, k, v = (
        [rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths]
        for shape in ((2, 3, 16), (2, 16), (2, 16))
    )
    tables = random_tables(lengths, layout.block_size, rng)
    cache, untouched = poisoned(layout, backend, SPEC, num_blocks(tables)), unused_blocks(tables)
    before = backend.read_tree(cache)
    done = np.zeros(3, int)
    for counts in CHUNKS:
        outs, cache = run_step(layout, backend, cache, tables, done, counts, (q, k, v), spec)
        token = 0
        for i, count in enumerate(counts):
            want = _dense(q[i], k[i], v[i], done[i], done[i] + count, spec, held)
            assert np.abs(outs[token : token + count] - want).max(initial=0) < tolerance("float32", "attention")
            token += count
        done += counts
    after = backend.read_tree(cache)
    for name, axis in _block_axes(layout).items():
        a, b = (np.take(x[name].astype(np.float32), untouched, axis) for x in (before, after))
        assert np.array_equal(a, b, equal_nan=True), f"{name}: blocks of nobody were written"


def check_moved_blocks_read_the_same(layout: CacheLayout, backend: Backend) -> None:
    """All of a sequence's blocks copied elsewhere: attention over the copies is bit-equal."""
    rng = np.random.default_rng(6)
    lengths = np.array([9, 1, 4]) + 1
    shapes = ((2, 3, 16), (2, 16), (2, 16))
    parts = tuple([rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths] for shape in shapes)
    outs = []
    for moved in (False, True):
        tables = random_tables(lengths, layout.block_size, np.random.default_rng(1))
        cache = poisoned(layout, backend, SPEC, num_blocks(tables))
        _, cache = run_step(layout, backend, cache, tables, np.zeros(3, int), (9, 1, 4), parts, SPEC)
        if moved:
            cache, tables = move_all(backend, cache, tables)
        outs.append(run_step(layout, backend, cache, tables, np.array([9, 1, 4]), (1, 1, 1), parts, SPEC)[0])
    assert np.array_equal(*outs)


def check_tokens(layout: CacheLayout, backend: str) -> None:
    """The dense oracle's tokens, with room and with preemptions."""
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:6]]
    # XLA compiles for each pool: this one has room for any request alone, and not for all
    tight = 1 + -(-104 // layout.block_size)
    llm = engine(backend=backend, layout=layout, block_size=None, num_gpu_blocks_override=tight, max_model_len=104)
    assert [tokens(llm, [p])[0] for p in PROMPTS[:6]] == want
    assert llm.scheduler.num_preemptions == 0
    llm.reset_prefix_cache()
    assert tokens(llm, PROMPTS[:6]) == want
    assert llm.scheduler.num_preemptions > 0


def check_tokens_are_the_same(layout: CacheLayout, backend: str) -> None:
    """With room, from the prefix cache, in small chunks, and with preemptions."""
    tight = 1 + -(-104 // layout.block_size)
    found = []
    for blocks, budget in ((120, 512), (120, 16), (tight, 64)):
        llm = engine(
            backend=backend, layout=layout, block_size=None, num_gpu_blocks_override=blocks, max_model_len=104,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        found.append(tokens(llm, PROMPTS[:6]))
        assert (llm.scheduler.num_preemptions > 0) == (blocks == tight)
        if (blocks, budget) == (120, 512):
            outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
            assert max(o.num_cached_tokens for o in outputs) > 0
            found.append([list(o.outputs[0].token_ids) for o in outputs])
    assert found[1:] == found[:1] * 3
    check_samples_are_the_same(layout, backend)


def check_samples_are_the_same(layout: CacheLayout, backend: str) -> None:
    """Three samples of a prompt, whether they take over what the first has computed of it, or compute it anew."""
    params, found = replace(RANDOM, n=3), []
    for seqs, caching in ((4, True), (1, False)):
        llm = engine(
            backend=backend, layout=layout, block_size=None, max_num_seqs=seqs, enable_prefix_caching=caching
        )  # fmt: skip
        outputs = llm.generate([PROMPTS[2], PROMPTS[0]], params, use_tqdm=False)
        found.append([list(c.token_ids) for o in outputs for c in o.outputs])
    assert found[0] == found[1]


def attended(layout: CacheLayout, backend: Backend, x: float) -> np.ndarray:
    """What attention returns for three prompts whose queries, keys and values are all the same number."""
    counts = np.array([9, 1, 4])
    parts = tuple([np.full((n, *shape), x, np.float32) for n in counts] for shape in ((2, 3, 16), (2, 16), (2, 16)))
    tables = random_tables(counts, layout.block_size, np.random.default_rng(1))
    cache = poisoned(layout, backend, SPEC, num_blocks(tables))
    return run_step(layout, backend, cache, tables, np.zeros(3, int), counts, parts, SPEC)[0]


def _block_axes(layout: CacheLayout) -> dict[str, int]:
    """The axis of each array that counts blocks: the one that grows with them."""
    small, large = layout.spec(SPEC, 2), layout.spec(SPEC, 3)
    shapes = {name: zip(small[name].shape, large[name].shape, strict=True) for name in small}
    return {name: [a == b for a, b in pairs].index(False) for name, pairs in shapes.items()}


def _dense(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, end: int, spec: AttentionSpec, held: Held
) -> np.ndarray:
    """Attention of positions start to end over all before them, in float64."""
    out = np.zeros((end - start, 2, 3, 16))
    for i in range(start, end):
        seen, (k, v) = slice(max(0, i + 1 - (spec.window or i + 1)), i + 1), held(keys, values, i)
        scores = np.einsum("kgd,mkd->kgm", q[i].astype(float), k[seen].astype(float)) * spec.scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[i - start] = np.einsum("kgm,mkd->kgd", weights / weights.sum(-1, keepdims=True), v[seen].astype(float))
    return out
