"""The same tokens whatever the engine does in between: a pairwise matrix on a tiny model with two cache groups."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from backends import BACKENDS
from oracle import greedy
from tiny import GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import shared_prefixes

MAX_MODEL_LEN = 104  # 77 + 24 tokens at most are in the cache: a tight pool holds one such request

FACTORS: dict[str, list[Any]] = {
    "backend": list(BACKENDS),
    "block_size": [8, 16, 32],
    "budget": [16, 64, 512, "unsplit"],
    "max_num_seqs": [1, 4, 32],
    "cache": ["on", "off", "hit"],
    "pool": ["roomy", "tight"],
    "layout": ["token_major", "head_major"],
    "order": ["given", "reversed", "shuffled"],
    "async_scheduling": [True, False],
    "warmup": ["lazy", "all"],
    "mode": ["in_place", "pure"],
    "scheduler_order": ["decode_first", "prefill_first"],
    "attention": ["cpu", "reference"],
    "disable_cascade_attn": [False, True],
    "params": ["greedy", "random"],
}


def is_valid(row: dict[str, Any]) -> bool:
    """Leaves out what validation refuses, and pools that cannot be tight because one request fills them alone."""
    if row.get("budget") == 16 and row.get("max_num_seqs") == 32:
        return False
    return not (row.get("pool") == "tight" and row.get("max_num_seqs") == 1)


def cost(row: dict[str, Any]) -> float:
    """How long a row takes, roughly: XLA compiles each program of JAX, which are many after a whole warm-up."""
    if row["backend"] == "torch":
        return 1
    return 8 if row["warmup"] == "lazy" else 20 * (1 + row["max_num_seqs"] ** 0.5)


def pairwise(seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every valid pair of values of two factors occurs at least once, and which take little time."""
    rng = random.Random(seed)
    todo = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if is_valid({a: x, b: y})
    }
    rows = []
    while todo:
        candidates = [row for _ in range(60) if is_valid(row := _grown(rng.choice(sorted(todo, key=str)), rng))]
        best = max(candidates, key=lambda row: len(_pairs(row) & todo) / cost(row), default={})
        if _pairs(best) & todo:
            rows.append(best)
            todo -= _pairs(best)
    return rows


def _grown(pair: Any, rng: random.Random) -> dict[str, Any]:
    row = {name: rng.choice(values) for name, values in FACTORS.items()}
    return row | dict(pair)


def _pairs(row: dict[str, Any]) -> set:
    return set(itertools.combinations([(k, row[k]) for k in FACTORS if k in row], 2))


ROWS = pairwise()
WANT: dict[str, list[list[int]]] = {}


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    """Greedy tokens from the dense float64 oracle; sampled ones from each request alone, on the first backend."""
    weights = numpy_weights(TINY)
    WANT["greedy"] = [greedy(spec_of(TINY), weights, p, GREEDY.max_tokens) for p in PROMPTS]
    # on a machine with a GPU, too: there JAX has no other choice
    on_cpu = {"device": "cpu"} if BACKENDS[0] == "torch" else {"dtype": "float32"}
    llm = engine(backend=BACKENDS[0], max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False, **on_cpu)
    WANT["random"] = [tokens(llm, [p], RANDOM)[0] for p in PROMPTS]


@pytest.fixture(autouse=True)
def the_least_shared_prefix_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_GROUP", 1)
    monkeypatch.setattr(shared_prefixes, "PADDING", 0)


def _arguments(row: dict[str, Any]) -> dict[str, Any]:
    size, seqs = row["block_size"], row["max_num_seqs"]
    unsplit = row["budget"] == "unsplit"
    budget = MAX_MODEL_LEN if unsplit else row["budget"]
    arguments = {
        "backend": row["backend"],
        "block_size": size,
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": not unsplit,
        "max_num_seqs": seqs,
        "enable_prefix_caching": row["cache"] != "off",
        "num_gpu_blocks_override": 1 + 16 * MAX_MODEL_LEN // size,
        "layout": row["layout"],
        "async_scheduling": row["async_scheduling"],
        "warmup": row["warmup"],
        "mode": row["mode"],
        "scheduler_order": row["scheduler_order"],
        "attention": row["attention"],
        "disable_cascade_attn": row["disable_cascade_attn"],
        "max_model_len": MAX_MODEL_LEN,
    }
    if row["pool"] == "tight":
        arguments["num_gpu_blocks_override"] = 1 + -(-MAX_MODEL_LEN // size)
    return arguments


IDS = ["-".join(map(str, row.values())) for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_tokens_do_not_depend_on(row: dict[str, Any]) -> None:
    check(row, _arguments(row))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "row", [pytest.param(r, id=i, marks=[pytest.mark.slow] * (cost(r) > 8)) for r, i in zip(ROWS, IDS, strict=True)]
)
def test_on_a_gpu_neither(row: dict[str, Any]) -> None:
    """In fp32, by its own kernels where a CPU has its own."""
    kernels = {"cpu": "auto"}.get(row["attention"], row["attention"])
    check(row, _arguments(row) | {"device": "cuda", "dtype": "float32", "attention": kernels})


def check(row: dict[str, Any], arguments: dict[str, Any]) -> None:
    """The row's tokens, hits and preemptions on an engine with these arguments."""
    params = {"greedy": GREEDY, "random": RANDOM}[row["params"]]
    llm = engine(**arguments)
    order = list(range(len(PROMPTS)))
    if row["order"] != "given":
        order = order[::-1] if row["order"] == "reversed" else random.Random(3).sample(order, len(order))
    if row["cache"] == "hit":
        tokens(llm, [PROMPTS[i] for i in order], params)
    outputs = llm.generate([PROMPTS[i] for i in order], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [WANT[row["params"]][i] for i in order]
    if row["pool"] == "tight":
        assert llm.scheduler.num_preemptions >= 3
    if row["cache"] == "hit" and row["pool"] == "roomy":
        assert all(o.num_cached_tokens == (len(PROMPTS[i]) - 1) // row["block_size"] * row["block_size"]
                   for i, o in zip(order, outputs, strict=True))  # fmt: skip
    assert llm.scheduler.blocks.usage() == 0 and not llm.scheduler.running


def test_the_matrix_covers_every_pair() -> None:
    seen = set().union(*(_pairs(row) for row in ROWS))
    assert all(
        ((a, x), (b, y)) in seen
        for a, b in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
        if is_valid({a: x, b: y})
    )
    assert len(ROWS) < 45
