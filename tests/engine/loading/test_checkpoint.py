"""What a user may call a model, and what is said when it is not there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from embedded import embedded_model
from huggingface_hub import constants
from loading_files import llama_metadata, llama_tensors, write_gguf

from octavo.engine.loading.catalog import inspect_checkpoint, list_models, pull
from octavo.engine.loading.checkpoint import open_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4}
WEIGHTS = {"w": np.ones((2, 3), np.float32)}


@pytest.fixture
def folder(tmp_path) -> Path:
    return _fill(tmp_path / "model")


def _fill(folder: Path, *, safe: bool = True, pt: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    if safe:
        safetensors.numpy.save_file(WEIGHTS, folder / "model.safetensors")
    if pt:
        torch.save({"w": torch.zeros(2, 3)}, folder / "pytorch_model.bin")
    return folder


def test_a_folder(folder):
    checkpoint = open_model(folder)
    assert checkpoint.hf_config == CONFIG
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.load_format == "safetensors"
    assert checkpoint.tokenizer_source == folder
    np.testing.assert_array_equal(checkpoint.tensors.get("w"), WEIGHTS["w"])


def test_auto_prefers_safetensors_and_falls_back_to_bin(tmp_path):
    both, only_pt = _fill(tmp_path / "a", pt=True), _fill(tmp_path / "b", safe=False, pt=True)
    assert open_model(both).tensors.get("w").sum() == 6
    assert open_model(both, load_format="pt").tensors.get("w").sum() == 0
    assert open_model(only_pt).load_format == "pt"


def test_without_torch_bin_files_are_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\.bin files need torch, which is not installed"):
        open_model(_fill(tmp_path / "a", safe=False, pt=True))


def test_overrides_replace_entries_of_the_config(folder):
    config = open_model(folder, hf_overrides={"vocab_size": 9, "new": 1}).hf_config
    assert config == CONFIG | {"vocab_size": 9, "new": 1}


def test_dummy_needs_no_tensors_and_has_none(tmp_path):
    checkpoint = open_model(_fill(tmp_path / "a", safe=False), load_format="dummy")
    assert checkpoint.hf_config == CONFIG
    with pytest.raises(ValueError, match="load_format 'dummy': it has no tensors"):
        _ = checkpoint.tensors


def test_the_alias_opens_the_embedded_model():
    checkpoint = open_model("smollm2")
    assert (checkpoint.path, checkpoint.load_format) == (embedded_model(), "gguf")
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert checkpoint.tensors.identity == "SmolLM2-135M-Instruct.Q4_1-b179c9523d0e"
    assert checkpoint.tokenizer().vocab_size == 49152


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), llama_tensors(["F16"]))
    assert open_model(path).hf_config == open_model(tmp_path).hf_config
    assert open_model(path, load_format="dummy").source is None
    write_gguf(tmp_path / "n.gguf", "llama", llama_metadata(), llama_tensors(["F16"]))
    with pytest.raises(ValueError, match=r"expected one \.gguf file, found m\.gguf, n\.gguf"):
        open_model(tmp_path, load_format="gguf")
    with pytest.raises(ValueError, match="load_format 'safetensors' does not fit"):
        open_model(path, load_format="safetensors")


def test_the_tokenizer_may_come_from_elsewhere(folder, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), llama_tensors(["F16"]))
    assert open_model(path, tokenizer=folder).tokenizer_source == folder
    metadata = open_model(folder, tokenizer=path).tokenizer_source
    assert isinstance(metadata, dict)
    assert metadata["tokenizer.ggml.model"] == "gpt2"


@pytest.mark.parametrize(
    "name, message",
    [
        ("./nowhere", r"no such file or folder \(looked at .*nowhere"),
        ("/nowhere/at/all", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("what is this?", "no alias, no folder, no .gguf file and no hub id"),
    ],
)
def test_a_name_that_is_nothing_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        open_model(name)


def test_what_a_folder_lacks_is_said(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected \.safetensors or \.bin files"):
        open_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"expected config\.json, found generation_config\.json"):
        open_model(folder)


def test_wrong_arguments_are_refused(folder):
    with pytest.raises(ValueError, match="load_format 'npcache' is not one of auto, safetensors, pt, gguf, dummy"):
        open_model(folder, load_format="npcache")
    with pytest.raises(ValueError, match=r"revision 'v2' is for hub ids; .* is a path"):
        open_model(folder, revision="v2")
    with pytest.raises(ValueError, match="revision 'v2' is for hub ids; 'smollm2' is an alias"):
        open_model("smollm2", revision="v2")
    (folder / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a file, but not a \.gguf file"):
        open_model(folder / "x.bin")


@pytest.mark.parametrize("text", ["{", "[1]", "\udce9"])
def test_a_config_that_is_no_object_is_refused(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json"):
        open_model(folder)


def _hub_snapshot(cache: Path, revision: str = "main", **kinds: bool) -> Path:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = cache / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / revision).write_text(commit)
    return _fill(repo / "snapshots" / commit, **kinds)


def test_a_hub_id_that_is_cached_opens_offline(tmp_path):
    snapshot = _hub_snapshot(tmp_path)
    checkpoint = open_model("org/tiny", download_dir=tmp_path)
    assert (checkpoint.path, checkpoint.hf_config) == (snapshot, CONFIG)


def test_a_cached_hub_id_with_bin_files_only_opens_too(tmp_path):
    _hub_snapshot(tmp_path, revision="v2", safe=False, pt=True)
    assert open_model("org/tiny", revision="v2", download_dir=tmp_path).load_format == "pt"


def test_a_hub_id_that_is_not_cached_says_what_was_looked_for_and_where(tmp_path):
    _hub_snapshot(tmp_path)
    for name, revision in (("org/other", None), ("org/tiny", "v2")):
        with pytest.raises(ValueError) as error:
            open_model(name, revision=revision, download_dir=tmp_path)
        words = ("*.safetensors", "HF_HUB_OFFLINE", "Fetch it once online")
        for word in (name, revision or "main", str(tmp_path), *words):
            assert word in str(error.value)


def test_a_snapshot_without_weights_says_so(tmp_path):
    snapshot = _hub_snapshot(tmp_path, safe=False)
    with pytest.raises(ValueError, match=rf"expected \*\.safetensors or .* in its snapshot {snapshot}"):
        open_model("org/tiny", download_dir=tmp_path)
    assert open_model("org/tiny", download_dir=tmp_path, load_format="dummy").path == snapshot


def test_the_catalog_lists_aliases_and_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (entry,) = list_models()
    assert (entry.name, entry.kind, entry.num_bytes) == ("smollm2", "alias", None)
    (tmp_path / "own" / "converted").mkdir(parents=True)
    (tmp_path / "own" / "converted" / "x.safetensors").write_bytes(b"123")
    assert [(e.name, e.kind, e.num_bytes) for e in list_models()][1:] == [("x", "converted", 3)]


def test_inspect_tells_sizes_and_tensors():
    assert pull("smollm2") == embedded_model()
    told = inspect_checkpoint("smollm2")
    assert told["architecture"] == "LlamaForCausalLM"
    assert told["num_params"] == 134_515_008
    assert told["dtypes"] == {"Q8_0": 1, "F32": 61, "Q4_1": 210}
    assert told["num_tensors"] == len(told["tensors"]) == 272
    assert told["tensors"][0] == {
        "name": "model.embed_tokens.weight",
        "shape": (49152, 576),
        "dtype": "Q8_0",
        "num_bytes": 30081024,
    }
