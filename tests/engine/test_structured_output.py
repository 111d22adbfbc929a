"""Outputs that must have a form: legal tokens only, whatever else a request asks for, and errors of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grammar_world as world
import numpy as np
import pytest
from backends import BACKENDS
from grammar_world import PROMPT, formed

from octavo.engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, grammar_worker
from octavo.engine.grammar_compiler import GrammarCompiler, Limits
from octavo.engine.grammar_worker import Vocabulary

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["ab", "é"]}}},
    "required": ["n"],
    "additionalProperties": False,
}
# a second or more to compile
SLOW = {"type": "integer", "multipleOf": 999983}
COMPACT = {"disable_any_whitespace": True}
CHOICES = ["yes", "no", "nobody", 'a "q" é 日本', "\n\t/"]
FORMS: list[dict[str, Any]] = [
    {"regex": r"[0-9]{3}-[a-z]{2,5}"},
    {"choice": CHOICES},
    {"json": PERSON, **COMPACT},
    {"json_object": True, **COMPACT},
    {"grammar": 'root ::= "a" tail | "c"\ntail ::= [0-9]+ "z"'},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return world.engine(folder, request.param)


@pytest.fixture(scope="module")
def any_llm(folder: Path) -> LLM:
    return world.engine(folder, BACKENDS[0])


def run(llm: LLM, params: list[SamplingParams], prompts: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts or [PROMPT] * len(params), params, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(c.token_ids) for c in o.outputs] for o in outputs]


def test_outputs_have_their_form(llm: LLM) -> None:
    params = [formed(form, seed=seed, max_tokens=80) for form in FORMS for seed in range(3)]
    whole = 0
    for p, output in zip(params, run(llm, params)):
        (c,) = output.outputs
        form = p.structured_outputs
        assert c.error is None and c.finish_reason in ("stop", "length")
        if c.finish_reason == "length":
            assert len(c.token_ids) == 80
            continue
        whole += 1
        assert c.stop_reason is None and c.token_ids[-1] in llm.eos_ids
        if form.regex:
            assert re.fullmatch(form.regex, c.text)
        elif form.choice:
            assert c.text in CHOICES
        elif form.grammar:
            assert re.fullmatch(r"a[0-9]+z|c", c.text)
        else:
            value = json.loads(c.text)
            assert isinstance(value, dict)
            if form.json:
                assert isinstance(value["n"], int) and set(value) <= {"n", "tags"}
                assert set(value.get("tags", [])) <= {"ab", "é"}
    assert whole >= 11


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_one_that_is_cut_ends_by_length(any_llm: LLM, max_tokens: int) -> None:
    (o,) = run(any_llm, [formed({"regex": "[0-9]{30}"}, max_tokens=max_tokens)])
    assert o.outputs[0].finish_reason == "length" and len(o.outputs[0].token_ids) == max_tokens


def legal(llm: LLM, choices: list[str], said: bytes) -> set[int]:
    """By trying each token: the ids that can follow what has been said on the way to one of the choices."""
    wanted = [c.encode() for c in choices]
    found = {i for i in range(len(llm.tokenizer)) if i not in llm.tokenizer.special_ids}
    found = {i for i in found if any(w.startswith(said + llm.tokenizer.token_bytes(i)) for w in wanted)}
    return found | (set(llm.eos_ids) if said in wanted else set())


def test_each_mask_is_what_trying_every_token_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, masks = world.engine(folder, BACKENDS[0]), []
    mask = llm.structured.mask
    monkeypatch.setattr(llm.structured, "mask", lambda plan: masks.append(mask(plan)) or masks[-1])
    for seed in range(4):
        masks.clear()
        (o,) = run(llm, [formed({"choice": CHOICES}, seed=seed)])
        tokens, size = list(o.outputs[0].token_ids), len(llm.tokenizer)
        assert len([m for m in masks if m is not None]) >= len(tokens)
        masks_of_steps = [m for m in masks if m is not None][: len(tokens)]
        said = b""
        for m, token in zip(masks_of_steps, tokens):
            bits = np.unpackbits(m.view(np.uint8), axis=1, bitorder="little")[0, :size]
            assert set(np.flatnonzero(bits)) == legal(llm, CHOICES, said)
            said += llm.tokenizer.token_bytes(token)


def test_tokens_are_the_same_overlapped_alone_mixed_and_after_preemption(folder: Path, llm: LLM) -> None:
    name = llm.backend.name
    plain = [SamplingParams(temperature=0.8, seed=i, max_tokens=40) for i in range(2)]
    params = [formed(form) for form in [*FORMS, *[{"regex": "[a-d]{30}"}] * 3]]
    alone = [ids(run(llm, [p]))[0] for p in params]
    assert ids(run(llm, [*params, *plain]))[: len(params)] == alone
    sync, tight = {"async_scheduling": False}, {"num_gpu_blocks_override": [10, 80], "max_model_len": 64}
    # JAX compiles for each, so there it is one engine
    for more in (sync, tight) if name == "torch" else (sync | tight,):
        other = world.engine(folder, name, **more)
        assert ids(run(other, [*plain, *params]))[2:] == alone
        assert (other.scheduler.num_preemptions > 0) == ("max_model_len" in more)


def test_samples_have_states_of_their_own(any_llm: LLM) -> None:
    form = {"regex": "(ab|cd|[0-9]){1,12}"}
    (o,) = run(any_llm, [formed(form, n=4, seed=7)])
    single = [ids(run(any_llm, [formed(form, seed=7 + i)]))[0][0] for i in range(4)]
    assert ids([o])[0] == single and len({tuple(t) for t in single}) > 1


def test_logprobs_are_of_the_distribution_before_the_mask(any_llm: LLM) -> None:
    (o,) = run(any_llm, [formed({"choice": ["yes", "no"]}, logprobs=2)])
    first = o.outputs[0].logprobs[0]
    (free,) = run(any_llm, [SamplingParams(temperature=1.0, seed=5, max_tokens=1, logprobs=2)])
    likeliest = list(free.outputs[0].logprobs[0].items())
    for token, logprob in likeliest:
        if logprob.rank <= 2:
            assert first[token].logprob == pytest.approx(logprob.logprob, abs=1e-5)
    assert len(first) == 3


def test_stops_end_it_as_they_end_any_other(any_llm: LLM) -> None:
    (o,) = run(any_llm, [formed({"regex": "a{5}bb"}, stop=["aab"])])
    assert (o.outputs[0].text, o.outputs[0].stop_reason) == ("aaa", "aab")
    # a stop id that is no text of the grammar is legal where the output may end, and only there
    pad = any_llm.tokenizer.pad_token_id
    (o,) = run(any_llm, [formed({"choice": ["yes", "no"]}, stop_token_ids=[pad], n=32, temperature=2.0)])
    assert {c.text for c in o.outputs} == {"yes", "no"} and {c.finish_reason for c in o.outputs} == {"stop"}
    assert {c.stop_reason for c in o.outputs} == {None, pad}


def test_min_tokens_hold_open_what_may_go_on(any_llm: LLM) -> None:
    (o,) = run(any_llm, [formed({"choice": ["yes", "no"]}, min_tokens=20)])
    assert o.outputs[0].text in ("yes", "no") and o.outputs[0].finish_reason == "stop"
    (o,) = run(any_llm, [formed({"regex": "[ab]*"}, min_tokens=40, max_tokens=60)])
    assert len(o.outputs[0].token_ids) >= 40 and re.fullmatch("[ab]*", o.outputs[0].text)


def test_a_token_that_is_not_legal_ends_it_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other parameters forbid all that the grammar allows: here the mask is not heeded at all."""
    llm = world.engine(folder, BACKENDS[0])
    mask, made = llm.structured.mask, []

    def heeded_twice(plan: Any) -> Any:
        made.append(mask(plan))
        return made[-1] if sum(m is not None for m in made) <= 2 else None

    monkeypatch.setattr(llm.structured, "mask", heeded_twice)
    (o, other) = run(llm, [formed({"regex": "a{40}"}), SamplingParams(temperature=0, max_tokens=30)])
    (c,) = o.outputs
    assert c.finish_reason == "error" and "no legal token was left" in c.error
    assert re.fullmatch("a{1,39}", c.text) and len(other.outputs[0].token_ids) == 30


