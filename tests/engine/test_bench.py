"""`octavo bench`: what is asked, what is counted and timed, and that parts are not run twice."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from backends import BACKENDS, QUIET
from bench_shape import CONFIG, on_torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.engine import LLM
from octavo.engine.bench import measuring, profiling
from octavo.engine.bench.measuring import latency, percentile, throughput
from octavo.engine.bench.requests import dataset_requests, random_requests
from octavo.engine.bench.workloads import NAMES, workload
from octavo.engine.cli import app
from octavo.engine.collector import Seldom

SMALL = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "64", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("shape")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def _bench(*words: str):
    return CliRunner().invoke(app, ["bench", *words], prog_name="octavo")


# what peers were given: sha256 of the workloads as JSON, for a vocabulary of 1000
WORKLOADS = {
    "decode-1": "0d52d2d776588a8e",
    "decode-64": "f872c8dd2490b55c",
    "prefill": "aef21e48ead2210f",
    "offline": "4a7a54746ecd1251",
    "prefix": "47165e8c22a8a6f0",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_fixed_workloads_are_what_peers_were_given(name):
    found = json.dumps([[ids, count] for ids, count in workload(name, 1000)])
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == WORKLOADS[name]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12, abs=1e-12)


def test_random_prompts_keep_to_lengths_prefix_and_seed():
    asked = {"input_len": 10, "output_len": 3, "range_ratio": 0.25, "prefix_len": 4}
    found = random_requests(400, 50, **asked, seed=1)
    assert len(found) == 400
    # floor(10 * 0.75) to ceil(10 * 1.25) behind the prefix; floor(2.25) to ceil(3.75): each of them occurs
    assert set(Counter(len(ids) - 4 for ids, _ in found)) == set(range(7, 14))
    assert {count for _, count in found} == {2, 3, 4}
    assert len({tuple(ids[:4]) for ids, _ in found}) == 1
    assert len({tuple(ids[4:8]) for ids, _ in found}) > 300
    assert {i for ids, _ in found for i in ids} == set(range(50))
    assert found == random_requests(400, 50, **asked, seed=1) != random_requests(400, 50, **asked, seed=2)
    same = random_requests(5, 50, input_len=10, output_len=3)
    assert [(len(ids), count) for ids, count in same] == [(10, 3)] * 5


class Letters:
    """A tokenizer with an id a letter, after one that begins."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(c) for c in text]


def _dataset(path: Path, **more) -> list:
    return dataset_requests(path, Letters(), **({"count": None, "output_len": None, "longest": 30} | more))


def test_sharegpt_prompts_are_first_turns_and_the_answers_say_how_long(tmp_path):
    def said(*turns: str) -> dict:
        return {"id": "x", "conversations": [{"from": "human", "value": t} for t in turns]}

    items = [
        said("three", "four4", "more"),
        said("alone"),
        said("abcdef", "gh"),
        said("ab", "short"),
        said("x" * 28, "ab"),
        said("nothing", ""),
        said(),
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(items))
    # without an answer, or with an empty one, under 4 tokens, and over 30 together: left out
    found = _dataset(path)
    assert sorted((len(ids), count) for ids, count in found) == [(6, 5), (7, 2)]
    asked = {"".join(map(chr, ids[1:])) for ids, count in _dataset(path, output_len=9) if count == 9}
    assert asked == {"three", "abcdef", "nothing"}
    assert len(_dataset(path, count=1)) == 1
    with pytest.raises(ValueError, match=r"has 2 prompts .* expected 3"):
        _dataset(path, count=3)


def test_prompts_of_jsonl_may_say_how_long(tmp_path):
    path = tmp_path / "prompts.jsonl"
    # a separator of lines that JSON lets stand in strings, and a line of Windows
    path.write_text(
        '"alpha"\n\n{"prompt": "beta", "output_tokens": 7}\r\n{"prompt": "gam\u2028ma"}\n', encoding="utf-8"
    )
    found = _dataset(path, longest=200)
    told = [("alpha", 128), ("beta", 7), ("gam\u2028ma", 128)]
    assert sorted(("".join(map(chr, ids[1:])), n) for ids, n in found) == told
    assert {tuple(map(tuple, [i for i, _ in _dataset(path, longest=200, seed=s)])) for s in range(20)} != {
        tuple(tuple(ids) for ids, _ in found)
    }


@pytest.mark.parametrize(
    "text, says",
    [
        ("[1]", "item 1 has no prompt"),
        ("{", "no valid JSON"),
        ('{"prompt": "x"}', "no list of prompts"),
        ('[{"prompt": "long enough", "output_tokens": 0}]', "output_tokens"),
        ('[{"conversations": [{"value": 1}, {"value": "x"}]}]', "item 1 has no prompt"),
        ('[{"conversations": 5}]', "item 1 has no prompt"),
    ],
)
def test_wrong_datasets_are_named(tmp_path, text, says):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        _dataset(path)


