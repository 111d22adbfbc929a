"""`octavo bench marks`: parts are kept whatever stops it, nothing is timed behind a failing check; its tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from bench_shape import CONFIG, on_torch
from tiny import VOCAB, engine
from typer.testing import CliRunner

from octavo.engine.backend import get_backend
from octavo.engine.bench import machine, marks, marks_attention, marks_kernels, marks_table, marks_worker
from octavo.engine.bench.marks import Results
from octavo.engine.bench.marks_attention import Size
from octavo.engine.bench.workloads import NAMES, write_config
from octavo.engine.cli import app

SMALL = {"device": "cpu", "kv_cache_memory_bytes": 2**26, "threads": 1, "warmup": "lazy"}
H200 = {"gpu": "NVIDIA H200, 580", "date": "2026-11-30", "python": "3.12.3", "versions": {"octavo": "0.1"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model, and a cache folder in which nothing has been started."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "shape")


def _marks(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "marks", *words], prog_name="octavo")


@on_torch
def test_a_killed_run_goes_on_with_the_same_call(folder, tmp_path):
    out, parts = tmp_path / "marks.json", ["decode-1", "decode-64"]
    words = [sys.executable, "-m", "octavo.engine.cli", "bench", "marks", "--backend", "torch", "--models", folder,
             "--parts", ",".join(parts), "--out", str(out), "--device", "cpu", "--kv-cache-memory-bytes", str(2**26),
             "--threads", "1", "--warmup", "lazy"]  # fmt: skip
    began = subprocess.Popen(words, start_new_session=True)
    named, waited = f"torch/{folder}/", time.monotonic()
    while not out.exists() or f"{named}decode-1" not in json.loads(out.read_text()):
        assert began.poll() is None and time.monotonic() - waited < 120
        time.sleep(0.02)
    os.killpg(began.pid, signal.SIGKILL)
    began.wait()
    left = json.loads(out.read_text())
    if f"{named}decode-64" in left:
        out.write_text(json.dumps({key: value for key, value in left.items() if key != f"{named}decode-64"}))
    found = marks.run(["torch"], [folder], parts, out=out, **SMALL)
    assert found == json.loads(out.read_text())
    assert [found[key] for key in left if "64" not in key] == [value for key, value in left.items() if "64" not in key]
    part = found[f"{named}decode-64"]
    assert part["tok_s"] == pytest.approx(64 * 256 / part["seconds"], rel=0.01) and part["compiles"] == 0
    # the first start was a cold one, and only that
    assert found[f"{named}startup"]["seconds"] > 0.5 and found[f"{named}startup-warm"]["seconds"] > 0.5
    with pytest.raises(ValueError, match="threads"):
        marks.run(["torch"], [folder], parts, out=out, **SMALL | {"threads": 2})


@dataclass
class Workers:
    """In place of processes: each keeps a number for each part, until one that is broken."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    broken: set[tuple[str, str]] = field(default_factory=set)
    status: int = 0

    def run(self, command: list[str], **_: Any) -> Any:
        job = json.loads(command[-1])
        self.jobs.append(job)
        for part in job["parts"]:
            if (job["backend"], part) in self.broken:
                return SimpleNamespace(returncode=1)
            Results(Path(job["out"])).put(f"{job['backend']}/{job['model']}/{part}", {"tok_s": 1.0})
        return SimpleNamespace(returncode=self.status)

    def asked(self) -> list[tuple[str, str, list[str]]]:
        found = [(job["backend"], job["model"], job["parts"]) for job in self.jobs]
        self.jobs.clear()
        return found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers()
    monkeypatch.setattr(subprocess, "run", made.run)
    monkeypatch.setattr(marks, "machine", lambda backend, device: H200)
    monkeypatch.setattr(marks, "kernels", lambda beside: {"passed": 3, "skipped": 0, "seconds": 1.0})
    return made


BOTH = ["torch", "jax"]