WRONG = {
    "regex": [{"regex": "["}, {"regex": "(?=a)b"}, {"regex": r"[^\s\S]"}],
    "schema": [{"json": {"not": {}}}, {"json": {"type": "colour"}}, {"json": '{"$ref": "#/a"}'}, {"json": "false"}],
    "grammar": [{"grammar": "root ::= other"}, {"grammar": 'root ::= "a'}, {"grammar": "start: start"}],
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_grammar_ends_its_request_alone(any_llm: LLM, kind: str) -> None:
    good = [SamplingParams(temperature=0, max_tokens=10), formed({"choice": ["yes"]})]
    wrong = [formed(form, n=2) for form in WRONG[kind]]
    outputs = run(any_llm, [good[0], *wrong, good[1]])
    assert ids([outputs[0]]) == ids(run(any_llm, [good[0]]))
    assert outputs[-1].outputs[0].text == "yes"
    for o in outputs[1:-1]:
        assert o.finished and len(o.outputs) == 2
        for c in o.outputs:
            assert (c.finish_reason, c.text, list(c.token_ids)) == ("error", "", [])
            assert c.error.startswith("structured_outputs: ") and 30 < len(c.error) < 500 and "\n" not in c.error


def test_a_stream_raises_the_error_of_its_grammar(any_llm: LLM) -> None:
    with pytest.raises(ValueError, match="unclosed character class"):
        list(any_llm.stream(PROMPT, formed({"regex": "["})))
    assert "".join(any_llm.stream(PROMPT, formed({"choice": ["maybe"]}))) == "maybe"


def test_step_returns_a_queued_request_whose_grammar_is_wrong(any_llm: LLM) -> None:
    any_llm.add_request("bad", PROMPT, formed({"regex": "["}))
    found = []
    while any_llm.has_unfinished_requests():
        found += any_llm.step()
    assert [(o.request_id, o.outputs[0].finish_reason, o.finished) for o in found] == [("bad", "error", True)]


def test_a_request_waits_aside_while_its_grammar_is_compiled(folder: Path) -> None:
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config={"compile_timeout": 3.0})
    run(llm, [formed({"choice": ["yes"]})])
    slow = formed({"json": SLOW})
    llm.add_request("slow", PROMPT, slow)
    start = time.perf_counter()
    (o,) = run(llm, [SamplingParams(temperature=0, max_tokens=5)])
    assert len(o.outputs[0].token_ids) == 5
    assert llm.scheduler.alive["slow"].compiling and time.perf_counter() - start < 3
    found = []
    while llm.has_unfinished_requests():
        found += llm.step()
    assert "more than 3 seconds" in found[0].outputs[0].error
    # and the next one is compiled by a new process
    assert run(llm, [formed({"choice": ["no"]})])[0].outputs[0].text == "no"


