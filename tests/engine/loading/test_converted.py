"""The cache of converted weights: found again, never trusted blindly, never half written."""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from loading_files import NumpyBackend, llama_metadata, llama_tensors, write_gguf

from octavo.engine.loading.checkpoint import open_model
from octavo.engine.loading.gguf_names import GGUFSource
from octavo.engine.loading.weights import load_weights
from octavo.models.interface import leaves
from octavo.models.registry import spec_from_hf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def path(tmp_path):
    return write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), llama_tensors(["Q4_K", "Q8_0"]))


def _load(path, dtype="float32", stage=None):
    checkpoint = open_model(path)
    return load_weights(spec_from_hf(checkpoint.hf_config), checkpoint.tensors, NumpyBackend(dtype), stage)


def _assert_equal(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def no_conversion(monkeypatch):
    """Makes it an error to dequantise anything."""

    def refuse(self, name):
        raise AssertionError(f"{name} was read from the GGUF file")

    return lambda: monkeypatch.setattr(GGUFSource, "get", refuse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_start_reads_the_cache_and_nothing_else(path, no_conversion, dtype):
    first = _load(path, dtype)
    no_conversion()
    _assert_equal(first, _load(path, dtype))


def test_the_cached_file_is_safetensors_of_the_leaves(path, cache):
    weights = _load(path)
    (file,) = cache.iterdir()
    found = safetensors.numpy.load_file(file)
    np.testing.assert_array_equal(found["layers.1.qkv"], weights["layers"][1]["qkv"])
    assert "ropes.rope" not in found
    assert file.name.startswith("m-")


def test_each_dtype_has_its_own_file(path, cache):
    for dtype in ("float32", "bfloat16", "float32"):
        _load(path, dtype)
    assert len(list(cache.iterdir())) == 2


def _flip_a_bit(file):
    with file.open("r+b") as f:
        f.seek(-100, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 4]))


def _truncate(file):
    os.truncate(file, file.stat().st_size - 1000)


def _empty(file):
    file.write_bytes(b"")


def _garble_the_header(file):
    with file.open("r+b") as f:
        f.seek(20)
        f.write(b"\xff\xff{{")


def _zero_the_end(file):
    size = file.stat().st_size
    os.truncate(file, size - 5000)
    os.truncate(file, size)


def _other_tensors(file):
    safetensors.numpy.save_file({"embed": np.zeros(3, np.float32)}, file)


@pytest.mark.parametrize("damage", [_flip_a_bit, _truncate, _empty, _garble_the_header, _zero_the_end, _other_tensors])
def test_a_damaged_file_is_made_anew_and_the_log_says_so(path, cache, caplog, damage, no_conversion):
    first = _load(path)
    (file,) = cache.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING, "octavo"):
        _assert_equal(first, _load(path))
    assert f"made anew: {file}" in caplog.text
    no_conversion()
    _assert_equal(first, _load(path))


def test_a_changed_file_is_converted_again(path, cache):
    _load(path)
    write_gguf(path, "llama", llama_metadata(), llama_tensors(["Q5_K"]))
    os.utime(path, ns=(1, 1))
    second = _load(path)
    assert len(list(cache.iterdir())) == 2
    np.testing.assert_array_equal(second["embed"], open_model(path).tensors.get("model.embed_tokens.weight"))


def test_another_arrangement_replaces_the_file(path, cache):
    _load(path)
    (old,) = cache.iterdir()
    checkpoint = open_model(path)
    model = spec_from_hf(checkpoint.hf_config)
    source = checkpoint.tensors
    embed = replace(model.weights["embed"], dtype="float16")
    other = replace(model, weights=model.weights | {"embed": embed})
    assert load_weights(other, source, NumpyBackend())["embed"].dtype == np.float16
    (new,) = cache.iterdir()
    assert new != old


def test_what_a_killed_process_left_is_deleted_in_time(path, cache):
    _load(path)
    (file,) = cache.iterdir()
    file.unlink()
    old, young = (file.with_name(f"{file.stem}.{name}.partial") for name in ("old", "young"))
    for partial in (old, young):
        partial.write_bytes(b"half")
    os.utime(old, (1, 1))
    _load(path)
    assert set(cache.iterdir()) == {file, young}


@pytest.mark.parametrize("stage", [range(1), range(1, 2)])
def test_a_stage_converts_the_whole_for_all(path, stage, no_conversion, cache):
    part = _load(path, stage=stage)
    no_conversion()
    whole = _load(path)
    assert len(list(cache.iterdir())) == 1 and len(whole["layers"]) == 2
    _assert_equal(part["layers"], whole["layers"][stage.start : stage.stop])
    _assert_equal(part, _load(path, stage=stage))


def test_a_load_that_fails_leaves_nothing_behind(path, cache):
    class Failing(NumpyBackend):
        def place_weight(self, x, spec):
            if self.num_placed == 5:
                raise MemoryError("no room")
            return super().place_weight(x, spec)

    checkpoint = open_model(path)
    with pytest.raises(MemoryError):
        load_weights(spec_from_hf(checkpoint.hf_config), checkpoint.tensors, Failing())
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_a_warning(path, cache, caplog):
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "octavo"):
        weights = _load(path)
    assert "not kept" in caplog.text
    np.testing.assert_array_equal(weights["embed"], open_model(path).tensors.get("model.embed_tokens.weight"))


def test_a_full_disk_is_a_warning(path, cache, caplog):
    first = _load(path)
    (file,) = cache.iterdir()
    file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit is an OSError once the signal that comes with it is ignored, as Python does
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "octavo"):
            second = _load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _assert_equal(first, second)
    assert "not kept" in caplog.text
    assert list(cache.iterdir()) == []