def test_checks_come_first_and_what_is_there_is_not_run_again(workers, tmp_path):
    out, models = tmp_path / "marks.json", ["llama-8b", "qwen3-0.6b"]
    found = marks.run(BOTH, models, out=out, device="cuda")
    asked = workers.asked()
    assert sorted(asked[:2]) == [("jax", "", ["check"]), ("torch", "", ["check"])]
    after = ["identical", "profile"]
    assert asked[2:] == [
        job
        for b in BOTH
        for job in [(b, "", ["attention"]), *((b, m, part) for m in models for part in ([*NAMES], after))]
    ]
    assert found == json.loads(out.read_text()) and found["//kernels"]["passed"] == 3
    marks.run(BOTH, models, out=out, device="cuda")
    assert workers.asked() == []
    marks.run(["jax"], models[:1], ["prefill", "profile"], out=out, again=True, device="cuda")
    assert workers.asked() == [("jax", "llama-8b", ["prefill"]), ("jax", "llama-8b", ["profile"])]
    out.write_text(json.dumps({k: v for k, v in found.items() if k not in ("jax//check", "torch/llama-8b/prefix")}))
    marks.run(BOTH, models, out=out, device="cuda")
    assert workers.asked() == [("jax", "", ["check"]), ("torch", "llama-8b", ["prefix"])]


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the command names two backends")
@pytest.mark.parametrize("where", ["a process", "the tests"])
def test_nothing_is_timed_behind_a_failing_check(where, workers, tmp_path, monkeypatch):
    out = tmp_path / "marks.json"
    if where == "a process":
        workers.broken.add(("jax", "check"))
    else:
        monkeypatch.setattr(marks, "kernels", _raises("kernels failed: 1 failed, 2 passed"))
    result = _marks("--backend", "torch,jax", "--device", "cuda", "--out", str(out))
    says = {"a process": "check on jax failed: see above", "the tests": "kernels failed: 1 failed, 2 passed"}[where]
    assert result.exit_code == 1 and result.stderr.splitlines()[-1] == f"error: {says}. Nothing was timed"
    assert not result.stdout
    # the others have been to their ends, and are kept
    assert {part for _, _, parts in workers.asked() for part in parts} == {"check"}
    there = {"torch//check", "jax//check", "//kernels"} & json.loads(out.read_text()).keys()
    assert there == {"torch//check", "//kernels" if where == "a process" else "jax//check"}
    # mended, the same call goes on behind them
    workers.broken.clear()
    monkeypatch.setattr(marks, "kernels", lambda beside: {"passed": 3, "skipped": 0, "seconds": 1.0})
    marks.run(BOTH, [], out=out, device="cuda")
    assert workers.asked()[0] == (("jax", "", ["check"]) if where == "a process" else ("torch", "", ["attention"]))


def _raises(text: str) -> Any:
    def kernels(beside: int) -> dict[str, Any]:
        raise ChildProcessError(text)

    return kernels


def test_a_part_that_fails_is_named_and_a_process_that_fails_behind_its_parts_is_told_of(workers, tmp_path, capsys):
    out = tmp_path / "marks.json"
    workers.broken.add(("torch", "prefill"))
    with pytest.raises(ChildProcessError, match=r"^prefill, offline, prefix of llama-8b on torch failed: see above$"):
        marks.run(["torch"], ["llama-8b"], NAMES, out=out, device="cuda")
    workers.broken.clear()
    workers.status = -6
    found = marks.run(["torch"], ["llama-8b"], NAMES, out=out, device="cuda")
    assert all(f"torch/llama-8b/{part}" in found for part in NAMES)
    assert "prefill, offline, prefix of llama-8b on torch: exit status -6 after all was kept" in capsys.readouterr().err


def test_what_fails_while_it_is_timed_holds_no_other_process_back(workers, tmp_path):
    out = tmp_path / "marks.json"
    workers.broken |= {("torch", "attention"), ("torch", "prefill")}
    says = "attention on torch failed: see above; prefill, offline, prefix of llama-8b on torch failed: see above"
    with pytest.raises(ChildProcessError, match=f"^{says}$"):
        marks.run(BOTH, ["llama-8b"], out=out, device="cuda")
    there = {key for key in json.loads(out.read_text()) if key.count("/") == 2}
    assert {"torch/llama-8b/profile", "jax//attention", "jax/llama-8b/prefix", "jax/llama-8b/identical"} <= there
    assert not there & {"torch//attention", "torch/llama-8b/prefill", "torch/llama-8b/offline"}


def test_parts_that_several_processes_keep_at_once_are_all_there(tmp_path):
    out = tmp_path / "marks.json"

    def keep(name: int) -> None:
        results = Results(out)
        for i in range(20):
            results.put(f"{name}/{i}", i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(4)))
    assert len(json.loads(out.read_text())) == 80 and os.listdir(tmp_path) == ["marks.json"]


