"""Tokenizers from the metadata of a GGUF file, which carries no tokenizer.json.

Where transformers' conversion and the model's own tokenizer.json differ, the model's own wins:

- "smollm" and its like cut out digits (of any script, "½" too) one by one before all else; transformers does not,
  and gives other ids for a run of white space before a digit ("\\n    1").
- "llama-bpe" and "tekken" vocabularies ignore merges for whole words in the vocabulary and start with BOS; "qwen2"
  normalises to NFC.
- `add_space_prefix` and `unknown_token_id` are honoured.

Sentencepiece vocabularies follow transformers (`legacy` false): no space is put before a text that begins with one, nor
behind a special token, where sentencepiece itself would put one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary cuts text before its merges: by each regex in turn."""

    regexes: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # where the file does not say


SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo"), Split((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), Split((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), Split((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((_QWEN2,), nfc=True)),
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3": Split(_DEEPSEEK3, add_bos=True),
}


def backend_from_metadata(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer that the metadata describes and the text of its named special tokens."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ValueError('missing tokenizer: the GGUF metadata has no "tokenizer.ggml.model"')
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise NotImplementedError(f"tokenizer.ggml.model {kind!r}; there are {sorted(builders)}")
    tokens = metadata["tokenizer.ggml.tokens"]
    backend, add_bos = builders[kind](metadata)
    backend.add_special_tokens(_added(metadata, CONTROL))
    backend.add_tokens(_added(metadata, USER_DEFINED))
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL_IDS.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special.values()])
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _add_ends(backend, special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None)
    return backend, special


def _add_ends(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Puts these tokens around every text that is encoded; changes `backend`."""
    single = " ".join([f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None))
    ends = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} {single.replace('$A', '$B').replace(':0', ':1')}",
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)],
    )


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise NotImplementedError(f"tokenizer.ggml.pre {pre!r}; there are {sorted(SPLITS)}")
    split = SPLITS[pre]
    alphabet = byte_alphabet()
    vocab = {
        token if set(token) <= alphabet.keys() else spell_bytes(token.encode()): i
        for i, token in enumerate(metadata["tokenizer.ggml.tokens"])
    }
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in split.regexes]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    architecture = metadata.get("general.architecture", "llama")
    if architecture.startswith("gemma"):
        raise NotImplementedError(
            f"a sentencepiece tokenizer of architecture {architecture!r} (its merges are unsorted)"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * bool(prefix))
    return backend, True


def merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns every way to put a token together from two others, best score first."""
    merges = [
        (token[:cut], token[cut:], scores[i])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda m: (m[2], len(m[0]), len(m[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _added(metadata: Mapping[str, Any], wanted: int) -> list[AddedToken]:
    """The tokens of a type; in a byte-level vocabulary one not in its alphabet is a llama.cpp mislabel."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    alphabet = byte_alphabet().keys() if metadata["tokenizer.ggml.model"] == "gpt2" and wanted == CONTROL else None
    return [
        AddedToken(token, normalized=False, special=wanted == CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind == wanted and (alphabet is None or set(token) <= alphabet)
    ]


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def spell_bytes(text: bytes) -> str:
    """Returns `text` in the byte-level alphabet."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(spelling[byte] for byte in text)
