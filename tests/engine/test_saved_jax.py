"""Programs kept on disk: found again without tracing, and never where something is not as it was."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from oracle import greedy
from tiny import GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import fingerprint, saved_jax
from octavo.engine.backend_jax import compile_counter
from octavo.engine.loading.cache_dir import is_ours
from octavo.engine.narrow_jax import Narrow
from octavo.engine.resident_jax import RENEWS, Resident, renewed
from octavo.engine.saved_jax import Held, Jitted, Saved
from octavo.kernels_pallas import attention
from octavo.models import layers, llama, step
from octavo.models.layouts.paged import TokenMajor
from octavo.models.logit_edits import LogitsProcessor

WANT = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:2]]


class Traces:
    """How often JAX has traced since `begin`."""

    def __init__(self) -> None:
        self.num = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **kwargs: Any) -> None:
        self.num += event == "/jax/core/compile/jaxpr_trace_duration"


TRACES = Traces()


@pytest.fixture(autouse=True)
def without_xlas_cache() -> Iterator[None]:
    """What comes out of the cache that an engine before has asked for cannot be kept."""

    def leave() -> None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()

    leave()
    yield
    leave()


def adding(folder: Path, what: str = "adding", by: float = 1.0) -> Saved:
    def add(state: Any, x: Any) -> Any:
        return {"sum": state["sum"] + x * by}

    return Saved(Jitted(jax.jit(add, donate_argnums=0)), what, (), folder)


def test_a_program_is_found_again_and_not_traced(tmp_path: Path) -> None:
    """With another shape it is another program; what it consumes is gone, and its result is right."""
    for first in (True, False):
        program, before = adding(tmp_path), TRACES.num
        for n in (3, 5, 3):
            state = {"sum": jnp.arange(n, dtype=jnp.float32) + np.ones(n, np.float32)}
            traced = TRACES.num
            out = program(state, np.full(n, 2, np.float32))
            assert first or TRACES.num == traced
            assert state["sum"].is_deleted()
            np.testing.assert_array_equal(out["sum"], np.arange(n) + 3.0)
        assert not first or TRACES.num > before
    assert len(list(tmp_path.glob("*.key"))) == len(list(tmp_path.glob("*.program"))) == 2


def test_what_lowers_to_the_same_is_compiled_once(tmp_path: Path) -> None:
    """Under another key, as after a change of code elsewhere; what lowers to something else is compiled."""
    x = {"sum": jnp.ones(3)}
    adding(tmp_path).prepare(x, np.ones(3, np.float32))()
    before = compile_counter().compiles, compile_counter().cache_hits
    adding(tmp_path, "edited").prepare(x, np.ones(3, np.float32))()
    assert (compile_counter().compiles, compile_counter().cache_hits) == (before[0] + 1, before[1] + 1)
    program = adding(tmp_path, "other", by=2.0)
    np.testing.assert_array_equal(program({"sum": jnp.ones(3)}, np.ones(3, np.float32))["sum"], np.full(3, 3.0))
    assert len(list(tmp_path.glob("*.key"))) == 3 and len(list(tmp_path.glob("*.program"))) == 2


def _checked(data: bytes) -> bytes:
    return hashlib.sha256(data).digest() + data


@pytest.mark.parametrize("what", ["key", "program"])
@pytest.mark.parametrize("broken", [b"", b"x" * 100, _checked(b"nothing"), _checked(b"\x80\x05K\x01.")],
                         ids=["empty", "other bytes", "no pickle", "another pickle"])  # fmt: skip
def test_a_broken_file_is_made_anew_with_a_warning(
    tmp_path: Path, what: str, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"sum": jnp.ones(3)}, np.ones(3, np.float32)
    adding(tmp_path).prepare(*args)()
    (path,) = tmp_path.glob(f"*.{what}")
    whole = path.read_bytes()
    path.write_bytes(broken)
    program = adding(tmp_path)
    np.testing.assert_array_equal(program(*args)["sum"], np.full(3, 2.0))
    # a key that names nothing is as good as none
    assert "made anew" in caplog.text or (what == "key" and broken[:32] == hashlib.sha256(broken[32:]).digest())
    assert path.read_bytes() != broken and len(path.read_bytes()) >= len(whole)
    traced = TRACES.num
    adding(tmp_path).prepare({"sum": program({"sum": jnp.ones(3)}, np.ones(3, np.float32))["sum"]}, args[1])()
    assert TRACES.num == traced


@pytest.mark.skipif(os.name != "posix", reason="who owns a file")
def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = {"sum": jnp.ones(3)}, np.ones(3, np.float32)
    adding(tmp_path).prepare(*args)()
    (path,) = tmp_path.glob("*.program")
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o620, 0o602):
        path.chmod(mode)
        traced = TRACES.num
        adding(tmp_path).prepare(*args)()
        assert TRACES.num > traced and path.stat().st_mode & 0o777 == 0o600
        assert "others may write it" in caplog.text
        caplog.clear()
    # st_mode, ..., st_uid
    for uid, ours in ((os.geteuid(), True), (0, True), (os.geteuid() + 1, False)):
        assert is_ours(os.stat_result((0o100600, 0, 0, 1, uid, 0, 0, 0, 0, 0))) == ours


def test_old_programs_go_while_others_remove_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for age in range(4):
        path = tmp_path / f"{age}.program"
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - 1000 * age - 1000,) * 2)
    gone = SimpleNamespace(path=str(tmp_path / "gone"), stat=failing)
    entries = [*os.scandir(tmp_path)]
    monkeypatch.setattr(saved_jax, "MOST_BYTES", 200)
    monkeypatch.setattr(os, "scandir", lambda folder: [gone, *entries])
    (tmp_path / "3.program").unlink()
    saved_jax.write(tmp_path / "new.program", b"y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.program", "1.program", "new.program"]
    assert not caplog.text


def failing(*args: Any) -> Any:
    raise FileNotFoundError("it is gone")


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "replace", failing)
    saved_jax.write(tmp_path / "new.program", b"y")
    assert not list(tmp_path.iterdir()) and "cannot be kept for the next start: it is gone" in caplog.text


def test_what_came_from_xlas_cache_is_not_kept(tmp_path: Path) -> None:
    """XLA's CPU compiler loses the code of such a program when it is serialised again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    args = {"sum": jnp.ones(7)}, np.ones(7, np.float32)
    adding(tmp_path / "a").prepare(*args)()
    assert len(list((tmp_path / "a").glob("*.program"))) == 1
    jax.clear_caches()
    adding(tmp_path / "b").prepare(*args)()
    assert not (tmp_path / "b").exists()


