"""Tensors of .bin files, through torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.engine.loading.pt_torch import source_of_folder

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "c": torch.linspace(-1, 1, 8).reshape(2, 4).t(),
    "d": torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
}


def _assert_same(source) -> None:
    assert sorted(source.names()) == sorted(TENSORS)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(source.get(name).astype(np.float32), x.detach().float().numpy())
    assert source.get("b").dtype.name == "bfloat16"
    assert source.nbytes("b") == 14
    assert source.stored("b").dtype == "bfloat16"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_one_file(tmp_path, zipped):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    _assert_same(source_of_folder(tmp_path))


def test_shards_are_read_through_their_index(tmp_path):
    where = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(TENSORS)}
    for name, file in where.items():
        torch.save({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    _assert_same(source_of_folder(tmp_path))


@pytest.mark.parametrize("length", [0, 10, 500, -10])
def test_a_cut_file_is_refused_with_its_name_and_bytes(tmp_path, length):
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"pytorch_model\.bin \({len(content)} bytes\) is truncated, corrupt or no torch"
    ):
        source_of_folder(tmp_path)


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        source_of_folder(tmp_path)
    assert "harm" not in capsys.readouterr().out


def test_a_folder_without_any_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected pytorch_model\.bin\.index\.json or .*, found neither"):
        source_of_folder(tmp_path)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, torch.zeros(3)], ids=["list", "numbers", "tensor"])
def test_a_file_of_something_else_is_named(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: expected a dict of tensors"):
        source_of_folder(tmp_path)


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x02", b"PK\x03\x04"], ids=repr)
def test_a_file_of_junk_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"pytorch_model.bin \(\d bytes\) is truncated, corrupt or no torch file"):
        source_of_folder(tmp_path)