class Clockwork:
    """A step takes a second, but the fourth takes two; request i gets its first token after 1 + i steps."""

    def __init__(self, burst: int = 1):
        self.burst = burst  # tokens of an output
        self.now, self.steps, self.left, self.waits = 0.0, 0, {}, {}
        self.backend = SimpleNamespace(num_compiles=lambda: self.steps)

    def add_request(self, name, prompt, params):
        assert params.ignore_eos and params.temperature == 0
        self.left[name], self.waits[name] = params.max_tokens, len(self.waits)

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        self.steps += 1
        self.now += 2.0 if self.steps == 4 else 1.0
        outputs = []
        for name in list(self.left):
            if self.waits[name]:
                self.waits[name] -= 1
                continue
            self.left[name] -= self.burst
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[5] * self.burst)],
                                           finished=self.left[name] <= 0))  # fmt: skip
            if self.left[name] <= 0:
                del self.left[name]
        return outputs

    def abort(self, names):
        assert not self.left
        self.waits.clear()

    def get_stats(self):
        return SimpleNamespace(num_preemptions=self.steps)


def test_times_are_those_of_the_clock(monkeypatch):
    engine = Clockwork()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: engine.now)
    # tokens at 1, 2, 3 and at 2, 3, 5
    found = throughput(engine, [([1, 2], 3), ([3], 3)])
    assert found["elapsed_time"] == 5.0
    assert (found["num_prompt_tokens"], found["num_output_tokens"], found["total_num_tokens"]) == (3, 6, 9)
    rates = found["requests_per_second"], found["tokens_per_second"], found["output_tokens_per_second"]
    assert rates == (2 / 5, 9 / 5, 6 / 5)
    for name, values in (("latency_ms", [3, 5]), ("ttft_ms", [1, 2]), ("itl_ms", [1, 1, 1, 2])):
        wanted = {f"p{p}": np.percentile(values, p) * 1e3 for p in (50, 90, 99)} | {"mean": np.mean(values) * 1e3}
        assert found[name] == pytest.approx(wanted), name
    assert (found["num_compiles"], found["num_preemptions"]) == (4, 4)


def test_tokens_that_come_together_are_counted_each():
    assert throughput(Clockwork(burst=2), [([1], 4)])["num_output_tokens"] == 4
    with pytest.raises(RuntimeError, match="got 4 tokens, expected 3"):
        throughput(Clockwork(burst=2), [([1], 3)])


def test_latency_leaves_its_warm_up_out(monkeypatch):
    engine = Clockwork()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: engine.now)
    # two steps each; the fourth step of all, in the second batch, is the slow one
    found = latency(engine, [([1], 2)], warmup=1, iterations=3)
    assert found["latencies"] == [3.0, 2.0, 2.0]
    assert found["avg_latency"] == pytest.approx(7 / 3)
    assert found["percentiles"] == {
        str(p): pytest.approx(np.percentile([3, 2, 2], p)) for p in (10, 25, 50, 75, 90, 99)
    }
    assert found["output_tokens_per_second"] == pytest.approx(6 / 7)
    assert found["ttft_ms"]["mean"] == pytest.approx(1000.0)
    assert found["itl_ms"]["mean"] == pytest.approx(4000 / 3)
    assert found["num_compiles"] == 6


def test_an_engine_makes_exactly_what_is_asked():
    llm = tiny.engine(**QUIET, max_num_seqs=2)
    asked = random_requests(5, tiny.VOCAB, input_len=9, output_len=4, range_ratio=0.5, seed=3)
    run = measuring.run(llm, asked, detokenize=False)
    assert [len(r.times) for r in run.requests] == [count for _, count in asked]
    assert run.num_prompt_tokens == sum(len(ids) for ids, _ in asked)
    assert all(r.times == sorted(r.times) and r.first > 0 and r.times[-1] <= run.seconds for r in run.requests)
    # two run at a time, so the others begin when one has ended
    assert sorted(r.first for r in run.requests)[2] >= min(r.times[-1] for r in run.requests)
    assert not llm.has_unfinished_requests()


def test_an_engine_that_cannot_take_all_is_left_as_it_was() -> None:
    llm = tiny.engine(backend=BACKENDS[0])
    with pytest.raises(ValueError, match="max_model_len 128"):
        measuring.run(llm, [([3, 4], 5), ([3] * 200, 5)])
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_what_would_end_by_the_models_length_is_refused_before_it_runs(command, folder, monkeypatch):
    monkeypatch.setattr(measuring, "run", None)
    result = _bench(command, "-m", str(folder), "--input-len", "60", "--output-len", "10", *SMALL)
    assert result.exit_code == 1, result.output
    assert "60 tokens and 10 to make are longer than max_model_len 64" in result.stderr


