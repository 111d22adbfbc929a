"""StreamingLLM, H2O and SnapKV: an engine does what an independent simulation of the same rule does, token by token."""

from __future__ import annotations

import functools
from typing import Any

import eviction_oracle as sim
import numpy as np
import pytest
from backends import BACKENDS
from oracle import greedy
from tiny import GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import BeamSearchParams, SamplingParams
from octavo.engine.backend import get_backend
from octavo.engine.functional import generate, init_cache, pad_prompts
from octavo.engine.lab.replaying import replay
from octavo.models.interface import CacheState, map_tree
from octavo.models.keeps import Keeps
from octavo.models.layouts import H2O, LAYOUTS, SnapKV, StreamingLLM
from octavo.models.layouts.evicting import left

# compiling takes its time
BOTH = pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=() if b == "torch" else pytest.mark.slow) for b in BACKENDS]
)
SMALL: dict[str, tuple[Any, sim.Rule]] = {
    "streaming": (StreamingLLM(4, window=9, sinks=3), sim.streaming(9, 3)),
    "streaming, no sinks": (StreamingLLM(8, window=6, sinks=0), sim.streaming(6, 0)),
    "h2o": (H2O(4, budget=16, recent=5), sim.h2o(16, 5, 8)),
    "h2o, thirds": (H2O(8, budget=15, recent=7, sections=3), sim.h2o(15, 7, 5)),
    "h2o, whole prompt": (H2O(4, budget=12, recent=4, sections=None), sim.h2o(12, 4, None)),
    "snapkv": (SnapKV(4, budget=14, recent=5), sim.snapkv(14, 5, 5)),
    "snapkv, no pool": (SnapKV(8, budget=10, recent=1, pool=1), sim.snapkv(10, 1, 1)),
}
LONG = [PROMPTS[i] for i in (0, 1, 2, 3, 7, 8)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=1)


def cases(torch: Any, jax: Any, slow: Any) -> Any:
    """Kinds by backend, those of `slow` in slow tests: on JAX programs are compiled."""
    listed = {"torch": torch, "jax": jax}
    cases = [(b, kind, (b, kind) in slow) for b in BACKENDS for kind in listed[b]]
    return pytest.mark.parametrize(
        ("backend", "kind"), [pytest.param(b, kind, marks=[pytest.mark.slow] * s) for b, kind, s in cases]
    )


@functools.cache
def exact() -> list[list[int]]:
    return [greedy(spec_of(TINY), numpy_weights(TINY), p, 24) for p in LONG]


@functools.cache
def simulated(kind: str, prompt: tuple[int, ...], num_tokens: int = 24) -> tuple[list[int], list[float], int]:
    return sim.greedy(spec_of(TINY), numpy_weights(TINY), SMALL[kind][1], list(prompt), num_tokens)


def llm_of(backend: str, layout: Any, **arguments: Any) -> Any:
    return engine(backend=backend, layout=layout, block_size=None, max_model_len=104, **arguments)


def check(llm: Any, kind: str) -> None:
    """Tokens are equal, and logprobs near."""
    for prompt, output in zip(LONG, llm.generate(LONG, PARAMS, use_tqdm=False), strict=True):
        want, logprobs, _ = simulated(kind, tuple(prompt))
        (made,) = output.outputs
        assert list(made.token_ids) == want, f"prompt of {len(prompt)}"
        found = [entry[t].logprob for entry, t in zip(made.logprobs, made.token_ids, strict=True)]
        assert np.abs(np.array(found) - logprobs).max() < 1e-4


@cases(SMALL, ("streaming", "h2o", "snapkv"), slow=[("jax", "streaming"), ("jax", "snapkv")])
def test_the_simulation_and_the_engine_agree(backend, kind):
    """Also with a pool in which somebody is preempted, chunks of all sizes, and one step at a time."""
    layout, _ = SMALL[kind]
    if backend == "torch":
        check(llm_of(backend, layout), kind)
    need = 27 if kind.startswith("snapkv") or "whole" in kind else 12
    small = llm_of(backend, layout, num_gpu_blocks_override=need, max_num_batched_tokens=7, async_scheduling=False)
    check(small, kind)


def test_the_rules_matter():
    """What is compared would differ if nothing were forgotten, and by kind."""
    found = {kind: simulated(kind, tuple(LONG[3]))[0] for kind in SMALL}
    assert all(tokens != exact()[3] for tokens in found.values())
    assert len({tuple(tokens) for tokens in found.values()}) == len(SMALL)


@BOTH
@pytest.mark.parametrize(
    "layout",
    [
        StreamingLLM(8, window=90, sinks=14),
        H2O(8, budget=104),
        H2O(8, budget=104, sections=None),
        SnapKV(8, budget=104, recent=7),
    ],
    ids=lambda layout: type(layout).__name__,
)
def test_a_budget_as_long_as_the_sequence_is_exact(backend, layout):
    assert tokens(llm_of(backend, layout), LONG) == exact()


