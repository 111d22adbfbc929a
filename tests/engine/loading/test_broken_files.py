"""Files that lack something or say nonsense: one ValueError that names the file or the entry, from the front door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo.engine import LLM
from octavo.engine.loading import aliases

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weight files, sound as it is."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, "w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", num_gpu_blocks_override=9, **arguments)


def test_the_folder_is_sound_as_it_is(folder: Path) -> None:
    assert load(folder).generate([[1]], use_tqdm=False)[0].finished


CONFIGS = {
    "hidden_size": (None, "16", 0, True, 16.0),
    "num_key_value_heads": (0, "1"),
    "head_dim": (-8,),
    "max_position_embeddings": (None, 0),
    "num_hidden_layers": (0,),
    "rms_norm_eps": (None, "small"),
    "rope_scaling": ("linear", [2]),
    "rope_parameters": ("linear",),
    "eos_token_id": ("</s>", ["</s>"]),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in CONFIGS.items() for value in values])
def test_a_config_entry_is_named_with_its_value(folder: Path, name: str, value: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {name: value}))
    with pytest.raises(ValueError, match=name):
        load(folder)


def test_a_quantised_checkpoint_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(NotImplementedError, match=r"quantization_config .*awq"):
        load(folder)


FILES = {
    "config.json": ("{", "[]", "\udcff"),
    "generation_config.json": ("{", "[]", '{"temperature": 50}', '{"eos_token_id": "x"}'),
    "tokenizer.json": ("{", "[]", "{}", '{"model": 5}'),
    "tokenizer_config.json": ("{", "[]", '{"eos_token": 5}'),
    "special_tokens_map.json": ("{", "[]"),
}
NAMED_OTHERWISE = {'{"temperature": 50}': "temperature 50", '{"eos_token_id": "x"}': "eos_token_id 'x'"}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in FILES.items() for text in texts])
def test_a_broken_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=NAMED_OTHERWISE.get(text, name)):
        load(folder)


def test_a_generation_config_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere"):
        load(folder, generation_config=str(folder / "nowhere"))


@pytest.mark.parametrize("block", [lambda p: p.write_text(""), lambda p: p.symlink_to(p)], ids=["a file", "a loop"])
def test_a_cache_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path, block: Callable[[Path], Any]) -> None:
    block(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cannot make the cache folder .*Set OCTAVO_CACHE or download_dir"):
        aliases.fetch("smollm2", tmp_path / "cache")