def counting(numbers: Any, state: Any, inputs: Any) -> Any:
    """A step of which a part of the state comes back as it went in."""
    return inputs["x"] + numbers, state | {"count": state["count"] + inputs["x"]}


def test_a_narrow_program_with_resident_inputs(tmp_path: Path) -> None:
    """What it does not change is known without tracing too."""
    for _ in range(2):
        narrow = Narrow(counting, 1, 1, (2,), lambda args: {})
        renew = Saved(Jitted(jax.jit(renewed, **RENEWS)), "renewed", (), tmp_path)
        program, traced = Resident(Saved(narrow, "counting", (), tmp_path), (2,), renew), TRACES.num
        state = {"count": jnp.zeros(4), "kept": jnp.arange(4.0)}
        for i in range(3):
            before = state
            out, state = program(jnp.float32(5), state, {"x": np.full(4, i + 1, np.float32)})
            np.testing.assert_array_equal(out, np.full(4, i + 6.0))
            assert before["count"].is_deleted() and state["kept"] is before["kept"]
        np.testing.assert_array_equal(state["count"], np.full(4, 6.0))
    # of the second time
    assert TRACES.num == traced


def test_a_second_engine_traces_nothing(tmp_path: Path) -> None:
    arguments = {"backend": "jax", "compile_cache_dir": str(tmp_path)}
    assert tokens(engine(**arguments), PROMPTS[:2]) == WANT
    traced, counter = TRACES.num, compile_counter()
    hits, compiles = counter.cache_hits, counter.compiles
    assert tokens(engine(**arguments), PROMPTS[:2]) == WANT
    assert TRACES.num == traced
    assert counter.cache_hits - hits == counter.compiles - compiles > 8


