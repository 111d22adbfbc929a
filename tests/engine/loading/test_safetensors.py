"""Our reader of safetensors against the library's writer, and files that are cut or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.loading.safetensors import DTYPES, open_safetensors, source_of_folder

RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.normal(size=(3, 5)).astype(np.float32),
    "b": RNG.normal(size=(2, 1, 7)).astype(np.float16),
    "c": RNG.normal(size=(9,)).astype(ml_dtypes.bfloat16),
    "d": RNG.integers(0, 9, (4,)),
    "e": np.array(3.5),
    "f": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def path(tmp_path) -> Path:
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", {"format": "np"})
    return tmp_path / "model.safetensors"


def test_tensors_are_those_written(path):
    file = open_safetensors(path)
    assert file.metadata == {"format": "np"}
    assert set(file.header) == set(TENSORS)
    for name, x in TENSORS.items():
        assert file.get(name).dtype == x.dtype
        np.testing.assert_array_equal(file.get(name), x)


def test_a_source_tells_what_is_stored(path):
    source = source_of_folder(path.parent)
    stored = source.stored("b")
    assert (stored.shape, stored.dtype, stored.num_bytes) == ((2, 1, 7), "F16", 28)
    assert source.nbytes("c") == 18


def test_a_file_cut_anywhere_is_refused_with_its_name_and_bytes(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"expected .*found") as error:
            open_safetensors(path)
        assert str(path) in str(error.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read_but_never_crashes(path, data):
    safetensors.numpy.save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + content[0]))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    message = ""
    try:
        file = open_safetensors(path)
        for name in file.header:
            file.get(name)
    except (ValueError, NotImplementedError) as error:
        message = str(error)
    assert not message or str(path) in message


def test_a_dtype_that_numpy_lacks_is_named(path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(NotImplementedError, match=f"'w' is F4; supported are {', '.join(DTYPES)}"):
        open_safetensors(path)


def _write_shards(folder: Path) -> Path:
    names = list(TENSORS)
    for i, part in enumerate((names[:2], names[2:])):
        safetensors.numpy.save_file({n: TENSORS[n] for n in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    where = {n: f"model-0000{1 if n in names[:2] else 2}-of-00002.safetensors" for n in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def test_shards_are_read_through_their_index(tmp_path):
    _write_shards(tmp_path)
    # a file that the index does not name
    safetensors.numpy.save_file({"z": np.ones(3)}, tmp_path / "other.safetensors")
    source = source_of_folder(tmp_path)
    assert sorted(source.names()) == sorted(TENSORS)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(source.get(name), x)


def test_a_missing_shard_is_named(tmp_path):
    _write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not in its folder: model-00002-of-00002\.safetensors"):
        source_of_folder(tmp_path)


def test_a_tensor_that_the_index_promises_and_no_shard_holds_is_named(tmp_path):
    index = _write_shards(tmp_path)
    value = json.loads(index.read_text())
    value["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="do not hold: ghost"):
        source_of_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: expected JSON with a weight_map"):
        source_of_folder(tmp_path)


def test_files_without_an_index_are_listed(tmp_path):
    for name in ("x", "y"):
        safetensors.numpy.save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"found x\.safetensors, y\.safetensors"):
        source_of_folder(tmp_path)
