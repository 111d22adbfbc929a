"""An engine on a model with experts: the tokens of the dense float64 oracle, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_moe
from backends import BACKENDS
from oracle import greedy
from tiny import GREEDY, PROMPTS, RANDOM, tokens

MOST = 104
TIGHT = 1 + MOST // 8
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": TIGHT},
    "synchronous": {"async_scheduling": False, "max_num_seqs": 3},
    "warm": {"warmup": "all", "max_num_seqs": 2},
    "pure": {"mode": "pure", "layout": "head_major", "block_size": 16},
}
# compiling takes JAX a while
FAST = {"torch": ("plain", "chunks of 16", "preempted"), "jax": ("chunks of 16",)}
TRIED = {"torch": tuple(ROWS), "jax": ("chunks of 16", "preempted", "warm")}
PAIRS = [
    pytest.param(backend, row, marks=[pytest.mark.slow] * (row not in FAST[backend]))
    for backend in BACKENDS
    for row in TRIED[backend]
]
PROMPTS = PROMPTS[:6]


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return [greedy(tiny_moe.spec(), tiny_moe.weights(), p, GREEDY.max_tokens) for p in PROMPTS]


@pytest.mark.parametrize(("backend", "row"), PAIRS)
def test_tokens_do_not_depend_on(backend: str, row: str, want: list[list[int]]) -> None:
    llm = tiny_moe.engine(backend=backend, max_model_len=MOST, **ROWS[row])
    assert tokens(llm, PROMPTS) == want
    # and once more, over what the prefix cache kept
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == want
    if row == "preempted":
        assert llm.scheduler.num_preemptions > 0
    else:
        assert any(o.num_cached_tokens for o in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_samples_do_not_depend_on_their_company(backend: str) -> None:
    params = replace(RANDOM, n=2)
    llm = tiny_moe.engine(backend=backend)
    alone = [[o.token_ids for o in llm.generate(p, params, use_tqdm=False)[0].outputs] for p in PROMPTS]
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [[o.token_ids for o in out.outputs] for out in together] == alone
