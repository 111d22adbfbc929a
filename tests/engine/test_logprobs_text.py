"""What logprobs say of half characters: pieces in context, and the exact bytes of each token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tokenizers
from backends import BACKENDS
from tiny import RANDOM, TINY, engine
from tokenizers import decoders, models

from octavo.engine import LLM
from octavo.engine.tokenizer_gguf import byte_alphabet, spell_bytes

CHARACTERS = ["a", "the", "\n", " ", "é", "你", "か", "😀", "👍🏽", "\u0301"]
# every byte, so that each character may come in up to four tokens, and some parts of characters and words
PARTS = ["你".encode()[:2], "😀".encode()[1:], " é".encode()[:2], b" word", "か".encode()]
PIECES = [*(bytes([i]) for i in range(256)), *PARTS]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("bytes")
    vocab = [spell_bytes(data) for data in PIECES]
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    assert set(vocab[:256]) == set(byte_alphabet())
    return engine(replace(TINY, vocab_size=len(PIECES)), backend=BACKENDS[0], tokenizer=str(folder))


def split(rng: random.Random, data: bytes) -> list[int]:
    """Ids whose bytes are these, cut anywhere."""
    ids = []
    while data:
        fits = [i for i, piece in enumerate(PIECES) if data.startswith(piece)]
        ids.append(rng.choice(fits))
        data = data[len(PIECES[ids[-1]]) :]
    return ids


def test_pieces_of_prompts_and_bytes_of_outputs_reassemble(llm: LLM) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randint(2, 20))) for _ in range(60)]
    prompts = [[ord("x"), *split(rng, text.encode())] for text in texts]
    params = replace(RANDOM, max_tokens=9, temperature=2.0, prompt_logprobs=1, logprobs=1, top_k=0, top_p=1.0)
    params = [replace(params, seed=i, skip_special_tokens=False) for i in range(len(prompts))]
    for text, prompt, output in zip(texts, prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        told = [entry[i].decoded_token for entry, i in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        assert "".join(told) == text
        exact = b"".join(map(llm.tokenizer.token_bytes, prompt[1:]))
        assert exact == text.encode()
        # sampled ids are hardly ever whole characters: what is none is replaced in the text, and exact in the bytes
        (c,) = output.outputs
        assert b"".join(map(llm.tokenizer.token_bytes, c.token_ids)).decode("utf-8", "replace") == c.text
