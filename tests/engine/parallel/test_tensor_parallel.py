"""LLM(tensor_parallel_size=n) on virtual devices: the tokens of one device, and the memory that was planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import torch  # noqa: F401
from embedded import embedded_model
from oracle import greedy
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, RANDOM, engine, numpy_weights, spec_of, tokens
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.engine.config import engine_config
from octavo.engine.parallel.shares import fit_model
from octavo.models import qwen3_moe
from octavo.models.interface import Mixture, Routing

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2.json"


def device_bytes(tree: Any) -> list[int]:
    """Bytes of a tree of arrays on each device that holds any of it."""
    found: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return list(found.values())


def assert_bytes_as_planned(llm: LLM, size: int) -> None:
    plan, cache = llm.memory_plan, llm.runner.cache
    assert device_bytes(llm.runner.weights) == [plan.weights_bytes] * size
    assert device_bytes(cache.groups) == [plan.cache_bytes] * size
    assert device_bytes(cache.rows) == [plan.rows_bytes] * size


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_an_engine_on_several_devices_gives_the_tokens_of_one(size: int) -> None:
    """With hits, preemptions, chunks and forks."""
    prompts = PROMPTS[:5]
    llm = engine(EIGHT_HEADS, backend="jax", tensor_parallel_size=size, num_gpu_blocks_override=16, max_model_len=120)
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in prompts]
    assert tokens(llm, prompts, GREEDY) == want
    assert tokens(llm, prompts, GREEDY) == want
    assert llm.scheduler.num_preemptions > 0
    one = engine(EIGHT_HEADS, backend="jax", max_num_seqs=2)
    samples = [llm.generate(PROMPTS[3], replace(RANDOM, n=2), use_tqdm=False)[0] for llm in (one, llm)]
    assert [o.token_ids for o in samples[0].outputs] == [o.token_ids for o in samples[1].outputs]
    assert_bytes_as_planned(llm, size)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, "num_kv_heads 8 is not divisible by tensor_parallel_size 3: 1, 2, 4, 8, 16 would"),
        (32, "num_kv_heads 8 is not divisible by tensor_parallel_size 32: 1, 2, 4, 8, 16 would"),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers(size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(EIGHT_HEADS, backend="jax", tensor_parallel_size=size)


def test_where_no_size_would_do_none_is_named() -> None:
    model = qwen3_moe.spec(EIGHT_HEADS, Mixture(8, 25, (0, 1), Routing(2, normalise=True)))
    config = engine_config(model, backend="torch", data_parallel_size=2, sharding_rules={"expert_mlp": "dp"})
    with pytest.raises(
        ValueError, match=r"expert_dim 25 is not .* data_parallel_size 2: no tensor_parallel_size would"
    ):
        fit_model(config, model)


def test_other_processes_say_nothing_of_what_rank_0_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not divisible by tensor_parallel_size 3"):
        engine(EIGHT_HEADS, backend="torch", tensor_parallel_size=3)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_rules_of_ones_own_share_what_they_name() -> None:
    one, own = (
        engine(EIGHT_HEADS, backend="jax", tensor_parallel_size=n, sharding_rules={"kv_heads": "tp"}) for n in (1, 2)
    )
    assert tokens(own, PROMPTS[:3]) == tokens(one, PROMPTS[:3])
    assert_bytes_as_planned(own, 2)
    # qkv and out, of 2 layers: 64 x 8 x 4 x 8 and 8 x 2 x 8 x 64 numbers
    assert (
        one.memory_plan.weights_bytes - own.memory_plan.weights_bytes == 4 * 2 * (64 * 8 * 4 * 8 + 8 * 2 * 8 * 64) // 2
    )
    assert [c.where for c in own.memory_plan.collectives] == ["out"]


def test_a_fresh_process_needs_no_flag() -> None:
    """The engine asks for virtual devices itself, where JAX has not started."""
    source = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tiny import EIGHT_HEADS, PROMPTS, engine, tokens\n"
        "print(tokens(engine(EIGHT_HEADS, backend='jax', tensor_parallel_size=4), PROMPTS[:1]))"
    )
    out = subprocess.check_output([sys.executable, "-c", source], text=True, timeout=300)
    want = greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), PROMPTS[0], GREEDY.max_tokens)
    assert json.loads(out) == [want]


STARTED = """
import os, sys
import jax
from jax._src import xla_bridge
from octavo.engine.build import backend_options
from octavo.engine.config import engine_config
from octavo.engine.parallel.world import join
from octavo.engine.parallel.world_jax import free_address

def started(platform):
    print(platform, os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
    sys.exit()

xla_bridge._init_backend = started
"""


@pytest.mark.parametrize(
    "source",
    [
        "backend_options(engine_config('m', backend='jax', device='cpu', tensor_parallel_size=2), None)",
        "backend_options(engine_config('m', backend='jax', device='cpu', data_parallel_size=2), None)",
        "jax.distributed.initialize(free_address(), 1, 0); join(engine_config('m', backend='jax', device='cpu'), None)",
    ],
    ids=["tp", "dp", "launched"],
)
def test_jax_knows_how_to_take_memory_when_it_starts(source: str) -> None:
    """It would take three quarters of each GPU at once; and device="cpu" start GPUs that are there."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-c", STARTED + source]
    assert subprocess.check_output(command, text=True, timeout=120, env=environment).split() == ["cpu", "false"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_smollm2_on_three_devices(backend: str) -> None:
    embedded_model()
    llm = LLM("smollm2", backend=backend, tensor_parallel_size=3, max_model_len=256, max_num_seqs=8)
    if backend == "jax":
        assert_bytes_as_planned(llm, 3)
    entries = [e for e in json.loads(GOLDEN.read_text())["entries"] if len(e["ids"]) < 100][::4]
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([e["ids"] for e in entries], params, use_tqdm=False)
    for e, output in zip(entries, outputs, strict=True):
        got, want = list(output.outputs[0].token_ids), e["tokens"][:24]
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        assert at is None or e["gap"][at] < tolerance("float32", "tie"), e["prompt"]
