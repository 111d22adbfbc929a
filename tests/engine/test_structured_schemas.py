"""Valid schemas, whose outputs must validate, and hostile ones, which must harm nobody else."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import grammar_world as world
import pytest
from backends import BACKENDS
from embedded import embedded_model
from grammar_world import PROMPT, formed
from schema_world import HAND_WRITTEN, hostile, valid_schemas

from octavo.engine import LLM, RequestOutput, SamplingParams

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PLAIN = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def complete(schemas: list[Any], outputs: list[RequestOutput]) -> int:
    """How many outputs are complete; each of these validates."""
    count = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (c,) = output.outputs
        assert c.finish_reason in ("stop", "length"), (schema, c.error)
        if c.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(c.text))
            count += 1
    return count


def run_schemas(llm: LLM, schemas: list[Any], **params: Any) -> int:
    compact = [{"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}]
    wanted = [formed({"json": s, **compact[i % 2]}, seed=i, **params) for i, s in enumerate(schemas)]
    return complete(schemas, llm.generate([PROMPT] * len(wanted), wanted, use_tqdm=False))


def test_complete_outputs_validate(folder: Path) -> None:
    schemas = valid_schemas(len(HAND_WRITTEN) + 10)
    llm = world.engine(folder, BACKENDS[0], max_num_seqs=16, max_num_batched_tokens=128)
    assert run_schemas(llm, schemas, max_tokens=60) > 0.8 * len(schemas)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_complete_outputs_of_many_schemas_validate(folder: Path, backend: str) -> None:
    schemas = valid_schemas(200)
    llm = world.engine(folder, backend, max_num_seqs=16, max_num_batched_tokens=128)
    assert run_schemas(llm, schemas, max_tokens=150) > 180


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_real_model_keeps_to_its_form(backend: str) -> None:
    embedded_model()
    llm = LLM("smollm2", backend=backend, max_model_len=512, max_num_seqs=16)
    chat = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "Describe a dog. Answer in JSON."}])
    schemas = valid_schemas(60)[::6]
    params = [formed({"json": s, "disable_any_whitespace": True}, seed=i) for i, s in enumerate(schemas)]
    params = [p.clone(max_tokens=40) for p in params]
    outputs = llm.generate([{"prompt_token_ids": chat}] * len(params), params, use_tqdm=False)
    assert complete(schemas, outputs) > 0.7 * len(schemas)
    pattern, choices = r"(\+\d{1,2} )?\d{3}-\d{4}( ext\. [0-9]+)?", ["é", "日本語", "a dog", "a dog's life"]
    forms = [{"regex": pattern}, {"choice": choices}, {"grammar": 'root ::= "say " ("hi" | "bye")+ "!"?'}]
    params = [formed(form, seed=seed, max_tokens=40) for form in forms for seed in range(3)]
    texts = [o.outputs[0].text for o in llm.generate([{"prompt_token_ids": chat}] * 9, params, use_tqdm=False)]
    assert all(re.fullmatch(pattern, t) for t in texts[:3]) and set(texts[3:6]) <= set(choices)
    assert all(re.fullmatch("say (hi|bye)+!?", t) for t in texts[6:])


def survive(llm: LLM, forms: list[dict[str, Any]], seconds: float) -> dict[str, int]:
    """Sends all these to an engine that serves plain requests meanwhile; how many ended in which way."""
    (first,) = llm.generate([PROMPT], PLAIN, use_tqdm=False)
    expected, ends, open_ids, refusals = list(first.outputs[0].token_ids), {}, {}, []
    longest, left, plain = 0.0, list(enumerate(forms)), 0
    llm.add_request("plain-0", PROMPT, PLAIN)
    while left or llm.scheduler.alive.keys() - {f"plain-{plain}"}:
        while left and len(open_ids) < 40:
            i, form = left.pop()
            try:
                llm.add_request(f"hostile-{i}", PROMPT, formed(form, max_tokens=6, seed=i))
                open_ids[f"hostile-{i}"] = time.perf_counter()
            except (ValueError, TypeError) as error:
                refusals.append(str(error))
        start = time.perf_counter()
        outputs = llm.step()
        longest = max(longest, time.perf_counter() - start)
        for o in filter(lambda o: o.finished, outputs):
            if o.request_id.startswith("plain"):
                assert list(o.outputs[0].token_ids) == expected
                plain += 1
                llm.add_request(f"plain-{plain}", PROMPT, PLAIN)
                continue
            c = o.outputs[0]
            began = open_ids.pop(o.request_id)
            # others may be compiled before it
            assert time.perf_counter() - began < seconds, (forms[int(o.request_id[8:])], c)
            assert c.finish_reason in ("stop", "length", "error")
            assert (c.error is not None) == (c.finish_reason == "error")
            ends[c.finish_reason] = ends.get(c.finish_reason, 0) + 1
    llm.abort(f"plain-{plain}")
    assert all(10 < len(text) < 600 for text in refusals)
    ends["refused"] = len(refusals)
    assert not open_ids and sum(ends.values()) == len(forms) and plain > 3
    assert not llm.scheduler.alive and longest < seconds
    return ends


def test_hostile_constraints_harm_nobody_else(folder: Path) -> None:
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config={"compile_timeout": 1.0})
    ends = survive(llm, hostile(60), 60)
    assert ends["refused"] > 5 and ends["error"] > 15


@pytest.mark.slow
def test_a_thousand_hostile_constraints_harm_nobody_else(folder: Path) -> None:
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config={"compile_timeout": 1.0})
    ends = survive(llm, hostile(1000), 120)
    assert ends["refused"] > 100 and ends["error"] > 300 and ends["length"] + ends["stop"] > 100