def test_a_start_is_a_cold_one_until_one_is_told_of_and_then_a_warm_one(workers, folder, tmp_path):
    """Also after one that was killed. Each model starts with empty caches, whatever those of others hold."""
    out, cache = tmp_path / "marks.json", tmp_path / "cache"
    job = {"backend": "torch", "model": folder, "parts": ["decode-1"], "out": str(out)}
    caches, name = marks._caches(job)
    assert name == "startup" and caches.is_relative_to(cache) and not caches.exists()
    caches.mkdir(parents=True)
    (caches / "program").touch()
    assert marks._caches(job) == (caches, "startup") and not caches.exists()
    assert marks._caches(job | {"backend": "jax"})[0] != marks._caches(job | {"model": "llama-8b"})[0] != caches
    Results(out).put(f"torch/{folder}/startup", {"seconds": 9.0})
    # what was told was told elsewhere
    assert marks._caches(job) == (caches, None)
    caches.mkdir(parents=True)
    assert marks._caches(job) == (caches, "startup-warm") and caches.exists()
    marks.run(["torch"], [folder], ["identical"], out=out, **SMALL)
    marks.run(["torch"], [folder], ["decode-1"], out=out, again=True, **SMALL)
    assert [one["startup"] for one in workers.jobs] == ["startup-warm", "startup"]
    with pytest.raises(ValueError, match="caches of its own"):
        marks.run(["torch"], [folder], out=out, compile_cache_dir="x", **SMALL)


@pytest.mark.parametrize("startup", ["startup", "startup-warm", None])
def test_a_start_is_told_by_its_name(startup, folder, tmp_path, monkeypatch):
    out = tmp_path / "marks.json"
    llm = SimpleNamespace(
        backend=SimpleNamespace(num_compiles=lambda: 3), memory_plan=SimpleNamespace(total_bytes=1, num_blocks=[2])
    )
    monkeypatch.setattr(marks_worker, "start", lambda *args, **more: llm)
    for part in ("run_workload", "run_identical"):
        monkeypatch.setattr(marks_worker, part, lambda *args: {})
    parts = ["decode-1"] if startup == "startup" else ["identical"]
    job = {"backend": "torch", "device": "cpu", "model": folder, "parts": parts, "out": str(out), "arguments": {}}
    marks_worker.work(job | {"began": time.time() - 7, "startup": startup})
    found = {key.rpartition("/")[2]: value for key, value in json.loads(out.read_text()).items()}
    memory = ["memory"] if startup == "startup" else []
    assert set(found) == {*parts, *memory, *([startup] if startup else [])}
    assert not startup or (found[startup]["compiles"] == 3 and found[startup]["seconds"] >= 7)


def test_overlapped_and_synchronous_runs_are_compared_on_one_engine(monkeypatch):
    rng = np.random.default_rng(0)
    asked = [(rng.integers(0, VOCAB, 3 + i).tolist(), 4 + i % 5) for i in range(9)]
    monkeypatch.setattr(marks_worker, "workload", lambda name, vocab: {"offline": asked}[name])
    llm, unread = engine(), []
    assert engine(async_scheduling=False).max_unread == 1 and llm.max_unread == 2
    generate = llm.generate

    def watched(*args: Any, **more: Any) -> Any:
        unread.append(llm.max_unread)
        outputs = generate(*args, **more)
        assert not any(o.num_cached_tokens for o in outputs)
        if spoilt and llm.max_unread == 1:
            outputs[4].outputs[0].token_ids.append(0)
        return outputs

    spoilt = False
    monkeypatch.setattr(llm, "generate", watched)
    assert marks_worker.run_identical(llm, VOCAB) == {"equal": True, "same": 9, "of": 9}
    spoilt = True
    assert marks_worker.run_identical(llm, VOCAB) == {"equal": False, "same": 8, "of": 9}
    assert unread == [2, 1, 2, 1] and llm.max_unread == 2


