"""One engine configuration, measured: what it generates, how fast, in how much memory; its logits on given tokens."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..llm import LLM
from ..sampling_params import SamplingParams
from .errors import kl_divergence
from .subjects import EngineSubject


@dataclass(frozen=True)
class Run:
    """What a configuration did with all prompts at once. Times are medians over rounds, and over prompts."""

    tokens: list[list[int]]
    ttft_ms: float  # from asking to the first token
    per_token_ms: float  # from token to token
    tokens_per_s: float  # of all prompts together, prefill included
    weights_bytes: int
    cache_bytes_per_token: float
    cache_bytes: int  # of the whole cache, as planned
    peak_bytes: int  # of the process on a CPU; on a GPU what is taken of it after the runs


@dataclass(frozen=True)
class Forced:
    """One prompt with A's tokens forced on B."""

    kl: list[float]  # nats, by position
    num_flipped: int  # positions where B's likeliest token is another
    first_flip: int | None = None  # of the free runs
    tokens: tuple[str, str] = ("", "")  # there, A's and B's
    gap: float | None = None  # of A's logits between them


class Candidate:
    """An engine made of a configuration's arguments."""

    def __init__(self, arguments: Mapping[str, Any]):
        self.llm = LLM(**arguments)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.llm.get_tokenizer()
        return [tokenizer.encode(p) for p in prompts]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, rounds: int) -> Run:
        """Greedy tokens of each prompt, all prompts at once, and what it takes."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        greatest, size = max((i for ids in prompts for i in ids), default=0), self.llm.model.vocab_size
        if greatest >= size:
            raise ValueError(f"the prompts have token id {greatest}, and this model's vocabulary has {size}")
        tokens, firsts, gaps, speeds = [], [], [], []
        # the first warms up
        for _ in range(1 + rounds):
            self.llm.reset_prefix_cache()
            tokens, first, gap, seconds = self._timed(prompts, params)
            firsts.append(first)
            gaps.append(gap)
            speeds.append(sum(map(len, tokens)) / seconds)
        plan = self.llm.memory_plan
        return Run(
            tokens=tokens,
            ttft_ms=1e3 * _middle(firsts[1:]),
            per_token_ms=1e3 * _middle(gaps[1:]),
            tokens_per_s=median(speeds[1:]),
            weights_bytes=plan.weights_bytes,
            cache_bytes_per_token=sum(g.block_bytes for g in plan.groups) / plan.block_size,
            cache_bytes=plan.cache_bytes,
            peak_bytes=self._peak(),
        )

    def _timed(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> tuple[list[list[int]], list[float], list[float], float]:
        """Tokens, seconds to the first and from one to the next, of each prompt; and seconds in all."""
        llm, started = self.llm, time.perf_counter()
        names = [f"compare-{i}" for i in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            llm.add_request(name, {"prompt_token_ids": list(ids)}, params)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                last[output.request_id] = time.perf_counter()
                first.setdefault(output.request_id, last[output.request_id])
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        gaps = [(last[n] - first[n]) / max(1, len(tokens[n]) - 1) for n in names]
        return [tokens[n] for n in names], [first[n] - started for n in names], gaps, time.perf_counter() - started

    def _peak(self) -> int:
        free, total = self.llm.backend.free_memory(), self.llm.backend.total_memory()
        if free is not None and total is not None:
            return total - free
        # kilobytes but on a Mac
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def write_logits(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], folder: str) -> None:
        """Puts the logits behind each of the given outputs' tokens into files, one a prompt: float32 [tokens, V]."""
        files = [self._file(folder, i, len(tokens)) for i, tokens in enumerate(outputs)]
        for i, j, logits_V in self._subject().forced(prompts, outputs):
            files[i][j] = logits_V
        for file in files:
            file.flush()

    def compare_logits(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        own: Sequence[Sequence[int]],
        folder: str,
    ) -> list[Forced]:
        """Its logits on the given outputs beside those in the files; `own` are the tokens of its free run."""
        wanted = [np.load(Path(folder) / f"{i}.npy", mmap_mode="r") for i in range(len(prompts))]
        if wanted[0].shape[1] != self.llm.model.vocab_size:
            sizes = wanted[0].shape[1], self.llm.model.vocab_size
            raise ValueError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared")
        kl = [[0.0] * len(tokens) for tokens in outputs]
        flipped = [0] * len(outputs)
        for i, j, logits_V in self._subject().forced(prompts, outputs):
            kl[i][j] = float(kl_divergence(logits_V[None], wanted[i][j][None])[0])
            flipped[i] += int(logits_V.argmax() != wanted[i][j].argmax())
        flips = [self._flip(*each) for each in zip(outputs, own, wanted, strict=True)]
        return [Forced(k, n, *flip) for k, n, flip in zip(kl, flipped, flips, strict=True)]

    def _flip(
        self, a: Sequence[int], b: Sequence[int], wanted: np.ndarray
    ) -> tuple[int | None, tuple[str, str], float | None]:
        """Where free runs part, both tokens there as text, and by how much A's logits prefer its own."""
        at = next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            return None, ("", ""), None
        texts = self._flip_text(a[at]), self._flip_text(b[at])
        return at, texts, float(wanted[at][a[at]] - wanted[at][b[at]])

    def _flip_text(self, token: int) -> str:
        return self.llm.get_tokenizer().decode([token], skip_special_tokens=False)

    def _subject(self) -> EngineSubject:
        return EngineSubject("candidate", self.llm)

    def _file(self, folder: str, i: int, length: int) -> np.memmap:
        shape = (length, self.llm.model.vocab_size)
        return np.lib.format.open_memmap(Path(folder) / f"{i}.npy", "w+", np.dtype(np.float32), shape)


def _middle(rounds: Sequence[Sequence[float]]) -> float:
    """The median over prompts of medians over rounds."""
    return median(median(each) for each in zip(*rounds, strict=True))
