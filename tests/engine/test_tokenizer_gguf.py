"""Tokenizers made of GGUF metadata, against transformers' conversion of the same file and against sentencepiece."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from embedded import embedded_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer

from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.engine.tokenizer_gguf import SPLITS, merges_from_scores, spell_bytes

TEXTS = [
    "Hello world! It's a test, don't you think?  They'll say we've won.",
    "def f(x):\n\treturn x**2  # square\n\n\n    y = [x for x in range(n)]\n",
    "你好，世界。こんにちは、元気ですか？ 안녕하세요",
    "😀👍🏽👨‍👩‍👧 café naïve Ångström \u200d\ufeff",
    "   lead and trail   \n \n\t\t",
    "1234567890 3.14159 1,000,000 v2.0 x86_64",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <| im_end |> <repo_name>",
    "ÀÉÎ ŒÆ ß ﬁ ∑∫√ ≤≥ €£¥ العربية עברית हिन्दी ไทย",
    "\u00a0\u3000\u2003 odd white \x00\x01\x7f\r\n\r\n",
    "camelCaseAndSNAKE_CASE --flag=value /usr/bin/env $HOME && rm -rf *.tmp; <html><b>x</b></html>",
    "",
    " ",
    "\n",
]
# a run of white space before a digit, or a digit that is not one of 0-9
DIGIT_TEXTS = ["a  12", "x = [\n    1,\n    22]", "½ ² Ⅷ ٣٤", "\n\n\n7"]
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "?"},
]


@cache
def _metadata() -> dict[str, Any]:
    reader = gguf.GGUFReader(embedded_model())
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(_metadata())


@pytest.fixture(scope="module")
def theirs():
    path = embedded_model()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _published() -> tokenizers.Tokenizer:
    """The tokenizer as HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer.json spells it: digits, then ByteLevel."""
    metadata = _metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.add_special_tokens(tokens[:17])
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(smollm2, theirs, text):
    for special in (True, False):
        ids = smollm2.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert smollm2.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_smollm2_has_the_names_that_transformers_has(smollm2, theirs):
    assert smollm2.get_vocab() == theirs.get_vocab()
    assert smollm2.special_tokens == theirs.special_tokens_map
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id, smollm2.unk_token_id) == (1, 2, 2, 0)
    assert smollm2.special_ids == set(range(17))
    assert smollm2.chat_template == theirs.chat_template


@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_chat_equals_transformers(smollm2, theirs, prompt):
    ours = smollm2.apply_chat_template(CHAT, add_generation_prompt=prompt)
    assert ours == theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)


@pytest.mark.parametrize("text", TEXTS + DIGIT_TEXTS)
def test_smollm2_equals_its_published_tokenizer(smollm2, text):
    assert smollm2.encode(text) == _published().encode(text).ids


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab 01½\n\t'.,é你😀Ġ<|>"), max_size=40))
def test_smollm2_equals_its_published_tokenizer_on_any_text(text):
    ours, published = _both()
    assert ours.encode(text) == published.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@cache
def _both() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return load_tokenizer(_metadata()), _published()


@pytest.mark.parametrize("text", DIGIT_TEXTS)
def test_transformers_alone_splits_digits_otherwise(smollm2, theirs, text):
    """If this fails, transformers has learned the "smollm" split: then DIGIT_TEXTS belong to TEXTS."""
    assert smollm2.encode(text) != theirs.encode(text)


def _trained(pre: str) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    model = json.loads(made.to_str())["model"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*model["vocab"], "<think>"],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [3] + [1] * (len(model["vocab"]) - 1) + [4],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


WRITERS = {
    "tokens": "add_token_list",
    "scores": "add_token_scores",
    "token_type": "add_token_types",
    "merges": "add_token_merges",
}


def _write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of nothing but metadata, which is what transformers reads a tokenizer from."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        name = key.removeprefix("tokenizer.ggml.")
        if name in WRITERS:
            getattr(writer, WRITERS[name])(value)
        elif key != "general.architecture":
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
            add(key, value)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_kinds_equal_transformers(tmp_path, pre):
    metadata = _trained(pre)
    path = _write(tmp_path / "t.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_tokenizer(metadata)
    for text in [*TEXTS, *DIGIT_TEXTS, "<think>x</think>"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.special_ids == {0}
    assert ours.get_vocab() == theirs.get_vocab()


def test_qwen2_composes_characters_as_its_published_tokenizer():
    ours = load_tokenizer(_trained("qwen2"))
    assert ours.encode("cafe\u0301") == ours.encode("café")


def test_llama_bpe_keeps_whole_words_and_begins_with_bos():
    metadata = _trained("llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata["tokenizer.ggml.tokens"].append("Zqx")
    metadata["tokenizer.ggml.token_type"].append(1)
    ours = load_tokenizer(metadata)
    assert ours.convert_ids_to_tokens(ours.encode("Zqx")) == ["<|endoftext|>", "Zqx"]


def test_deepseek_v3_takes_digits_by_three_and_joins_punctuation_to_a_word():
    ours = load_tokenizer(_trained("deepseek-v3"))
    words = [word for word, _ in ours.backend.pre_tokenizer.pre_tokenize_str("ab1234 你好x.foo !")]
    assert words == ["ab", "123", "4", "Ġ", spell_bytes("你好".encode()), "x", ".foo", "Ġ!"]


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="'viking'"):
        load_tokenizer(_trained("viking"))
    with pytest.raises(NotImplementedError, match="'bert'"):
        load_tokenizer(_trained("gpt-2") | {"tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match=r"missing tokenizer: .*tokenizer\.ggml\.model"):
        load_tokenizer({"general.architecture": "llama"})
    assert "viking" not in SPLITS


def test_named_templates_of_a_file():
    metadata = _trained("gpt-2") | {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert load_tokenizer(metadata).chat_template == "a"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    assert load_tokenizer(metadata).chat_template == {"default": "a", "tool_use": "b"}


WORDS = "the of page book octavo is to and in Model cache block token step pure state café naïve don't it's hello"
SPM_TEXTS = [
    *(t for t in TEXTS if not t.startswith((" ", "\n", "\u00a0"))),
    "hello world",
    "the <think> page",
    "book ",
    "12 345",
]


@cache
def _sentencepiece() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    """A sentencepiece model with byte fallback and the metadata that llama.cpp would write for it."""
    rng = random.Random(0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(rng.choices(WORDS.split(" "), k=12)) for _ in range(400)),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(sp.get_piece_size())
    tokens = [sp.id_to_piece(i) for i in ids]
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    types[tokens.index("<think>")] = 4
    return sp, {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_kind_equals_transformers(tmp_path):
    _, metadata = _sentencepiece()
    path = _write(tmp_path / "t.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_tokenizer(metadata)
    for text in [*TEXTS, *SPM_TEXTS, "<s>the<|im_end|> page"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.encode("hello")[0] == ours.bos_token_id == 1
    assert ours.get_vocab() == theirs.get_vocab()


def test_sentencepiece_kind_equals_sentencepiece():
    sp, metadata = _sentencepiece()
    ours = load_tokenizer(metadata)
    for text in SPM_TEXTS:
        # sentencepiece does not look for control symbols in text
        if "<|im_end|>" not in text:
            assert ours.encode(text, add_special_tokens=False) == sp.encode(text), text


def test_space_prefix_is_left_out_when_the_file_says_so():
    _, metadata = _sentencepiece()
    ours = load_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_prefix_space=False)
    for text in ("hello the page", " hello", "book"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text == theirs.decode(ids)


def test_gemma_is_refused():
    _, metadata = _sentencepiece()
    with pytest.raises(NotImplementedError, match="gemma2"):
        load_tokenizer(metadata | {"general.architecture": "gemma2"})