PROCESS = """
import sys
sys.path[:0] = {tests!r}
import json
from test_saved_jax import TRACES
from tiny import PROMPTS, engine, tokens
llm = engine(backend="jax", compile_cache_dir={folder!r}, warmup="all", max_model_len=48, max_num_seqs=2)
before = llm.backend.num_compiles()
found = tokens(llm, PROMPTS[:2])
assert llm.backend.num_compiles() == before, "compiled behind the warm-up"
traced, hits = TRACES.num, llm.backend.num_cache_hits()
print("FOUND", json.dumps([traced, before == hits, found]))
"""


@pytest.mark.slow
def test_a_second_process_traces_nothing(tmp_path: Path) -> None:
    """A whole warm-up, and requests; strings hash otherwise there."""
    found = []
    for seed in ("1", "2"):
        tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        script = PROCESS.format(tests=tests, folder=str(tmp_path))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
                              env=os.environ | {"PYTHONHASHSEED": seed})  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
        found.append(json.loads(line.removeprefix("FOUND ")))
    (traced, _, first), (again, all_hits, second) = found
    assert first == second == WANT
    assert traced > 20 and again == 0 and all_hits


def doubled(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    return logits * 2


def test_code_of_others_is_traced_at_every_start(tmp_path: Path) -> None:
    """A processor of a user's: nobody would see that it has changed. The programs without it are kept."""
    arguments = {"backend": "jax", "compile_cache_dir": str(tmp_path)}
    llm = engine(**arguments, logits_processors=[LogitsProcessor("doubled", doubled)])
    assert isinstance(llm.runner.head, Saved) and type(llm.runner.head_with_processors) is Held
    with pytest.raises(fingerprint.UnknownCode, match="doubled"):
        fingerprint.fingerprint({"a": [doubled]})


def test_what_changes_a_program_changes_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a function or a constant that somebody replaces in this process."""
    before, whole = fingerprint.fingerprint(spec_of(TINY)), fingerprint.loaded_code()
    assert before == fingerprint.fingerprint(spec_of(TINY)) and whole == fingerprint.loaded_code()
    from dataclasses import replace

    assert before != fingerprint.fingerprint(spec_of(replace(TINY, norm_eps=1e-3)))
    assert fingerprint.fingerprint(TokenMajor(8)) != fingerprint.fingerprint(TokenMajor(16))
    assert fingerprint.fingerprint(np.arange(3)) != fingerprint.fingerprint(np.arange(3) + 1)
    assert fingerprint.fingerprint({"a": 1, "b": {2, "x"}}) == fingerprint.fingerprint({"b": {"x", 2}, "a": 1})
    found = {whole}
    for target, name, value in (
        (layers, "linear", layers.split),
        (step, "head", step.forward),
        (saved_jax, "MOST_BYTES", 3),
        (TokenMajor, "spec", TokenMajor.attention),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value, raising=False)
            found.add(fingerprint.loaded_code())
    with monkeypatch.context() as patch:
        patch.setitem(attention.IMPLEMENTATIONS, "cpu", attention.IMPLEMENTATIONS["reference"])
        found.add(fingerprint.loaded_code())
        patch.setitem(attention.PREFERENCE, "cpu", ("reference",))
        found.add(fingerprint.loaded_code())
    assert len(found) == 7 and fingerprint.loaded_code() == whole


class Mine:
    """A user's."""


@pytest.mark.parametrize("value", [doubled, staticmethod(doubled), {"a": doubled}, Mine, Mine(), sys.modules[__name__]])
def test_what_a_user_has_put_in_octavos_place_has_no_hash(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint.loaded_code()
    for target, name in ((layers, "linear"), (TokenMajor, "spec")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            with pytest.raises(fingerprint.UnknownCode, match="test_saved_jax"):
                fingerprint.loaded_code()
    assert fingerprint.loaded_code() == whole


def test_a_users_function_in_octavos_place_is_traced_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was at the last start nobody knows."""

    def times(factor: float) -> Any:
        return lambda *args, **kwargs: factor * layers.linear(*args, **kwargs)

    found = []
    for factor in (3.0, -2.0, 1.0):
        monkeypatch.setattr(llama, "linear", times(factor))
        found.append(tokens(engine(backend="jax", compile_cache_dir=str(tmp_path)), PROMPTS[:1]))
    assert found[0] != found[1] != found[2] == WANT[:1]
