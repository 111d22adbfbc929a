"""Embeddings and hidden states: against a dense float64 model and against transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from backends import BACKENDS
from embedded import embedded_model
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, SHARED, TINY, engine, numpy_weights, spec_of, tokens
from tolerances import tolerance

from octavo.engine import LLM, PoolingParams


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def rows_of(prompt: tuple[int, ...]) -> list[np.ndarray]:
    """The hidden states as transformers numbers them: the last one is normed."""
    w, c = numpy_weights(TINY), spec_of(TINY).config
    rows = oracle.hidden(spec_of(TINY), w, list(prompt))
    return [*rows[:-1], oracle.norm(rows[-1], w["final_norm"].astype(np.float64), c.norm_eps)]


def want(prompt: list[int], pooling: str, normalize: bool = True, dimensions: int | None = None) -> np.ndarray:
    last = rows_of(tuple(prompt))[-1]
    vector = (last[-1] if pooling == "last" else last.sum(0) / len(last))[:dimensions]
    return vector / np.sqrt((vector**2).sum()) if normalize else vector


def vectors(outputs: list[Any]) -> list[np.ndarray]:
    return [np.array(o.outputs.embedding) for o in outputs]


OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 3, "block_size": 4},
    "tight": {"num_gpu_blocks_override": 15, "max_model_len": 104, "max_num_batched_tokens": 24},
    "synchronous": {"async_scheduling": False, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_vectors_are_those_of_the_whole_prompt(name: str) -> None:
    """Whatever the chunks, beside requests that sample, and again when all that may be is in the cache."""
    for backend in BACKENDS if name == "tight" else BACKENDS[:1]:
        llm = engine(backend=backend, **OPTIONS[name])
        for _ in range(2):
            llm.add_request("beside", PROMPTS[4], GREEDY)
            for pooling in ("last", "mean"):
                for prompt, vector in zip(PROMPTS, vectors(llm.embed(PROMPTS, pooling=pooling, use_tqdm=False))):
                    np.testing.assert_allclose(vector, want(prompt, pooling), atol=2e-4)
            llm.abort("beside")
        assert not llm.scheduler.alive and llm.scheduler.blocks.usage() == 0


def test_the_last_reads_the_cache_and_the_mean_does_not() -> None:
    llm = engine()
    counts, cached = [], []
    for pooling in ("last", "last", "mean", "mean"):
        before = llm.scheduler.num_prompt_tokens
        (output,) = llm.embed([SHARED], pooling=pooling, use_tqdm=False)
        counts.append(llm.scheduler.num_prompt_tokens - before)
        cached.append(output.num_cached_tokens)
    assert counts == [41, 1, 41, 41] and cached == [0, 40, 0, 0]


def test_each_prompt_may_have_params_of_its_own() -> None:
    llm = engine()
    each = [
        PoolingParams(), PoolingParams(pooling="mean"), PoolingParams(normalize=False),
        PoolingParams(pooling="mean", dimensions=5), PoolingParams(dimensions=7, normalize=False),
    ]  # fmt: skip
    outputs = llm.embed(PROMPTS[:5], each, use_tqdm=False)
    for prompt, p, output, vector in zip(PROMPTS, each, outputs, vectors(outputs), strict=False):
        np.testing.assert_allclose(vector, want(prompt, p.pooling, p.normalize, p.dimensions), atol=1e-3)
        assert list(output.prompt_token_ids) == prompt and output.finished
        assert len(vector) == output.outputs.hidden_size == (p.dimensions or TINY.embed_dim)


def test_hidden_states_are_those_of_every_layer(backend: str) -> None:
    llm = engine(backend=backend, **OPTIONS["chunks"])
    layers, prompts = (0, 1, 3, 4, -1, -5), PROMPTS[:3]
    for prompt, output in zip(prompts, llm.hidden_states(prompts, layers, use_tqdm=False), strict=True):
        assert list(output.hidden_states) == list(layers)
        for i in layers:
            np.testing.assert_allclose(output.hidden_states[i], rows_of(tuple(prompt))[i], atol=2e-4)


def test_the_last_layer_is_the_default_and_a_prompt_may_come_alone() -> None:
    (alone,) = engine().hidden_states(PROMPTS[0], use_tqdm=False)
    assert list(alone.hidden_states) == [-1] and alone.hidden_states[-1].shape == (9, TINY.embed_dim)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_transformers_says_the_same(kind: str, tmp_path: Path) -> None:
    torch, tiny_hf = pytest.importorskip("torch"), pytest.importorskip("tiny_hf")
    model = tiny_hf.make(kind)
    tiny_hf.save(model, tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=60, max_num_batched_tokens=64)
    prompt = [(13 * i + 5) % 512 for i in range(150)]
    with torch.no_grad():
        theirs = model.model(torch.tensor([prompt]), output_hidden_states=True)
    (ours,) = llm.hidden_states([prompt], (0, 1, 2), use_tqdm=False)
    for i, rows in ours.hidden_states.items():
        np.testing.assert_allclose(rows, theirs.hidden_states[i][0].numpy(), atol=tolerance("float32", "logits"))
    last = theirs.last_hidden_state[0].numpy()
    for pooling, vector in (("last", last[-1]), ("mean", last.mean(0))):
        (output,) = llm.embed([prompt], pooling=pooling, normalize=False, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=tolerance("float32", "logits"))


@pytest.mark.slow
def test_texts_of_the_embedded_model_equal_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = embedded_model()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    llm = LLM(max_model_len=64, num_gpu_blocks_override=20)
    texts = ["A cat sat on the mat.", "One sheet folded into pages."]
    for pooling in ("last", "mean"):
        for output in llm.embed(texts, pooling=pooling, use_tqdm=False):
            with torch.no_grad():
                rows = theirs.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            vector = (rows[-1] if pooling == "last" else rows.mean(0)).numpy()
            np.testing.assert_allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-5)


BAD = {
    "pooling": ({"pooling": "first"}, "pooling 'first': choose one of last, mean"),
    "dimensions": ({"dimensions": 0}, "dimensions 0"),
    "too many": ({"dimensions": 33}, "dimensions 33 is more than the model's hidden size, 32"),
    "flag": ({"normalize": 1}, "normalize 1"),
    "unknown": ({"pooling_type": "LAST"}, "it is called pooling here"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_params_are_named(name: str) -> None:
    wrong, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        engine().embed([[1]], **wrong, use_tqdm=False)


def test_wrong_calls_say_what_is_wrong() -> None:
    llm = engine()
    with pytest.raises(ValueError, match="2 pooling params for 1 prompts"):
        llm.embed([[1]], [PoolingParams()] * 2, use_tqdm=False)
    with pytest.raises(ValueError, match="0 pooling params for 1 prompts"):
        llm.embed([[1]], [], use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_params and pooling"):
        llm.embed([[1]], PoolingParams(), pooling="mean", use_tqdm=False)
    for layers, words in (((5,), "layers 5"), ((-6,), "layers -6"), ((), "layers is empty"), ((1.5,), "layers 1.5")):
        with pytest.raises(ValueError, match=words):
            llm.hidden_states([[1]], layers, use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.embed([[1], []], use_tqdm=False)
    assert not llm.has_unfinished_requests()


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="only JAX spreads a model over devices")
def test_devices_that_share_the_model_say_the_same() -> None:
    """Embeddings, hidden states, and prompts that are given as embeddings, of one device and of two."""
    common = {"backend": "jax", "enable_prompt_embeds": True, "max_num_batched_tokens": 32}
    one, two = engine(EIGHT_HEADS, **common), engine(EIGHT_HEADS, **common, tensor_parallel_size=2)
    prompts, table = PROMPTS[:3], numpy_weights(EIGHT_HEADS)["embed"]
    for pooling in ("last", "mean"):
        each = (vectors(llm.embed(prompts, pooling=pooling, use_tqdm=False)) for llm in (one, two))
        for a, b in zip(*each, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    a, b = (llm.hidden_states(prompts[:1], (0, 1), use_tqdm=False)[0].hidden_states for llm in (one, two))
    for i in (0, 1):
        np.testing.assert_allclose(a[i], b[i], atol=1e-4)
    given = [{"prompt_embeds": table[p]} for p in prompts]
    assert tokens(two, given) == tokens(one, given) == tokens(one, prompts)