def test_shapes_lie_in_the_users_cache(tmp_path, monkeypatch):
    """Not where another user of the machine may have put them."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    made = Path(write_config("llama-8b"))
    assert made.is_relative_to(tmp_path) and json.loads((made / "config.json").read_text())["hidden_size"] == 4096


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_alone_is_held_against_float64(backend):
    options = {"dtype": "bfloat16", "device": "cpu", "threads": 1} if backend == "torch" else {"dtype": "float32"}
    on = get_backend(backend, options)
    sizes = [Size("prefill", 2, 40), Size("prefill", 1, 70)][: 2 if backend == "torch" else 1]
    found = marks_attention.measured(on, sizes)
    assert list(found) == [size.name for size in sizes]
    for one in found.values():
        assert 0 < one["us"] < 10e6 and one["unit"] == "TFLOP/s"
        assert 1e-3 < one["error"] < 1e-2 if backend == "torch" else one["error"] < 1e-5


@on_torch
def test_attention_alone_is_recorded_before_it_is_timed(monkeypatch):
    from recorder import graphs_on_a_cpu

    recorder = graphs_on_a_cpu(monkeypatch)
    on = get_backend("torch", {"dtype": "bfloat16", "device": "cpu", "threads": 1})
    marks_attention.measured(on, [Size("prefill", 2, 40), Size("decode", 1, 40)])
    # the check, three to warm up, three times ten
    assert on.num_compiles() == 2 and recorder.replays == 2 * 34


def test_attention_that_is_not_right_is_refused():
    """Nothing is not taken for it."""
    size, rng = Size("decode", 2, 40), np.random.default_rng(0)
    pools = rng.standard_normal((2, marks_attention.REPEATED, marks_attention.BLOCK, 8, 128))
    tables, queries = np.arange(1, 7).reshape(2, 3), rng.standard_normal((9, 8, 4, 128))
    with pytest.raises(SystemExit, match=r"decode 2 x 40: relative error 1\.0"):
        marks_attention.relative_error(np.zeros((2, 8, 4, 128)), queries, pools, tables, size)


def test_sizes_of_attention_read_more_than_a_cache_holds():
    assert [size.layers for size in marks_attention.SIZES] == [32, 32, 22, 22, 5, 5, 2, 2, 2]
    assert Size("decode", 64, 4096).rate(282e-6) == (3808, "GB/s")
    assert Size("decode", 64, 4096, "int8").rate(171.2e-6) == (3234, "GB/s")
    assert Size("prefill", 1, 16384).rate(3.524e-3) == (624, "TFLOP/s")
    assert [size.name for size in marks_attention.NARROW] == ["decode 64 x 4096 int8", "decode 64 x 4096 fp8"]


@pytest.mark.parametrize(
    ("status", "last", "found"),
    [
        (
            0,
            "103 passed, 2 skipped, 1500 deselected in 71.25s (0:01:11)",
            {"passed": 103, "skipped": 2, "seconds": 71.25},
        ),
        (1, "1 failed, 102 passed in 71.25s", "kernels failed: 1 failed, 102 passed"),
        (4, "", "kernels failed: pytest ended with 4"),
        (0, "2 skipped in 0.50s", "kernels failed: 2 skipped"),
    ],
)
def test_the_gpu_tests_of_a_clone_are_counted(status, last, found, monkeypatch):
    asked = []

    def run(command, **more):
        asked.append((command, more["cwd"]))
        return SimpleNamespace(returncode=status, stdout=f"{last}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(marks_kernels, "_num_cores", lambda: 8)
    assert marks_kernels.has_tests()
    if isinstance(found, dict):
        assert marks_kernels.kernels(beside=2) == found
        ((command, cwd),) = asked
        assert command[command.index("-n") + 1] == "6" and "gpu and not slow" in command
        assert all((Path(cwd) / name).exists() for name in marks_kernels.TESTS)
    else:
        with pytest.raises(ChildProcessError, match=found):
            marks_kernels.kernels()


HANGS = """
import ctypes, pytest
pytestmark = pytest.mark.gpu
def test_that_ends(): pass
def test_that_waits():
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True:
        libc.pthread_mutex_lock(lock)
"""


def test_a_gpu_test_that_no_signal_ends_is_named(tmp_path, monkeypatch, capsys):
    """As one that waits for a device."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n slow\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--backends')\n")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    for name, value in (("ROOT", tmp_path), ("TESTS", ("test_hangs.py",)), ("LIMIT", 1)):
        monkeypatch.setattr(marks_kernels, name, value)
    monkeypatch.setattr(marks_kernels, "_num_cores", lambda: 1)
    with pytest.raises(ChildProcessError, match="1 failed, 1 passed"):
        marks_kernels.kernels()
    assert "crashed while running 'test_hangs.py::test_that_waits'" in capsys.readouterr().err


def test_an_installed_package_has_no_tests_to_run(monkeypatch, tmp_path, workers):
    monkeypatch.setattr(marks_kernels, "ROOT", tmp_path)
    assert "kernels" not in marks.parts_on("cuda")
    with pytest.raises(ValueError, match="tests of a clone"):
        marks.run(["torch"], [], ["kernels"], out=tmp_path / "x.json", device="cuda")


