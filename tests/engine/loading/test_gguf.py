"""Reading GGUF files: the header against the gguf package's writer, and files that are not what they say."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from embedded import embedded_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading_files import write_gguf

from octavo.engine.loading.gguf import read_gguf

METADATA = {
    "a.int": 7,
    "a.float": 0.5,
    "a.bool": True,
    "a.text": "Ġ é 😀",
    "a.texts": ["x", "", "ÿ"],
    "a.ints": [1, 2, 3],
}


def _tensors() -> dict:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return {"x": ("F32", x), "y": ("F16", np.arange(5, dtype=np.float16)), "z": ("Q8_0", np.ones((2, 34), np.uint8))}


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", "llama", METADATA, _tensors())
    return path.read_bytes()


@pytest.fixture
def write(tmp_path):
    def to_file(data: bytes):
        path = tmp_path / "b.gguf"
        path.write_bytes(data)
        return path

    return to_file


def test_metadata_and_tensors_are_those_written(content, write):
    file = read_gguf(write(content))
    for key, value in METADATA.items():
        assert file.metadata[key] == value
    assert {n: (t.shape, t.type_name) for n, t in file.tensors.items()} == {
        "x": ((2, 3, 4), "F32"),
        "y": ((5,), "F16"),
        "z": ((2, 32), "Q8_0"),
    }
    for name, (_, x) in _tensors().items():
        assert file.raw(name).tobytes() == x.tobytes()


def test_every_scalar_type_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    values = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -9, "uint32": 2**32 - 1, "int32": -5}
    values |= {"uint64": 2**63, "int64": -(2**62), "float64": 1e300, "float32": 0.25, "bool": False}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "c.gguf").metadata
    assert {kind: metadata[kind] for kind in values} == values


def test_the_embedded_model_reads_as_the_gguf_package_reads_it():
    file, reader = read_gguf(embedded_model()), gguf.GGUFReader(embedded_model())
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors[::37]:
        np.testing.assert_array_equal(file.raw(t.name).reshape(-1), t.data.reshape(-1).view(np.uint8))


def test_a_file_cut_anywhere_is_refused_with_its_name_and_bytes(content, write):
    for length in range(len(content)):
        path = write(content[:length])
        # the last tensor may end before the padding that ends the file
        if length >= len(content) - 32 and length >= _end_of_tensors(content, write):
            continue
        with pytest.raises(ValueError, match=r"expected.*found") as error:
            read_gguf(write(content[:length]))
        assert str(path) in str(error.value)


def _end_of_tensors(content: bytes, write) -> int:
    file = read_gguf(write(content))
    return max(t.offset + t.nbytes for t in file.tensors.values())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read_but_never_crashes(content, write, data):
    end = min(t.offset for t in read_gguf(write(content)).tensors.values())
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = write(bytes(damaged))
    message = ""
    try:
        file = read_gguf(path)
        for name in file.tensors:
            file.raw(name)
    except (ValueError, NotImplementedError) as error:
        message = str(error)
    assert not message or str(path) in message


@pytest.mark.parametrize(
    "data, error, message",
    [
        (b"GGML" + bytes(40), ValueError, "expected the magic b'GGUF', found b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), NotImplementedError, r"version 1 .* not one of \(2, 3\)"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), NotImplementedError, "version 50331648"),
        (b"GGUF", ValueError, "at least 24 bytes, found a file of 4 bytes"),
    ],
    ids=["magic", "old", "big-endian", "short"],
)
def test_what_is_no_gguf_file_is_refused(write, data, error, message):
    with pytest.raises(error, match=message):
        read_gguf(write(data))


def test_a_split_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "s.gguf", "llama", {"split.count": 3}, _tensors())
    with pytest.raises(NotImplementedError, match="split in 3 files"):
        read_gguf(path)
