"""enable_sp: hidden rows shared out over devices by tokens. Tokens and rows of one device, on both backends."""

from __future__ import annotations

import jax  # noqa: F401
import numpy as np
import pytest
import tiny
import tiny_moe
import torch  # noqa: F401
from oracle import greedy
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, engine, numpy_weights, spec_of, tokens
from tolerances import tolerance

from octavo.engine import LLM, SamplingParams
from octavo.engine.config import engine_config
from octavo.engine.parallel.devices import kind_of_step
from octavo.models.interface import ModelSpec

EP = {"enable_expert_parallel": True}


def shared(backend: str, model: str = "dense", **more: object) -> LLM:
    make = tiny_moe.engine if model == "moe" else lambda **a: engine(EIGHT_HEADS, **a)
    return make(backend=backend, tensor_parallel_size=2, enable_sp=True, max_num_batched_tokens=16, **more)


def check(llm: LLM, model: ModelSpec, weights: object) -> None:
    """Greedy tokens are those of the oracle, from the cache too, and hidden rows those of one device."""
    prompts = PROMPTS[:3]
    want = [greedy(model, weights, p, GREEDY.max_tokens) for p in prompts]
    assert tokens(llm, prompts) == want
    assert tokens(llm, prompts) == want
    one = LLM(model, weights=weights, backend="torch", block_size=8, num_gpu_blocks_override=120, threads=1)
    every = list(range(len(model.attention) + 1))
    for got, rows in zip(*(x.hidden_states(prompts, every, use_tqdm=False) for x in (llm, one)), strict=True):
        for i in every:
            np.testing.assert_allclose(
                got.hidden_states[i], rows.hidden_states[i], rtol=0, atol=tolerance("float32", "logits")
            )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for got, rows in zip(*(x.generate(prompts, params, use_tqdm=False) for x in (llm, one)), strict=True):
        for a, b in zip(got.prompt_logprobs[1:], rows.prompt_logprobs[1:], strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[i].logprob - b[i].logprob) < tolerance("float32", "logits") for i in a)
    llm.shutdown()


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_dense_model(backend: str) -> None:
    check(shared(backend), spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("more", [{}, EP], ids=["split", "whole"])
def test_experts(backend: str, more: dict[str, object]) -> None:
    check(shared(backend, "moe", **more), tiny_moe.spec(), tiny_moe.weights())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_prompts_as_embeddings(backend: str) -> None:
    table = numpy_weights(EIGHT_HEADS)["embed"]
    llm = shared(backend, enable_prompt_embeds=True)
    prompts = [{"prompt_embeds": table[p]} for p in PROMPTS[:3]]
    got = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in PROMPTS[:3]]
    assert got == want
    llm.shutdown()


def test_small_and_uneven_steps_keep_whole_rows() -> None:
    arguments = {"tensor_parallel_size": 4, "enable_sp": True, "sp_min_token_num": 16}
    config = engine_config(spec_of(EIGHT_HEADS), **arguments)
    assert [kind_of_step(config, n) for n in (4, 12, 16, 18, 64)] == ["whole", "whole", "shared", "whole", "shared"]
    assert kind_of_step(engine_config(spec_of(EIGHT_HEADS), tensor_parallel_size=4), 64) == "whole"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_sp": True}, "enable_sp=True with tensor_parallel_size 1"),
        (
            {"enable_sp": True, "tensor_parallel_size": 2, "sharding_rules": {"mlp": "tp"}},
            "enable_sp=True with sharding_rules that leave 'tokens' out",
        ),
        ({"sp_min_token_num": 8, "tensor_parallel_size": 2}, "sp_min_token_num=8 limits nothing without enable_sp"),
        ({"sharding_rules": {"tokens": "pp"}, "tensor_parallel_size": 2}, "'tokens' goes to 'pp': 'tp' alone"),
    ],
)
def test_what_shares_nothing_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny.engine(**arguments)