def test_the_collector_looks_at_everything_as_seldom_as_in_a_generate(monkeypatch):
    llm, seen = tiny.engine(**QUIET), []
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: seen.append(Seldom.depth) or step())
    measuring.run(llm, [([3, 4], 2)], detokenize=False)
    assert min(seen) == 1 and Seldom.depth == 0


def test_latency_prints_what_it_writes(folder, tmp_path):
    path = tmp_path / "found.json"
    words = [
        "--input-len",
        "5",
        "--output-len",
        "6",
        "--batch-size",
        "3",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    ]
    result = _bench("latency", "-m", str(folder), *words, *SMALL, "--output-json", str(path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(path.read_text())
    assert len(found["latencies"]) == found["num_iters"] == 3
    assert found["avg_latency"] == pytest.approx(np.mean(found["latencies"]))
    assert found["output_tokens_per_second"] == pytest.approx(3 * 18 / sum(found["latencies"]))
    assert found["percentiles"]["90"] == pytest.approx(np.percentile(found["latencies"], 90))
    assert found["machine"]["versions"]["octavo"]


def test_throughput_counts_tokens_and_prints_a_table(folder):
    words = [
        "--num-prompts",
        "7",
        "--input-len",
        "6",
        "--output-len",
        "4",
        "--random-range-ratio",
        "0.5",
        "--seed",
        "5",
    ]
    result = _bench("throughput", "-m", str(folder), *words, *SMALL, "--prefix-len", "3", "--json")
    assert result.exit_code == 0, result.output
    found, asked = json.loads(result.stdout), random_requests(
        7, 300, input_len=6, output_len=4, range_ratio=0.5, prefix_len=3, seed=5
    )  # fmt: skip
    assert found["num_prompt_tokens"] == sum(len(ids) for ids, _ in asked)
    assert found["num_output_tokens"] == sum(count for _, count in asked)
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    table = _bench("throughput", "-m", str(folder), *words, *SMALL)
    assert table.exit_code == 0, table.output
    assert "to the first token" in table.stdout and "requests per second" in table.stdout


@on_torch
def test_throughput_takes_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "The capital of France is", "output_tokens": 3},
        {"prompt": "Once upon a time there was", "output_tokens": 2},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = _bench("throughput", "--dataset-path", str(path), "--max-model-len", "256", "--json", "--threads", "1",
                    "--backend", "torch")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["num_requests"], found["num_prompt_tokens"], found["num_output_tokens"]) == (2, 5 + 6, 3 + 2)


@pytest.mark.parametrize(
    "words, says",
    [
        (["latency", "--num-iters", "0"], "num_iters"),
        (["latency", "--batch-size", "0"], "batch_size 0"),
        (["throughput", "--random-range-ratio", "1"], "random_range_ratio"),
        (["throughput", "--dataset-path", __file__, "--input-len", "3"], "--input-len"),
        (["throughput", "--dataset-path", "no-such-file"], "no-such-file"),
        (["throughput", "--output-json", "no-such-folder/x.json"], "no-such-folder"),
        (["throughput", "--output-len", "0"], "output_len"),
        (["throughput", "--max-num-queued-reqs", "5"], "max_num_queued_reqs 5"),
        (["marks", "--models", "no-such-model", "--device", "cpu"], "no-such-model"),
        (["marks", "--parts", "decode-2", "--device", "cpu"], "decode-2"),
        (["marks", "--parts", "", "--device", "cpu"], "unknown part ''"),
        (["marks", "--parts", "attention", "--device", "cpu"], "needs a GPU"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(words, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octavo.engine.llm.LLM", None)
    result = _bench(*words)
    assert result.exit_code == 1, result.output
    assert says in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@on_torch
def test_a_profile_says_what_a_step_takes(monkeypatch, folder):
    small = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64, "threads": 1}
    llm, runs = LLM(str(folder), backend="torch", **small), []

    def events(run):
        steps = llm.get_stats().num_steps
        run()
        runs.append(llm.get_stats().num_steps - steps)
        return [("small", 2.0)] * 16 + [("large", 40.0)] * 8

    monkeypatch.setattr(profiling, "profiler", lambda backend: SimpleNamespace(events=events))
    found = profiling.profile_case(llm, 300, 2, 6, 4)
    assert runs == [profiling.STEPS] == [8]
    assert found["kernels"] == [(40.0, 1.0, "large"), (4.0, 2.0, "small")]
    assert (found["device_us"], found["launches"]) == (44.0, 3)
    assert found["wall_us"] >= found["waited_us"] > 0
    assert not llm.has_unfinished_requests()
