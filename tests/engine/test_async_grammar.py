"""Outputs that must have a form, for an event loop: their grammars and its errors travel like all else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import grammar_world as world
import psutil
import pytest
from async_engines import SIZES, freed, outputs_of, quiet, run
from backends import BACKENDS
from tiny import TINY, numpy_weights, spec_of

from octavo.engine import LLM, AsyncLLM

pytest.importorskip("llguidance")

FORMS: list[dict[str, Any]] = [
    {"regex": r"[0-9]{3}-[a-z]{2,5}"},
    {"choice": ["yes", "no", "nobody"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = world.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = dataclasses.replace(TINY, vocab_size=world.vocab_size(folder))
    return {"model": spec_of(config), "weights": numpy_weights(config), "tokenizer": str(folder)}


@pytest.fixture(scope="module")
def engine(parts: dict[str, Any]) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**parts, **SIZES, **quiet(BACKENDS[0]))
    children = psutil.Process(engine.client.child.pid)
    yield engine
    left = children.children(recursive=True)
    engine.shutdown()
    _, alive = psutil.wait_procs(left, 10)
    assert not alive


def test_formed_outputs_are_those_of_an_llm(engine: AsyncLLM, parts: dict[str, Any]) -> None:
    params = [world.formed(form, seed=seed) for form in FORMS for seed in range(3)]
    llm = LLM(**parts, **SIZES, **quiet(BACKENDS[0]))
    want = [o.outputs for o in llm.generate([world.PROMPT] * len(params), params, use_tqdm=False)]

    async def work() -> list[Any]:
        return await asyncio.gather(*(outputs_of(engine.generate(world.PROMPT, p)) for p in params))

    assert [outputs[-1].outputs for outputs in run(work)] == want
    assert run(lambda: freed(engine))


WRONG: list[dict[str, Any]] = [{"regex": "(["}, {"json": '{"type": "nothing"}'}, {"grammar": "root ::= missing"}]


@pytest.mark.parametrize("form", WRONG, ids=str)
def test_a_wrong_grammar_is_its_requests_error(engine: AsyncLLM, form: dict[str, Any]) -> None:
    async def work() -> None:
        beside = asyncio.create_task(outputs_of(engine.generate(world.PROMPT, world.formed(FORMS[0]))))
        with pytest.raises(ValueError):
            await outputs_of(engine.generate(world.PROMPT, world.formed(form)))
        assert (await beside)[-1].outputs[0].finish_reason in ("stop", "length")
        assert await freed(engine)

    run(work)