def test_a_worker_whose_engine_was_killed_ends_by_itself() -> None:
    """Nobody is left to kill it, and it does not see that its commands have ended while it compiles."""
    ends, command = [256], [sys.executable, "-P", grammar_worker.__file__]
    setup = grammar_worker.pack(Vocabulary([*(bytes([i]) for i in range(256)), b""], {}, ends), sys.path, 2**31, 0.5)
    slow = json.dumps(["json", json.dumps({"schema": SLOW, "closed": False, "options": {}})])
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        child.communicate(f"{setup}\n{slow}\n".encode(), timeout=15)
        assert child.returncode == -signal.SIGALRM
    finally:
        child.kill()


def test_a_second_grammar_is_not_held_up_by_the_first_ones_vocabulary() -> None:
    """An engine asks between two steps, for all that run."""
    entered, go = threading.Event(), threading.Event()

    def vocabulary() -> Vocabulary:
        entered.set()
        assert go.wait(20)
        return Vocabulary([*(bytes([i]) for i in range(256)), b""], {}, [256])

    compiler = GrammarCompiler(vocabulary, Limits())
    first = compiler.compile(("regex", "a"))
    assert entered.wait(20)
    asking = threading.Thread(target=compiler.compile, args=(("regex", "b"),))
    asking.start()
    asking.join(2)
    held_up = asking.is_alive()
    go.set()
    asking.join()
    assert not held_up
    while not first.done:
        assert compiler.wake.wait(20)
        compiler.wake.clear()
    assert first.error is None and first.matcher is not None


def test_one_that_is_aborted_while_it_is_compiled_is_gone(folder: Path) -> None:
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config={"compile_timeout": 1.0})
    llm.add_request("slow", PROMPT, formed({"json": SLOW}))
    llm.abort("slow")
    assert not llm.has_unfinished_requests() and llm.step() == []


