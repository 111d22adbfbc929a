"""AsyncLLMs on the tiny model with a tokenizer of words, and what tests do with them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tokenizers
from tiny import TINY, VOCAB, numpy_weights, spec_of

from octavo.engine import AsyncLLM, RequestOutput

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ mood }}"
SIZES = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 120}


def words(path: Path) -> str:
    """The folder of a tokenizer of words w0, w1, ... one more than the model has."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB + 1)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(path)


def quiet(backend: str) -> dict[str, Any]:
    """Arguments that keep a test engine from using the whole machine."""
    return {"backend": backend} | ({"threads": 1} if backend == "torch" else {})


def arguments(backend: str, **more: Any) -> dict[str, Any]:
    """Those of an engine on the tiny model, LLM or AsyncLLM."""
    return {"weights": numpy_weights(TINY), **quiet(backend), **SIZES, **more}


@dataclass(frozen=True)
class Embed:
    """The embedding of the tiny model, on a device that takes its time, and fails while a file is there.

    For engines that run op by op (enforce_eager): compiled ones call it only once.
    """

    seconds: float = 0.0
    trouble: str = ""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(self.seconds)
        if self.trouble and Path(self.trouble).exists():
            raise RuntimeError("device lost")
        return spec_of(TINY).embed(*arguments, **keywords)


def start(backend: str, **more: Any) -> AsyncLLM:
    return AsyncLLM(more.pop("model", spec_of(TINY)), **arguments(backend, **more))


async def outputs_of(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def run(work: Callable[[], Any], seconds: float = 60) -> Any:
    """Runs a coroutine on an event loop of its own. Raises TimeoutError where something hangs."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work(), seconds)

    return asyncio.run(bounded())


async def freed(engine: AsyncLLM) -> bool:
    """Whether nobody runs or waits, and every block is free."""
    stats = await engine.get_stats()
    return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether these processes have ended, or do so soon."""
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(psutil.pid_exists, pids))
