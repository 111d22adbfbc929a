"""LLM over replicas that share experts: whatever requests ask for, it is what one device gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grammar_world
import jax  # noqa: F401
import numpy as np
import pytest
import tiny
import tiny_moe
import torch  # noqa: F401
from backends import BACKENDS
from graphed import PLAIN
from ranks import FALLING
from recorder import graphs_on_a_cpu
from tiny import GREEDY, PROMPTS, RANDOM
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.models import qwen3_moe

EP = {"enable_expert_parallel": True, "data_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}


def engine(folder: Path, backend: str, **more: Any) -> LLM:
    """With a tokenizer, for grammars; room for so little that somebody is preempted."""
    config = replace(tiny_moe.CONFIG, vocab_size=grammar_world.vocab_size(folder))
    model = qwen3_moe.spec(config, tiny_moe.MIXTURE)
    threads = {"threads": 1} if backend == "torch" else {}
    return LLM(
        model, weights=tiny.weights_of(model), tokenizer=str(folder), backend=backend, block_size=8, max_num_seqs=4,
        max_num_batched_tokens=32, num_gpu_blocks_override=18, **threads, **more,
    )  # fmt: skip


REQUESTS: list[tuple[Any, SamplingParams]] = [
    (PROMPTS[3], GREEDY),
    (PROMPTS[0], replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    (PROMPTS[2], replace(RANDOM, n=2)),
    (PROMPTS[4], GREEDY),
    (PROMPTS[1], replace(GREEDY, repetition_penalty=1.3, logit_bias={7: 2.0}, logprobs=1)),
    (PROMPTS[5], replace(GREEDY, logprob_token_ids=[5, 9])),
    (grammar_world.PROMPT, grammar_world.formed({"regex": "(ab|cd|12)+"})),
    (grammar_world.PROMPT, grammar_world.formed({"choice": ["yes", "maybe"]})),
]


def answers(llm: LLM) -> list[Any]:
    """Ids and logprobs of everything."""
    prompts, params = zip(*REQUESTS, strict=True)
    prompts = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    found: list[Any] = [[list(o.token_ids) for o in each.outputs] for each in outputs]
    known = [at for o in outputs for at in (o.outputs[0].logprobs or [])]
    known += [at for at in outputs[1].prompt_logprobs or [] if at]
    return [found, [{i: x.logprob for i, x in at.items()} for at in known], [o.num_cached_tokens for o in outputs]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "more"), [*((backend, {}) for backend in BACKENDS), ("jax", PP)], ids=[*BACKENDS, "jax in stages"]
)
def test_whatever_requests_ask_for_at_once(backend: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = grammar_world.save_tokenizer(tmp_path)
    # JAX too is compared with torch, which compiles nothing
    one, joint = engine(folder, "torch"), engine(folder, backend, **EP, **more)
    for _ in range(2):
        (want, want_logprobs, _), (got, got_logprobs, hits) = answers(one), answers(joint)
        assert got == want
        for a, b in zip(got_logprobs, want_logprobs, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose([*a.values()], [b[i] for i in a], rtol=0, atol=tolerance("float32", "logits"))
    assert any(hits)
    assert any(r.scheduler.num_preemptions for r in joint.replicas)
    vectors = [llm.embed([PROMPTS[0], PROMPTS[3], PROMPTS[1]], use_tqdm=False) for llm in (one, joint)]
    for a, b in zip(*vectors, strict=True):
        np.testing.assert_allclose(a.outputs.embedding, b.outputs.embedding, rtol=0, atol=1e-5)
    routed = [llm.routed_experts(PROMPTS[:3], use_tqdm=False) for llm in (one, joint)]
    for a, b in zip(*routed, strict=True):
        assert all((a.routed_experts[n] == b.routed_experts[n]).all() for n in tiny_moe.MIXTURE.layers)
    joint.shutdown()


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        pytest.param("jax", {}, marks=pytest.mark.slow),
        pytest.param("jax", PP, marks=pytest.mark.slow),
        ("torch", {}),
    ],
    ids=["jax", "jax in stages", "torch"],
)
def test_a_step_that_fails_ends_the_requests_of_all_and_no_later_one(backend: str, more: dict[str, Any]) -> None:
    """Each replica's experts are in the other's step."""
    llm = tiny_moe.engine(backend=backend, logits_processors=[FALLING], **EP, **more)
    for i in range(3):
        llm.add_request(str(i), PROMPTS[i], GREEDY)
    llm.add_request("falls", PROMPTS[0], replace(GREEDY, extra_args={"falling": {}}))
    outputs = []
    with pytest.raises(ValueError, match="logits processor 'falling' returned"):
        while llm.has_unfinished_requests():
            llm.step()
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert {o.request_id: o.outputs[0].finish_reason for o in outputs} == dict.fromkeys(["falls", *"012"], "error")
    want = tiny.tokens(tiny_moe.engine(backend="torch"), PROMPTS[:3])
    assert tiny.tokens(llm, PROMPTS[:3]) == want
    llm.shutdown()


@pytest.mark.slow
def test_replicas_meet_in_graphs_and_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what layers gather is in recordings, what was sampled is gathered outside of them."""
    recorder = graphs_on_a_cpu(monkeypatch)
    llm = tiny_moe.engine(backend="torch", logits_processors=[PLAIN], warmup="all", **EP)
    before = llm.backend.num_compiles()
    got = tiny.tokens(llm, PROMPTS[:3])
    assert recorder.replays > 20 and llm.backend.num_compiles() == before > 0
    llm.shutdown()
    assert got == tiny.tokens(tiny_moe.engine(backend="torch", enforce_eager=True), PROMPTS[:3])


def test_embeddings_of_one_prompt_and_ids_of_another_and_a_sleep_between() -> None:
    rows = {"prompt_embeds": tiny_moe.weights()["embed"][PROMPTS[0]]}
    prompts = [rows, PROMPTS[2], PROMPTS[1]]
    want = tiny.tokens(tiny_moe.engine(backend="torch"), PROMPTS[:1] + prompts[1:])
    llm = tiny_moe.engine(backend="torch", enable_prompt_embeds=True, enable_sleep_mode=True, **EP)
    assert tiny.tokens(llm, prompts) == want
    llm.sleep()
    llm.wake_up()
    assert tiny.tokens(llm, prompts) == want
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"pipeline_parallel_size": 2}], ids=["one-stage", "stages"])
def test_expert_load_counts_the_tokens_of_all_replicas(backend: str, more: dict[str, Any]) -> None:
    def counted(backend: str, **more: Any) -> list[list[int]]:
        llm = tiny_moe.engine(backend=backend, expert_load_metrics=True, disable_log_stats=False, **more)
        llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
        llm.shutdown()
        assert llm.runner.load_of_all
        return llm.runner.load_of_all.read()

    want = counted("torch", async_scheduling=False)
    assert counted(backend, **EP, **more, async_scheduling=False) == want


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"backend": "jax", "distributed_executor_backend": "mp"}, "several processes of JAX"),
        ({"step_log": "/dev/null"}, "step_log"),
    ],
)
def test_what_does_not_go_with_it_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        tiny_moe.engine(**({"backend": "torch"} | EP | more))
