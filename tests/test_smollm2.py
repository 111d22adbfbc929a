"""The embedded real model against transformers: tokens (made by golden/make_smollm2.py) and, slowly, all logits."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from embedded import embedded_model
from model_harness import cache_with, step_input
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.models import step

ENTRIES = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())["entries"]
PROMPTS = [{"prompt_token_ids": e["ids"]} for e in ENTRIES]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
PADDED = (128, 256, 2048)  # lengths that the logits programs are compiled for


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest) -> LLM:
    embedded_model()
    return LLM("smollm2", backend=request.param, max_model_len=2048)


def test_prompts_are_tokenized_as_transformers_does(llm: LLM) -> None:
    for e in ENTRIES:
        text = e["prompt"]
        ids = llm.tokenizer.encode(text) if isinstance(text, str) else llm.tokenizer.apply_chat_template(text)
        assert ids == e["ids"], text


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    """Up to a tie, where the runner-up is as good; behind it, on with transformers' own token."""
    ties = 0
    for entry, output in zip(ENTRIES, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        got, want, done = list(output.outputs[0].token_ids), entry["tokens"], 0
        while got != want[done:]:
            at = done + _first_difference(got, want[done:])
            gap = entry["gap"][at : at + 1]
            assert gap and gap[0] < tolerance("float32", "tie"), (entry["prompt"], at, gap)
            assert got[at - done] == entry["second"][at]
            ties, done = ties + 1, at + 1
            got = _generate(llm, entry["ids"] + want[:done], len(want) - done)
    print(f"{llm.backend.name}: {ties} ties")
    assert ties <= 3


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _generate(llm: LLM, ids: list[int], max_tokens: int) -> list[int]:
    if not max_tokens:
        return []
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return list(llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids)


ROWS = {
    "small blocks, small budget, synchronous": {
        "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 4, "async_scheduling": False,
    },
    "large blocks, head major, tight pool": {
        "block_size": 32, "layout": "head_major", "num_gpu_blocks_override": 18, "max_model_len": 512,
    },
    "no cache, unsplit, prefill first": {
        "enable_prefix_caching": False, "enable_chunked_prefill": False, "max_model_len": 512,
        "scheduler_order": "prefill_first",
    },
    "reference attention": {"attention": "reference", "max_model_len": 512},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_matrix(backend: str, name: str) -> None:
    llm = LLM("smollm2", backend=backend, **({"max_model_len": 2048} | ROWS[name]))
    short = [i for i, e in enumerate(ENTRIES) if len(e["ids"]) < 300]
    outputs = llm.generate([PROMPTS[i] for i in short], GREEDY, use_tqdm=False)
    for i, output in zip(short, outputs, strict=True):
        got, entry = list(output.outputs[0].token_ids), ENTRIES[i]
        at = _first_difference(got, entry["tokens"])
        assert got == entry["tokens"] or entry["gap"][at] < tolerance("float32", "tie"), entry["prompt"]
    if "tight" in name:
        assert llm.scheduler.num_preemptions > 10


def forced_logits(llm: LLM, ids: list[int]) -> np.ndarray:
    """[T, V], teacher-forced through the step, in one chunk padded to one of few lengths."""
    padded = next(n for n in PADDED if n >= len(ids))

    def program(w: dict, cache: Any, inputs: Any, *, ops: Any) -> Any:
        x_TE, cache = step.run_layers(w, cache, inputs, ops=ops, model=llm.model, layout=llm.layout)
        return llm.model.unembed(w, x_TE, ops), cache

    backend = llm.backend
    run = backend.compile(partial(program), ("weights", "cache", "inputs"), ("logits", "cache"), consumes="cache")
    cache, tables = cache_with(llm.model, llm.layout, backend, ids + [0] * (padded - len(ids)))
    return backend.read(run(llm.runner.weights, cache, step_input(tables, len(ids), padded))[0])[: len(ids)]


@pytest.fixture(scope="module")
def hf_logits() -> list[tuple[np.ndarray, float]]:
    """Of each prompt with its continuation: transformers' fp32 logits, and how far they are from its own fp64."""
    import torch
    import transformers

    path = embedded_model()
    hf = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        inputs = [torch.tensor([e["ids"] + e["tokens"]]) for e in ENTRIES]
        fp32 = [hf(ids).logits[0].numpy() for ids in inputs]
        hf = hf.double()
        far = [np.abs(hf(ids).logits[0].numpy() - x).max() for ids, x in zip(inputs, fp32, strict=True)]
    return list(zip(fp32, map(float, far), strict=True))


@pytest.mark.slow
def test_logits_are_those_of_transformers(llm: LLM, hf_logits: list[tuple[np.ndarray, float]]) -> None:
    """Within the tolerance of a checkpoint; where transformers itself is further from fp64, within 3x that."""
    worst: dict[str, tuple[float, float]] = {}
    wrong = []
    for e, (want, own_error) in zip(ENTRIES, hf_logits, strict=True):
        error = float(np.abs(forced_logits(llm, e["ids"] + e["tokens"]) - want).max())
        bound = tolerance("float32", "checkpoint")
        if e["kind"] not in ("natural", "chat"):
            bound = max(bound, 3 * own_error)
        worst[e["kind"]] = max(worst.get(e["kind"], (0.0, 0.0)), (error, own_error))
        if not error < bound:
            wrong.append((e["prompt"], error, own_error))
    print(f"{llm.backend.name}: kind -> (largest logit error, transformers' own) {worst}")
    assert not wrong


SHORT = [e for e in ENTRIES if e["kind"] == "natural" and len(e["ids"]) < 60][:4]


@pytest.fixture(scope="module")
def hf_logprobs() -> list[np.ndarray]:
    """[T, V] of each of SHORT with its continuation, of transformers in fp32."""
    import torch
    import transformers

    path = embedded_model()
    hf = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        logits = [hf(torch.tensor([e["ids"] + e["tokens"]])).logits[0] for e in SHORT]
    return [torch.log_softmax(x.double(), -1).numpy() for x in logits]


@pytest.mark.slow
def test_logprobs_are_those_of_transformers(llm: LLM, hf_logprobs: list[np.ndarray]) -> None:
    """Of prompts, of a sampled token and of what is scored; a log-softmax lies as far off as its logits, twice."""
    near = 2 * tolerance("float32", "checkpoint")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5, logprobs=5)
    prompts = [{"prompt_token_ids": e["ids"] + e["tokens"][:-1]} for e in SHORT]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    scores = llm.score([e["ids"] for e in SHORT], [e["tokens"] for e in SHORT], use_tqdm=False)
    for e, right, output, (scored,) in zip(SHORT, hf_logprobs, outputs, scores, strict=True):
        start, ids, (c,) = len(e["ids"]), [*e["ids"], *e["tokens"]], output.outputs
        for row, entry in zip(right, [*output.prompt_logprobs[1:], c.logprobs[0]], strict=False):
            fifth = np.sort(row)[-5]
            assert all(abs(found.logprob - row[token]) < near for token, found in entry.items())
            assert sum(row[token] > fifth - near for token in entry) >= 5
        assert [next(iter(entry)) for entry in output.prompt_logprobs[1:]] == ids[1:-1]
        picked = [right[i - 1, ids[i]] for i in range(start, len(ids))]
        assert np.abs(np.subtract(scored.logprobs, picked)).max() < near
        assert scored.logprob == pytest.approx(sum(picked), abs=near * len(picked))
        assert b"".join(map(llm.tokenizer.token_bytes, ids)).decode() == llm.tokenizer.decode(ids, False)
        assert "".join(scored.decoded_tokens) == llm.tokenizer.decode(e["tokens"], False)
