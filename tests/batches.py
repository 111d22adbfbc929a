"""A tiny model folder without weights, batch files for it, and what their results are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from backends import BACKENDS
from tiny import VOCAB

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ mood }}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# one thread: this is about the host
ENGINE = {"load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8} | (
    {"threads": 1} if "torch" in BACKENDS else {}
)


def model_folder(path: Path) -> Path:
    """A tokenizer of words w0, w1, ... with a chat template, and the config of a tiny llama."""
    path.mkdir(exist_ok=True)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """A line of a batch file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def requests(count: int, max_tokens: int = 5) -> list[str]:
    """Lines of all kinds: greedy, seeded, unseeded, chats, several choices; some are wrong."""
    lines = []
    for i in range(count):
        prompt = [i % VOCAB, *range(1, 2 + i % 7)]
        match i % 7:
            case 0:
                lines.append(line(f"greedy {i}", prompt=prompt, temperature=0, max_tokens=1 + i % max_tokens))
            case 1:
                lines.append(line(f"seeded {i}", prompt=prompt, seed=i, max_tokens=max_tokens))
            case 2:
                chat = [{"role": "user", "content": f"w{i % VOCAB} w3"}]
                lines.append(line(f"chat {i}", CHAT, messages=chat, max_completion_tokens=max_tokens))
            case 3:
                lines.append(line(f"two {i}", prompt=[prompt, [5, 6]], n=2, max_tokens=2))
            case 4:
                lines.append(line(f"wrong {i}", prompt=prompt, temperature=9))
            case 5:
                lines.append("{ no JSON")
            case 6:
                lines.append(line(f"näm\u2028e {i} \ud800", prompt=f"w1 w{i % VOCAB}", max_tokens=max_tokens))
    return lines


def comparable(data: bytes) -> list[dict[str, Any]]:
    """The results of an output file, without the time at which they were made."""
    results = [json.loads(text) for text in data.splitlines()]
    for result in results:
        if result["response"]:
            result["response"]["body"].pop("created", None)
    return results