@cases(
    ("streaming", "h2o", "h2o, whole prompt", "snapkv"), ("streaming", "h2o"), [("jax", "streaming"), ("jax", "h2o")]
)
def test_samples_are_the_same_whatever_else_runs(backend, kind):
    """n = 2, random, with preemptions forced and freed blocks poisoned: each equals the request that ran alone."""
    layout, _ = SMALL[kind]
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=5, n=2)
    llm = llm_of(backend, layout, max_num_batched_tokens=13)
    alone = engine_outputs(llm, params)
    assert llm.scheduler.num_preemptions == 0 and llm.reset_prefix_cache()
    for i, prompt in enumerate(LONG):
        llm.add_request(str(i), prompt, params)
    found, step = {}, 0
    while llm.has_unfinished_requests():
        step += 1
        llm.set_limits(max_num_seqs=1 if step % 11 == 0 else 4)
        for output in llm.step():
            found[int(output.request_id)] = [list(o.token_ids) for o in output.outputs]
        if step % 3 == 0:
            poison(llm)
    assert [found[i] for i in range(len(LONG))] == alone
    assert llm.scheduler.num_preemptions > 3
    assert all(len(p.free) == p.num_blocks - 1 for p in llm.scheduler.blocks.pools)


def engine_outputs(llm: Any, params: SamplingParams) -> list[list[list[int]]]:
    outputs = [llm.generate([p], params, use_tqdm=False)[0] for p in LONG]
    return [[list(o.token_ids) for o in output.outputs] for output in outputs]


def poison(llm: Any) -> None:
    """Fills the blocks that nobody has, and no prefix is remembered in, with what must not be read."""
    free = [[b for b in pool.free if b not in pool.key_of] for pool in llm.scheduler.blocks.pools]
    if not any(free):
        return

    def spoilt(x: Any, spec: Any, blocks: list[int]) -> Any:
        host = llm.backend.read(x)
        host[blocks] = np.nan if host.dtype.kind == "f" else 1 << 29
        return llm.backend.place(host, spec)

    groups = tuple(
        map_tree(functools.partial(spoilt, blocks=blocks), group, specs)
        for blocks, group, specs in zip(free, llm.runner.cache.groups, llm.runner.specs.groups, strict=True)
    )
    llm.runner.cache = CacheState(groups, llm.runner.cache.rows)


@BOTH
def test_ten_times_the_budget_runs_in_a_pool_of_the_budget(backend):
    """The memory plan counts on it: max_model_len is what the model promises, and four blocks hold a sequence."""
    layout = H2O(4, budget=16, recent=5)
    full = [4 * 16] * 2  # blocks of the layers with windows
    llm = engine(backend=backend, layout=layout, block_size=None, num_gpu_blocks_override=[5, full[0]])
    assert llm.memory_plan.max_model_len == 128 and llm.memory_plan.groups[0].blocks_a_request == 4
    long = simulated("h2o", tuple(PROMPTS[1]), 126)
    assert tokens(llm, [PROMPTS[1]], GREEDY.clone(max_tokens=126)) == [long[0]]
    assert long[2] == 16
    assert tokens(llm, [PROMPTS[3]]) == [simulated("h2o", tuple(PROMPTS[3]))[0]]


def test_the_plan_knows_what_a_layout_keeps():
    def plan(layout: Any, length: int = 128) -> int:
        llm = engine(layout=layout, block_size=None, max_model_len=length, kv_cache_memory_bytes="1M",
                     num_gpu_blocks_override=None, max_num_batched_tokens=8)  # fmt: skip
        return llm.memory_plan.groups[0].blocks_a_request

    assert plan(LAYOUTS["token_major"](4)) == 32
    assert plan(H2O(4, budget=16)) == 4 and plan(H2O(4, budget=16, sections=None)) == 32
    assert plan(SnapKV(4, budget=64)) == 32
    # three blocks of sinks, window and chunk, and one where they are not aligned
    assert plan(StreamingLLM(4, window=20, sinks=9)) == 3 + 7 + 1