def test_a_failed_step_ends_them_and_the_engine_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = world.engine(folder, BACKENDS[0])
    expected = ids(run(llm, [formed(f) for f in FORMS[:2]]))
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch_head", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            run(llm, [formed(f) for f in FORMS[:2]])
    assert not llm.structured.alive and ids(run(llm, [formed(f) for f in FORMS[:2]])) == expected


def test_what_can_never_be_served_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny

    with pytest.raises(ValueError, match="needs a tokenizer"):
        run(tiny.engine(), [formed({"regex": "a"})], [[1, 2]])
    llm = world.engine(folder, BACKENDS[0])
    llm.structured.eos_ids = []
    with pytest.raises(ValueError, match="end-of-text token"):
        run(llm, [formed({"regex": "a"})])
    llm.structured.eos_ids = sorted(llm.eos_ids)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'octavo\[grammar\]'"):
        run(llm, [formed({"regex": "a"})])


def test_compiled_grammars_are_kept_and_the_oldest_forgotten(folder: Path) -> None:
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config={"cache_size": 2})
    for text in ("a", "b", "a", "c", "a"):
        run(llm, [formed({"regex": text})])
    assert [text for _, text in llm.structured.compiler.cache] == ["c", "a"]


def test_the_engine_can_ask_for_json_without_whitespace_and_extras(folder: Path) -> None:
    config = {"disable_any_whitespace": True, "disable_additional_properties": True, "backend": "guidance"}
    llm = world.engine(folder, BACKENDS[0], structured_outputs_config=config)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for o in run(llm, [formed({"json": schema}, seed=i) for i in range(4)]):
        assert o.outputs[0].text in ('{"a":true}', '{"a":false}')


def test_a_structural_tag_holds_what_begins_with_its_trigger(any_llm: LLM) -> None:
    tag = {"triggers": ["a"], "structures": [{"begin": "ab", "schema": {"enum": [12, True]}, "end": "!"}]}
    params = [formed({"structural_tag": tag, **COMPACT}, seed=i, max_tokens=48) for i in range(4)]
    for o in run(any_llm, params):
        # whatever begins with an a is a whole structure, but for the last if it is cut
        text = re.sub("ab(12|true)!", "", o.outputs[0].text)
        cut = text.find("a")
        assert cut < 0 or "ab12!ab true!".startswith(text[cut:]) or "abtrue!".startswith(text[cut:])


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="torch compiles nothing")
def test_masks_compile_nothing_after_warm_up(folder: Path) -> None:
    small = {"max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    llm = world.engine(folder, "jax", warmup="all", **small)
    before = llm.backend.num_compiles()
    run(llm, [formed(FORMS[0]), formed(FORMS[1], logprobs=2), formed(FORMS[2], repetition_penalty=1.1)])
    assert llm.backend.num_compiles() == before


def test_params_survive_a_dump_of_the_scheduler(any_llm: LLM) -> None:
    from octavo.engine.scheduler_state import dump_requests, load_requests

    members = any_llm._members("x", PROMPT, formed({"choice": ["b", "a"]}, seed=1))
    values = json.loads(json.dumps(dump_requests(members)))
    assert load_requests(values)[0].params == members[0].params
    assert members[0].params.structured_outputs == StructuredOutputsParams(choice=("b", "a"))


def test_a_step_log_replays_with_its_masks(folder: Path, tmp_path: Path) -> None:
    import dataclasses

    import tiny

    from octavo.engine.lab.replaying import replay

    log = tmp_path / "steps.jsonl"
    llm = world.engine(folder, BACKENDS[0], step_log=str(log))
    run(llm, [formed(FORMS[0]), SamplingParams(temperature=0, max_tokens=12), formed(FORMS[1]), formed({"regex": "["})])
    llm.step_log.close()
    config = dataclasses.replace(tiny.TINY, vocab_size=world.vocab_size(folder), max_model_len=512)
    found = replay(log, model=tiny.spec_of(config), weights=tiny.numpy_weights(config))
    assert found.difference is None and found.num_tokens > 20
    # without the masks it would not come out so
    lines = [line for line in log.read_text().splitlines(keepends=True) if not line.startswith('{"mask"')]
    log.write_text("".join(lines))
    assert replay(log, model=tiny.spec_of(config), weights=tiny.numpy_weights(config)).difference.what == "tokens"
