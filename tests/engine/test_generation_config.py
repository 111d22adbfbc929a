"""What a checkpoint's generation_config.json does to requests, and how a user has it otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo.engine import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "eos_token_id": 4,
}  # fmt: skip
ASKED = {
    "temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 9,
    "eos_token_id": [5, 6],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weight files; its tokenizer's own end is id 3."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, "w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    _write(folder, ASKED)
    return folder


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(config))


def _load(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", num_gpu_blocks_override=9, **arguments)


def test_its_values_are_the_defaults_and_a_request_of_its_own_wins(folder: Path) -> None:
    llm = _load(folder)
    want = SamplingParams(temperature=0.6, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_tokens=9)
    assert llm.get_default_sampling_params() == want
    made = llm.generate([[1, 2]], None, use_tqdm=False)[0].outputs[0]
    assert len(made.token_ids) == 9 or made.finish_reason == "stop"
    made = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert len(made.token_ids) == 2


def test_vllm_switches_the_defaults_off_and_the_ends_of_text_stay(folder: Path) -> None:
    llm = _load(folder, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.eos_ids == {3, 5, 6}
    llm = _load(folder, generation_config="vllm", override_generation_config={"top_k": 2})
    assert llm.get_default_sampling_params() == SamplingParams(top_k=2)


def test_overrides_and_another_folder_replace_them(folder: Path, tmp_path: Path) -> None:
    llm = _load(folder, override_generation_config={"temperature": 0.25, "top_k": None, "eos_token_id": 8})
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.25, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_tokens=9
    )
    assert llm.eos_ids == {3, 8}
    _write(tmp_path / "other", {"temperature": 0.5, "eos_token_id": 9})
    llm = _load(folder, generation_config=str(tmp_path / "other"))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5)
    assert llm.eos_ids == {3, 9}


def test_the_end_of_config_json_counts_where_no_other_is_listed(folder: Path) -> None:
    assert _load(folder).eos_ids == {3, 5, 6}
    _write(folder, {"temperature": 0.6})
    assert _load(folder).eos_ids == {3, 4}


@pytest.mark.parametrize("end", [3, 5, 6])
def test_each_listed_id_ends_a_text_unless_ignored(folder: Path, end: int) -> None:
    llm = _load(folder, generation_config="vllm")
    # the model would say anything: it is made to say the end
    update = llm.scheduler.update

    def say(plan: Any, token_ids: list[int]) -> Any:
        return update(plan, [end] * len(token_ids))

    llm.scheduler.update = say
    made = llm.generate([[1, 2]], SamplingParams(max_tokens=5), use_tqdm=False)[0].outputs[0]
    assert (list(made.token_ids), made.finish_reason, made.stop_reason, made.text) == ([end], "stop", None, "")
    ignored = SamplingParams(max_tokens=3, ignore_eos=True)
    made = llm.generate([[1, 2]], ignored, use_tqdm=False)[0].outputs[0]
    assert (list(made.token_ids), made.finish_reason) == ([end] * 3, "length")