VALUES = {
    "torch//machine": H200 | {"versions": {"octavo": "0.1", "torch": "2.11.0"}},
    "jax//machine": H200 | {"versions": {"octavo": "0.1", "jax": "0.11.2"}},
    "torch//check": {"eager": True, "warm": True},
    "//kernels": {"passed": 103, "skipped": 0, "seconds": 71.25},
    "torch/llama-8b/prefill": {"tok_s": 40999.9, "seconds": 6.5, "compiles": 0, "preemptions": 0},
    "torch/qwen3-0.6b/decode-64": {"tok_s": 34927.2, "seconds": 0.5, "compiles": 2, "preemptions": 0},
    "jax/qwen3-0.6b/decode-64": {"tok_s": 28975.7, "seconds": 0.5, "compiles": 0, "preemptions": 1},
    "jax/qwen3-0.6b/startup-warm": {"seconds": 8.29, "compiles": 159},
    "torch/qwen3-0.6b/startup-warm": {"seconds": 9.56, "compiles": 243},
    "jax/qwen3-0.6b/identical": {"equal": False, "same": 250, "of": 256},
    "torch/qwen3-0.6b/identical": {"equal": True, "same": 256, "of": 256},
    "torch/qwen3-0.6b/profile": {
        "decode 1": {
            "wall_us": 1261,
            "waited_us": 44,
            "device_us": 1149.9,
            "launches": 195,
            "kernels": [[716.6, 112, "x"]],
        },
    },
    "torch//attention": {
        "decode 64 x 4096": {"rate": 3807, "unit": "GB/s", "us": 282.0, "error": 0.0021},
        "decode 64 x 4096 int8": {"rate": 3234, "unit": "GB/s", "us": 171.2, "error": 0.0017},
    },
    "jax//attention": {"decode 64 x 4096": {"rate": 4268, "unit": "GB/s", "us": 251.0, "error": 0.0023}},
}
TABLES = """\
NVIDIA H200, 580, 2026-11-30, Python 3.12.3, octavo 0.1, torch 2.11.0, jax
0.11.2

Checks: greedy fp32 tokens of a small model on torch are the CPU's, 2 ways;
tests of kernels and engines on the GPU: 103 passed in 71 s.

Attention alone, GB/s or TFLOP/s; relative error at most 0.0023

|                       | torch, mark       | jax, mark       | FA3   |
| --------------------- | ----------------- | --------------- | ----- |
| decode 64 x 4096      | 3,807 SHORT 3,900 | 4,268 met 3,900 | 4,068 |
| decode 64 x 4096 int8 | 3,234             | -               | -     |
| int8 for bf16, times  | 1.65 met 1.6      | -               | -     |

llama-8b: tokens a second (of prefill: input tokens); start-ups in seconds

|         | torch, mark         | jax, mark | vLLM 0.26 |
| ------- | ------------------- | --------- | --------- |
| prefill | 41,000 SHORT 41,000 | -         | 41,100    |

While these ran: nothing was compiled, no request was preempted.

qwen3-0.6b: tokens a second (of prefill: input tokens); start-ups in seconds

|              | torch, mark       | jax, mark           | vLLM 0.26 |
| ------------ | ----------------- | ------------------- | --------- |
| startup-warm | 9.56 SHORT 8      | 8.29 met 10         | -         |
| decode-64    | 34,927 met 32,000 | 28,976 SHORT 30,000 | 22,400    |
| identical    | 256 of 256        | 250 of 256 SHORT    | -         |

While these ran: 2 compiles in decode-64 on torch; 1 preemptions in decode-64 on
jax.

A step of qwen3-0.6b: microseconds, on the device alone, launches

|          | torch               | jax       |
| -------- | ------------------- | --------- |
| decode 1 | 1,261 / 1,150 / 195 | - / - / - |
"""


def test_the_tables_of_a_run_are_shown_again_in_80_columns(tmp_path):
    out = tmp_path / "marks.json"
    out.write_text(json.dumps(VALUES))
    result = _marks("--show", "--out", str(out), "--backend", "torch,jax")
    assert result.stdout == TABLES and max(map(len, TABLES.splitlines())) <= 80
    assert _marks("--show", "--out", str(out)).stdout == TABLES
    (only,) = [line for line in _marks("--show", "--out", str(out), "-b", "jax").stdout.splitlines() if "t 10" in line]
    assert only == "| startup-warm | 8.29 met 10         | -         |"
    for words, says in ((["-b", "other"], "nothing of backend 'other': it has torch, jax"), (["--again"], "--again")):
        result = _marks("--show", "--out", str(out), *words)
        assert result.exit_code == 1 and says in result.stderr


def test_marks_and_peers_stand_beside_an_h200_alone():
    values = VALUES | {"torch//machine": H200 | {"gpu": "Other"}}
    text = marks_table.report(values, ["torch"], ["llama-8b"])
    assert "41,100" not in text and "| prefill | 41,000 |" in text and "FA3" not in text


def test_gpus_that_are_alike_are_told_once(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda *fields: "NVIDIA H200, 580\nNVIDIA H200, 580")
    monkeypatch.setattr(machine, "version", lambda name: "1")
    assert machine.machine("torch", "cuda")["gpu"] == "NVIDIA H200, 580"
