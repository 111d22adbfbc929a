"""Tokenizers of directories, against transformers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from octavo.engine.tokenizer import Tokenizer, load_tokenizer

LINES = ["Hello world, this is a page of text.", "def f(x):\n    return x + 12", "café naïve — 你好 世界", "don't"] * 20
TEXTS = [
    "Hello world 123",
    "<s>hi</s> there <tool>x</tool>",
    "  lead café 😀\n\n    1",
    "",
    " ",
    "a<pad>b 你好",
    "\t\r\n mixed\u00a0\u3000white",
]


def _byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


def _sentencepiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=500, special_tokens=special + byte_tokens, show_progress=False)
    )
    form = json.loads(made.to_str())
    form["added_tokens"] = form["added_tokens"][: len(special)]
    return tokenizers.Tokenizer.from_str(json.dumps(form))


def _write(folder: Path, made: tokenizers.Tokenizer, **config: object) -> Path:
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TOOL = {
    "content": "<tool>",
    "special": False,
    "normalized": False,
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
}
CONFIGS = {
    "plain": {},
    "pad": {"pad_token": "<pad>"},
    "ends": {"add_bos_token": True, "add_eos_token": True},
    "decoder": {"added_tokens_decoder": {"700": TOOL}},
    "additional": {"additional_special_tokens": ["<tool>", "</tool>"]},
    "extra": {"extra_special_tokens": {"tool_token": "<tool>"}},
    "dicts": {"eos_token": {**TOOL, "__type": "AddedToken", "content": "</s>", "special": True}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("make", [_byte_level, _sentencepiece])
def test_directory_equals_transformers(tmp_path, make, config):
    theirs = AutoTokenizer.from_pretrained(_write(tmp_path, make(), **config))
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special), text
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("make", [_byte_level, _sentencepiece])
def test_bytes_of_tokens_join_to_the_text(tmp_path, make):
    ours = load_tokenizer(_write(tmp_path, make()))
    for text in ("Hello wörld 😀\n", "你好\t x"):
        joined = b"".join(ours.token_bytes(i) for i in ours.encode(text))
        assert joined.decode().removeprefix(" ") == text
    assert ours.token_bytes(10**6) == ours.token_bytes(-1) == b""


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    _byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    ours = load_tokenizer(str(tmp_path))
    assert ours.eos_token_id == ours.get_vocab()["</s>"]
    assert ours.bos_token_id is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    made = _byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    ours = load_tokenizer(_write(tmp_path, made))
    assert ours.decode(ours.encode("Hello world, this is a page")) == "Hello world, this is a page"


def test_missing_tokenizer_names_directory_and_files(tmp_path):
    with pytest.raises(ValueError, match=rf"missing tokenizer: {tmp_path} has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_lone_surrogate_is_refused(tmp_path):
    ours = load_tokenizer(_write(tmp_path, _byte_level()))
    with pytest.raises(ValueError, match=r"lone surrogate .*ud800.* at position 3"):
        ours.encode("abc\ud800")


def test_threads_share_a_tokenizer(tmp_path):
    ours = load_tokenizer(_write(tmp_path, _byte_level()))
    texts = [f"{text} {i}" for i in range(50) for text in LINES[:4]]
    expected = [ours.encode(text) for text in texts]
    fresh = load_tokenizer(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh.encode, texts)) == expected
        data = pool.map(lambda ids: b"".join(map(fresh.token_bytes, ids)), expected)
        assert [d.decode() for d in data] == texts


def test_templates_come_from_the_config_or_from_files_which_win(tmp_path):
    _write(tmp_path, _byte_level(), chat_template="of the config")
    assert load_tokenizer(tmp_path).chat_template == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert load_tokenizer(tmp_path).chat_template == "of a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    both = load_tokenizer(tmp_path).chat_template
    assert both == {"default": "of a file", "tool_use": "for tools"}
    assert both == AutoTokenizer.from_pretrained(tmp_path).chat_template


def test_list_of_templates_becomes_a_dict(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    assert load_tokenizer(_write(tmp_path, _byte_level(), chat_template=named)).chat_template == {
        "default": "a",
        "rag": "b",
    }


def test_repr_says_how_large_and_which_special_tokens():
    made = _byte_level()
    size = made.get_vocab_size()
    assert repr(Tokenizer(made, {"eos_token": "</s>"})) == (
        f"Tokenizer(vocab_size={size}, special_tokens={{'eos_token': '</s>'}})"
    )
