"""Batch files: every line its result, in order, whatever happens to the process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from backends import BACKENDS
from batches import CHAT, EMBEDDINGS, ENGINE, comparable, line, model_folder, requests
from typer.testing import CliRunner

from octavo.engine import LLM, SamplingParams
from octavo.engine.batch_file import FileResults, Line, read_lines
from octavo.engine.cli import app
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.engine.run_batch import Batch, Summary, _Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny-words")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    engine = LLM(str(folder), **ENGINE)
    yield engine
    assert not engine.has_unfinished_requests()


def serve(llm: LLM, source: Path, target: Path) -> Summary:
    with Batch(str(source), str(target), llm.config.model) as batch:
        return batch.run(llm)


def results_of(llm: LLM, tmp_path: Path, *lines: str) -> list[dict[str, Any]]:
    """The results of these lines."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    target.unlink(missing_ok=True)
    serve(llm, source, target)
    return [json.loads(text) for text in target.read_bytes().splitlines()]


def test_each_line_gets_what_generate_gives(llm: LLM, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w7 w8"}]
    found = results_of(
        llm,
        tmp_path,
        line("text", prompt="w4 w5", temperature=0, max_tokens=6),
        line("ids", model="tiny-words", prompt=[9, 8, 7], seed=3, max_tokens=6, stop_token_ids=[1, 2]),
        line(
            "chat",
            CHAT,
            messages=chat,
            seed=4,
            max_completion_tokens=5,
            max_tokens=2,
            chat_template_kwargs={"mood": "w9"},
        ),
        line("many", prompt=[[4], [5, 6]], n=2, seed=8, max_tokens=3, return_token_ids=True),
    )
    greedy = SamplingParams(temperature=0, max_tokens=6)
    (text,) = llm.generate("w4 w5", greedy, use_tqdm=False)
    (ids,) = llm.generate([9, 8, 7], SamplingParams(seed=3, max_tokens=6, stop_token_ids=[1, 2]), use_tqdm=False)
    (talk,) = llm.chat(chat, SamplingParams(seed=4, max_tokens=5), use_tqdm=False, mood="w9")
    many = llm.generate([[4], [5, 6]], SamplingParams(n=2, seed=8, max_tokens=3), use_tqdm=False)
    assert [r["custom_id"] for r in found] == ["text", "ids", "chat", "many"]
    assert all(r["error"] is None and r["response"]["status_code"] == 200 for r in found)
    bodies = [r["response"]["body"] for r in found]
    for body, output in ((bodies[0], text), (bodies[1], ids)):
        (choice,), sample = body["choices"], output.outputs[0]
        assert (choice["text"], choice["finish_reason"]) == (sample.text, sample.finish_reason)
        assert choice["stop_reason"] == sample.stop_reason
    message = bodies[2]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": talk.outputs[0].text, "refusal": None}
    assert bodies[2]["usage"]["completion_tokens"] == len(talk.outputs[0].token_ids) == 5
    samples = [sample for output in many for sample in output.outputs]
    assert [c["text"] for c in bodies[3]["choices"]] == [s.text for s in samples]
    assert [c["token_ids"] for c in bodies[3]["choices"]] == [list(s.token_ids) for s in samples]
    assert [c["index"] for c in bodies[3]["choices"]] == [0, 1, 2, 3]
    assert bodies[3]["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert [b["object"] for b in bodies] == ["text_completion"] * 2 + ["chat.completion", "text_completion"]
    assert [b["model"] for b in bodies] == [llm.config.model, "tiny-words", llm.config.model, llm.config.model]
    assert len({r["id"] for r in found} | {b["id"] for b in bodies}) == 8


def test_embeddings_are_served_together_and_beside_others(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, embed = [], llm.embed

    def count(prompts, *arguments, **names):
        calls.append(len(prompts))
        return embed(prompts, *arguments, **names)

    monkeypatch.setattr(llm, "embed", count)
    lines = [line("slow", prompt=[1], max_tokens=40, ignore_eos=True, temperature=0)]
    lines += [line(str(i), EMBEDDINGS, input=[[i + 1, 2], [3]], dimensions=4) for i in range(12)]
    found = results_of(llm, tmp_path, *lines, line("text", prompt=[1], max_tokens=2, temperature=0))
    assert all(r["error"] is None for r in found)
    assert [r["custom_id"] for r in found] == ["slow", *map(str, range(12)), "text"]
    wanted = embed([p for i in range(12) for p in ([i + 1, 2], [3])], dimensions=4, use_tqdm=False)
    got = [d["embedding"] for r in found[1:13] for d in r["response"]["body"]["data"]]
    assert got == [pytest.approx(o.outputs.embedding, abs=1e-5) for o in wanted]
    assert sum(calls) == 24 and len(calls) <= 6
    # one that cannot be served does not spoil the others
    bad = line("bad", EMBEDDINGS, input=[1] * 129)
    first, second, third = results_of(llm, tmp_path, lines[1], bad, lines[2])
    assert first["error"] is None is third["error"]
    assert "prompt of 129 tokens" in second["error"]["message"]


GOOD = {"prompt": [1, 2], "max_tokens": 2}
WRONG = {
    "not JSON": ('{"custom_id": ', None, "no JSON"),
    "not an object": ("[1]", None, "no JSON object"),
    "nested too deeply": ("[" * 100_000, None, "no JSON"),
    "not UTF-8": ("\udcff", None, "no JSON"),
    "a number of 5000 digits": ('{"custom_id": ' + "9" * 5000 + "}", None, "no JSON"),
    "no custom_id": ('{"method": "POST", "url": "/v1/completions", "body": {}}', 400, "custom_id"),
    "a custom_id that is no text": (line(5, **GOOD), 400, "custom_id 5"),  # pyright: ignore
    "no method": ('{"custom_id": "a", "url": "/v1/completions", "body": {}}', 400, "method None"),
    "GET": (line("a", **GOOD).replace("POST", "GET"), 400, "'GET'"),
    "an unknown field of the line": (line("a", **GOOD).replace('"url"', '"uri": 1, "url"'), 400, "'uri'"),
    "an unknown url": (line("a", "/v1/images", **GOOD), 404, "/v1/images"),
    "no body": ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', 400, "body is missing"),
    "another model": (line("a", model="gpt-4", **GOOD), 404, "'gpt-4' does not exist: this is"),
    "an unknown field": (line("a", temprature=0, **GOOD), 400, "'temprature': did you mean temperature"),
    "a chat's field in a completion": (line("a", top_logprobs=0, **GOOD), 400, "'top_logprobs'"),
    "a bad temperature": (line("a", temperature=-1, **GOOD), 400, "temperature -1"),
    "a temperature beyond a float": (line("a", temperature=10**400, **GOOD), 400, "too large"),
    "tools": (line("a", CHAT, messages=[{"role": "user", "content": "w1"}], tools=[{}]), 400, "tools: calling"),
    "stream": (line("a", stream=True, **GOOD), 400, "stream"),
    "no prompt": (line("a"), 400, "prompt is missing"),
    "an empty prompt": (line("a", prompt=[]), 400, "prompt is a list"),
    "an empty text": (line("a", prompt=""), 400, "prompt is empty"),
    "ids outside the vocabulary": (line("a", prompt=[1, 1000]), 400, "token id 1000"),
    "a prompt that is too long": (line("a", prompt=[1] * 128), 400, "prompt of 128 tokens"),
    "the second of two prompts": (line("a", prompt=[[1, 2], [1] * 128]), 400, "prompt of 128 tokens"),
    "half a surrogate pair": (line("a", prompt="\ud800"), 400, "lone surrogate"),
    "greedy and n": (line("a", temperature=0, n=2, **GOOD), 400, "n 2 at temperature 0"),
    "a priority without its policy": (line("a", priority=1, **GOOD), 400, "priority 1"),
    "messages of a wrong kind": (line("a", CHAT, messages="w1"), 400, "messages is a string"),
    "an image": (
        line("a", CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages[0].content[0] is 'image_url'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_line_is_an_error_on_that_line_alone(llm: LLM, tmp_path: Path, case: str) -> None:
    text, status, message = WRONG[case]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [line("before", temperature=0, **GOOD), line("after", temperature=0, **GOOD)]
    source.write_bytes("\n".join([good[0], text, good[1]]).encode(errors="surrogateescape"))
    summary = serve(llm, source, target)
    before, bad, after = (json.loads(raw) for raw in target.read_bytes().splitlines())
    assert before["response"]["body"]["choices"] == after["response"]["body"]["choices"]
    assert before["error"] is None is after["error"]
    assert message in bad["error"]["message"]
    assert (bad["response"] and bad["response"]["status_code"]) == status
    if status:
        assert bad["response"]["body"] == {"error": bad["error"]}
    assert (summary.num_lines, summary.num_failed) == (3, 1)


def test_forms_are_kept_and_bad_ones_are_errors(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "w96"}))
    llm = LLM(str(model), **ENGINE)
    chat = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 5}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    found = results_of(
        llm,
        tmp_path,
        line("choice", prompt="w1", structured_outputs={"choice": [" w3", " w4"]}, max_tokens=5, seed=1),
        line("bad schema", CHAT, response_format=schema, **chat),
        line("bad regex", prompt="w1", structured_outputs={"regex": "("}, max_tokens=5),
        line("free", prompt="w1", max_tokens=5, seed=1),
    )
    kept, schema_error, regex_error, free = found
    assert kept["response"]["body"]["choices"][0]["text"].strip() in ("w3", "w4")
    assert "nonsense" in schema_error["error"]["message"] and schema_error["response"]["status_code"] == 400
    assert "structured_outputs" in regex_error["error"]["message"]
    assert free["error"] is None


def test_a_bounded_queue_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", **GOOD))
    bounded = LLM(str(folder), max_num_queued_reqs=1, **ENGINE)
    with pytest.raises(ValueError, match="max_num_queued_reqs 1: a batch fills the queue itself"):
        serve(bounded, tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_a_custom_id_that_occurs_twice_is_an_error_the_second_time(llm: LLM, tmp_path: Path) -> None:
    first, second, third = results_of(llm, tmp_path, line("a", **GOOD), line("a", **GOOD), line("b", **GOOD))
    assert first["error"] is None is third["error"]
    assert "'a' is that of line 1 too" in second["error"]["message"]


def test_order_is_kept_and_the_window_is_bounded(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow line in front: others are served meanwhile, but no more than the window holds."""
    monkeypatch.setattr("octavo.engine.run_batch.UNWRITTEN", 4)
    monkeypatch.setattr("octavo.engine.run_batch.LEAST_UNWRITTEN", 1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line("slow", prompt=[1], max_tokens=100, ignore_eos=True)]
    lines += [line(str(i), prompt=[2, i], max_tokens=1) for i in range(90)]
    source.write_text("\n".join(lines))
    most_alive, written = 0, []
    with Batch(str(source), str(target), llm.config.model) as batch:
        num_read = 0

        def count(read: Iterator[Line]) -> Iterator[Line]:
            nonlocal num_read
            for one in read:
                num_read += 1
                yield one

        batch.lines = count(batch.lines)
        append = batch.results.append

        def watched(results: list[bytes]) -> None:
            append(results)
            written.extend(results)

        batch.results.append = watched
        step = llm.step

        def watch():
            nonlocal most_alive
            most_alive = max(most_alive, len(llm.scheduler.alive))
            assert num_read - len(written) <= 16
            return step()

        monkeypatch.setattr(llm, "step", watch)
        batch.run(llm)
    assert [json.loads(r)["custom_id"] for r in written] == ["slow", *map(str, range(90))]
    assert 4 < most_alive <= 8


def test_seats_never_stand_empty(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests of 10 tokens on 4 seats take little more than 160 steps."""
    source, steps, step = tmp_path / "in.jsonl", 0, llm.step

    def count():
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(llm, "step", count)
    source.write_text("\n".join(line(str(i), prompt=[i], max_tokens=10, ignore_eos=True) for i in range(64)))
    serve(llm, source, tmp_path / "out.jsonl")
    assert 160 <= steps <= 160 * 1.15


def test_a_file_cut_anywhere_is_completed(llm: LLM, tmp_path: Path) -> None:
    """As a kill may leave it: no line is lost or repeated, and the results are those of an uninterrupted run."""
    source, whole, target = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(requests(9, 3)))
    serve(llm, source, whole)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    assert len(ends) == 9
    cuts = {0, 1, *range(7, len(data), 173), *(end + d for end in ends for d in (-1, 0, 1, 40) if end + d <= len(data))}
    for cut in sorted(cuts):
        target.write_bytes(data[:cut])
        summary = serve(llm, source, target)
        assert summary.num_resumed == sum(end <= cut for end in ends)
        assert summary.num_resumed + summary.num_lines == 9
        assert target.read_bytes()[: ([0, *ends])[summary.num_resumed]] == data[: ([0, *ends])[summary.num_resumed]]
        assert comparable(target.read_bytes()) == comparable(data), cut


def test_duplicates_are_known_after_a_resumption(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("a", **GOOD), line("b", **GOOD), line("a", **GOOD)]))
    serve(llm, source, target)
    data = target.read_bytes()
    target.write_bytes(data[: data.index(b"\n") + 1])
    serve(llm, source, target)
    assert comparable(target.read_bytes()) == comparable(data)


CHANGES = {
    "another line": lambda lines: [lines[0].replace("[1, 2]", "[1, 3]"), *lines[1:]],
    "another custom_id": lambda lines: [lines[0].replace('"a"', '"c"'), *lines[1:]],
    "another order": lambda lines: lines[::-1],
    "a line less": lambda lines: lines[1:],
    "no lines": lambda lines: [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_refused(llm: LLM, tmp_path: Path, change: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line("a", **GOOD), line("b", **GOOD)]
    source.write_text("\n".join(lines))
    serve(llm, source, target)
    data = target.read_bytes()
    source.write_text("\n".join(CHANGES[change](lines)))
    with pytest.raises(ValueError, match="give another output file"):
        serve(llm, source, target)
    assert target.read_bytes() == data


def test_lines_may_be_added_to_the_input(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", **GOOD) + "\n")
    serve(llm, source, target)
    source.write_text(line("a", **GOOD) + "\n\n" + line("b", **GOOD))
    assert serve(llm, source, target).num_resumed == 1
    assert [r["custom_id"] for r in comparable(target.read_bytes())] == ["a", "b"]


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b'{"id": "batch_req_0"}\n', b"\0\0\0"])
def test_a_file_that_is_no_result_is_left_alone(llm: LLM, tmp_path: Path, content: bytes) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", **GOOD))
    target.write_bytes(content)
    with pytest.raises(ValueError, match="is not the result of line 1"):
        serve(llm, source, target)
    assert target.read_bytes() == content


def test_a_broken_line_in_the_middle_is_refused(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("a", **GOOD), line("b", **GOOD)]))
    serve(llm, source, target)
    broken = target.read_bytes().replace(b'"choices"', b'"choices', 1)
    target.write_bytes(broken)
    with pytest.raises(ValueError, match="line 1 is broken, and more follows"):
        serve(llm, source, target)
    assert target.read_bytes() == broken


def test_another_model_does_not_go_on(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", **GOOD))
    serve(llm, source, target)
    with pytest.raises(ValueError, match="by this model"):
        Batch(str(source), str(target), "another-model")


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    first = FileResults(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="another process"):
        FileResults(tmp_path / "out.jsonl")
    first.close()
    FileResults(tmp_path / "out.jsonl").close()


def test_input_and_output_are_not_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(line("a", **GOOD))
    with pytest.raises(ValueError, match="both input and output"):
        Batch(str(tmp_path / "a"), str(tmp_path / "." / "a"), "m")


def test_a_failing_engine_writes_nothing_and_can_be_gone_on_with(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, calls = tmp_path / "in.jsonl", tmp_path / "out.jsonl", 0
    source.write_text("\n".join(line(str(i), prompt=[i], max_tokens=3, temperature=0) for i in range(12)))
    launch = llm.runner.launch

    def fail(*arguments):
        nonlocal calls
        calls += 1
        if calls > 7:
            raise OSError("planted")
        return launch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch", fail)
        with pytest.raises(OSError, match="planted"):
            serve(llm, source, target)
    done = target.read_bytes().count(b"\n")
    assert 0 < done < 12
    assert serve(llm, source, target).num_resumed == done
    assert [r["error"] for r in comparable(target.read_bytes())] == [None] * 12


def test_a_number_that_is_none_is_an_error_of_its_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose float16 overflows gives logprobs that JSON cannot hold; a batch must not stop there for ever."""
    nan = RequestOutput(
        "x", None, [1], [CompletionOutput(0, "", [5], 0.0, [{5: Logprob(float("nan"), 1)}], "length")], True
    )

    def take(run: Any, output: RequestOutput, take: Any = _Run._take) -> None:
        take(
            run,
            replace(nan, request_id=output.request_id) if run.home[output.request_id][0].line.number == 2 else output,
        )

    monkeypatch.setattr(_Run, "_take", take)
    lines = [line(str(i), prompt=[i], max_tokens=1, temperature=0, logprobs=0) for i in range(1, 4)]
    found = results_of(llm, tmp_path, *lines)
    assert [r["response"]["status_code"] for r in found] == [200, 500, 200]
    assert "JSON" in found[1]["error"]["message"]


def test_reading_depends_on_place_content_and_context() -> None:
    data = [b"a\n", b"\n", b"a \n", b"b"]
    lines = list(read_lines(data, "m"))
    assert [(x.number, x.data) for x in lines] == [(1, b"a"), (3, b"a"), (4, b"b")]
    assert len({x.id for x in [*lines, *read_lines(data, "other")]}) == 6
    assert [x.id for x in read_lines(data, "m")] == [x.id for x in lines]


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    given, wanted = re.findall(r"```jsonl\n(.*?)```", text, re.DOTALL)
    (tmp_path / "requests.jsonl").write_text(given)
    serve(LLM("smollm2", max_model_len=128), tmp_path / "requests.jsonl", tmp_path / "results.jsonl")
    assert comparable((tmp_path / "results.jsonl").read_bytes()) == comparable(wanted.encode())


def _command(folder: Path, *words: str) -> list[str]:
    engine = [text for name, value in ENGINE.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["run-batch", "--model", str(folder), *words, *engine]


def test_the_command_reads_and_writes_pipes(llm: LLM, folder: Path, tmp_path: Path) -> None:
    lines = requests(7)
    wanted = results_of(llm, tmp_path, *lines)
    result = CliRunner().invoke(app, _command(folder, "-i", "-", "-o", "-"), input="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert comparable(result.stdout_bytes) == comparable("\n".join(map(json.dumps, wanted)).encode())
    assert "7 lines in" in result.stderr and "2 of them with an error" in result.stderr


def test_the_command_refuses_in_a_line(folder: Path, tmp_path: Path) -> None:
    for words in (["-i", str(tmp_path / "none"), "-o", "-"], ["-i", "-", "-o", str(tmp_path / "no" / "folder")]):
        result = CliRunner().invoke(app, _command(folder, *words), input="")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def _kill(command: list[str], target: Path, count: int) -> int:
    """Starts the command, kills it when it has written so many results. Returns how many there are then."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 200
        while not target.exists() or target.read_bytes().count(b"\n") < count:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    return target.read_bytes().count(b"\n")


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_and_repeats_nothing(llm: LLM, folder: Path, tmp_path: Path) -> None:
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join(requests(500, 20)))
    serve(llm, source, whole)
    command = [sys.executable, "-m", "octavo.engine.cli", *_command(folder, "-i", str(source), "-o", str(target))]
    first = _kill(command, target, 40)
    second = _kill(command, target, first + 100)
    assert second < 500, "it was killed after it was done"
    done = subprocess.run(command, capture_output=True, check=True)
    assert f"{second} lines had been done before" in done.stderr.decode()
    assert comparable(target.read_bytes()) == comparable(whole.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_9_with_a_real_model(tmp_path: Path, backend: str) -> None:
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    words = ("France", "Italy", "a verb", "gravity", "seven", "Berlin", "a poem", "rain")
    lines = []
    for i, word in enumerate(words):
        chat = [{"role": "user", "content": f"What is {word}? ({i})"}]
        lines.append(line(f"chat {i}", CHAT, messages=chat, temperature=0, max_tokens=8))
        lines.append(line(f"text {i}", prompt=f"{i}. {word} is", seed=i, max_tokens=8))
    source.write_text("\n".join(lines))
    options = ["--threads", "1"] if backend == "torch" else []
    options += ["--backend", backend, "--max-num-seqs", "4", "--max-model-len", "128"]
    command = [
        sys.executable,
        "-m",
        "octavo.engine.cli",
        "run-batch",
        "-m",
        "smollm2",
        *options,
        "-i",
        str(source),
        "-o",
    ]
    assert _kill([*command, str(target)], target, 4) < len(lines)
    subprocess.run([*command, str(target)], capture_output=True, check=True)
    subprocess.run([*command, str(whole)], capture_output=True, check=True)
    assert comparable(target.read_bytes()) == comparable(whole.read_bytes())
    assert all(r["error"] is None for r in comparable(whole.read_bytes()))


@pytest.mark.slow
def test_memory_stays_bounded_over_100_000_lines(llm: LLM, tmp_path: Path) -> None:
    """Most are wrong, and each is a kilobyte: what is kept of them all is a small part of the file."""
    source, count = tmp_path / "in.jsonl", 100_000
    padding = "x" * 1000
    with open(source, "w") as file:
        for i in range(count):
            body = {"max_tokens": 1} if i % 100 == 0 else {"temperature": -1}
            file.write(line(str(i), prompt=[i % 90], user=padding, **body) + "\n")
    process, most = psutil.Process(), 0
    start = process.memory_info().rss
    with Batch(str(source), str(tmp_path / "out.jsonl"), llm.config.model) as batch:
        append = batch.results.append

        def watched(results: list[bytes]) -> None:
            nonlocal most
            append(results)
            most = max(most, process.memory_info().rss)

        batch.results.append = watched
        summary = batch.run(llm)
    assert (summary.num_lines, summary.num_failed) == (count, count - count // 100)
    assert source.stat().st_size > 100e6 and most - start < 50e6
    with open(tmp_path / "out.jsonl") as file:
        assert [json.loads(text)["custom_id"] for text in file] == list(map(str, range(count)))
