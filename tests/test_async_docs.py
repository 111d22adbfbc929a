"""The example of docs/async.md and examples/async_chat.py, run as they stand on a tiny model of random weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from async_engines import words
from tiny import VOCAB

ROOT = Path(__file__).parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    path = tmp_path_factory.mktemp("tiny")
    words(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def run(path: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_page_runs(folder: Path) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/async.md").read_text(), flags=re.S)
    assert text.count('model="smollm2"') == 1
    text = text.replace('model="smollm2"', f'model={str(folder)!r}, load_format="dummy"')
    (folder / "page.py").write_text(text)
    lines = run(folder / "page.py").splitlines()
    assert sorted(line.split(" -> ")[0] for line in lines[:4]) == [f"What is {i} + {i}?" for i in range(4)]
    # every word of the tokenizer has a w
    assert all(line.split(" -> ")[1].count("w") == 20 for line in lines[:4])
    assert lines[4].startswith("EngineStats(num_running=0, num_waiting=0")


def test_the_chat_example_runs(folder: Path) -> None:
    out = run(ROOT / "examples/async_chat.py", "--model", str(folder), "--load-format", "dummy", "--max-tokens", "8")
    assert out.count("anna: ") == out.count("ben: ") == 2
    assert out.splitlines()[-1] == "0 requests are running, 0% of the cache is in use"