@BOTH
def test_a_prompt_is_hit_and_forked_under_streaming(backend):
    """What lies in a block follows from its prefix, so it is shared as ever."""
    layout, _ = SMALL["streaming"]
    llm = llm_of(backend, layout)
    first = tokens(llm, LONG)
    assert first == tokens(llm, LONG) == [simulated("streaming", tuple(p))[0] for p in LONG]
    assert llm.scheduler.num_hit_tokens >= sum((len(p) - 1) // 4 * 4 for p in LONG)
    forked = llm.generate([LONG[3]], GREEDY.clone(n=2, temperature=1.0, seed=3), use_tqdm=False)[0]
    alone = llm_of(backend, layout, enable_prefix_caching=False, max_num_seqs=1)
    want = alone.generate([LONG[3]], GREEDY.clone(n=2, temperature=1.0, seed=3), use_tqdm=False)[0]
    assert [o.token_ids for o in forked.outputs] == [o.token_ids for o in want.outputs]


def test_what_cannot_hold_is_refused_by_name():
    layout = H2O(8, budget=16)
    for arguments, message in (
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True: what H2O"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 128}, "enable_chunked_prefill=False: under H2O"),
    ):
        with pytest.raises(ValueError, match=message):
            llm_of(BACKENDS[0], layout, **arguments)
    llm = llm_of(BACKENDS[0], layout)
    assert not llm.config.enable_prefix_caching
    with pytest.raises(NotImplementedError, match="beam_search with layout H2O"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert engine(layout=StreamingLLM(8), block_size=None).config.enable_prefix_caching


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(8, budget=16, recent=9), "recent 9 of budget 16: with 2 sections at most 8"),
        (lambda: H2O(8, budget=16, sections=3), "sections 3: a divisor"),
        (lambda: H2O(8, budget=16, sections=1), "sections 1: a divisor"),
        (lambda: H2O(8, budget=16, recent=16, sections=None), "recent 16 of budget 16: with None sections at most 15"),
        (lambda: SnapKV(8, budget=16, recent=16), "recent 16 must be at least 1, and less than the budget of 16"),
        (lambda: SnapKV(8, pool=4), "pool 4 must be odd"),
        (lambda: StreamingLLM(8, window=0), "window 0 must be"),
        (lambda: StreamingLLM(8, sinks=-1), "sinks -1 must be"),
    ],
)
def test_wrong_fields_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keeps", [Keeps(budget=12, section=4), Keeps(budget=9), Keeps(budget=7, rolling=False)])
def test_the_device_counts_as_the_host_does(backend, keeps):
    xp = get_backend(backend).ops.xp
    pairs = [(done, prompt) for prompt in range(1, 30) for done in range(50)]
    done, prompt = (get_backend(backend).own(np.array(x, np.int32)) for x in zip(*pairs, strict=True))
    found = get_backend(backend).read(left(xp, keeps, done, prompt))
    assert found.tolist() == [keeps.left(*pair) for pair in pairs]


@cases(("streaming", "snapkv"), ("h2o, whole prompt",), slow=[("torch", "streaming"), ("jax", "h2o, whole prompt")])
def test_a_batch_in_one_program_forgets_as_the_engine_does(backend, kind):
    layout, (ids, lengths) = SMALL[kind][0], pad_prompts(LONG)
    made_of = {"model": spec_of(TINY), "backend": get_backend(backend), "layout": layout}
    weights = map_tree(lambda s, x: made_of["backend"].place_weight(x, s), spec_of(TINY).weights, numpy_weights(TINY))
    cache = init_cache(*made_of.values(), *ids.shape, 12)
    made = generate(weights, cache, ids, lengths, 12, **made_of)
    assert np.asarray(made.token_ids_SM).tolist() == [simulated(kind, tuple(p))[0][:12] for p in LONG]


def test_a_batch_in_one_program_reads_no_prompt_in_sections():
    layout, (ids, lengths) = SMALL["h2o"][0], pad_prompts(LONG)
    made_of = {"model": spec_of(TINY), "backend": get_backend(BACKENDS[0]), "layout": layout}
    cache = init_cache(*made_of.values(), *ids.shape, 12)
    with pytest.raises(NotImplementedError, match="prompts of 77 tokens"):
        generate({}, cache, ids, lengths, 12, **made_of)


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="needs JAX's virtual devices")
def test_heads_on_two_devices_each_decide_for_themselves():
    llm = llm_of("jax", SMALL["h2o"][0], tensor_parallel_size=2)
    assert tokens(llm, LONG[2:4]) == [simulated("h2o", tuple(p))[0] for p in LONG[2:4]]


def test_a_run_with_preemptions_replays_bit_for_bit(tmp_path):
    """The log names the layout with its fields, and what the blocks keep."""
    layout = SMALL["h2o"][0]
    log = tmp_path / "steps.jsonl"
    llm = llm_of(BACKENDS[0], layout, num_gpu_blocks_override=[9, 60], step_log=str(log))
    tokens(llm, LONG)
    assert llm.scheduler.num_preemptions
    assert llm.scheduler.load(llm.scheduler.dump()).blocks.layout_keeps == layout.keeps
    found = replay(log, model=spec_of(TINY), weights=numpy_weights(TINY))
    assert found.ok and found.changes == [] and found.num_tokens == 24 * len(LONG)


def test_a_layout_is_named_as_text():
    llm = engine(layout="h2o:budget=32,recent=8", block_size=8)
    assert llm.layout == H2O(8, budget=32, recent=8)
