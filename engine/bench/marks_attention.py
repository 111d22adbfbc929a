"""Part "attention" of `octavo bench marks`: how fast attention alone is on this GPU, each size held against float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ...models.interface import ArraySpec, AttentionSpec, Step
from ..backend import Backend, get_backend
from .steps import make_step

BLOCK, HEADS, GROUP, DIM = 16, 8, 4, 128
SPEC = AttentionSpec(HEADS, GROUP, DIM, DIM, DIM**-0.5)
ROUNDS = 10
REPEATED = 257  # blocks of different numbers, and rows of queries; a prime
FAR = 1e-2  # relative error of bfloat16 that is too much


@dataclass(frozen=True)
class Size:
    """Sequences of so many tokens each: one token of each is decoded, or all of them are a prompt."""

    kind: str  # decode or prefill
    seqs: int
    length: int
    cache: str | None = None  # a dtype of 8 bits, with scales; None: bfloat16

    @property
    def name(self) -> str:
        narrow = {None: "", "int8": " int8", "float8_e4m3fn": " fp8"}[self.cache]
        return f"{self.kind} {self.seqs} x {self.length}{narrow}"

    @property
    def count(self) -> int:
        """Tokens of a sequence that are computed."""
        return 1 if self.kind == "decode" else self.length

    @property
    def rows(self) -> tuple[int, int]:
        """Those of the first sequence that are held against float64: one in the middle, and the last."""
        return self.count // 2, self.count - 1

    @property
    def layers(self) -> int:
        """Ops of a program, each with a cache of its own, so that none is read from a processor's cache."""
        return max(2, min(32, int(6e9 / (self.seqs * self.length * HEADS * DIM * 4)))) if self.count == 1 else 2

    def rate(self, seconds: float) -> tuple[int, str]:
        """What an op that takes so long reaches: keys and values are read once, a prefill is causal."""
        if self.count > 1:
            return round(2 * self.seqs * self.length**2 * HEADS * GROUP * DIM / seconds / 1e12), "TFLOP/s"
        of_head = DIM * 2 if self.cache is None else DIM + 4
        return round(self.seqs * self.length * HEADS * of_head * 2 / seconds / 1e9), "GB/s"


SIZES = (
    *(Size("decode", *n) for n in ((1, 8192), (1, 32768), (8, 8192), (16, 4096), (64, 4096), (256, 1024))),
    *(Size("prefill", *n) for n in ((1, 4096), (2, 4096), (1, 16384))),
)
NARROW = (Size("decode", 64, 4096, "int8"), Size("decode", 64, 4096, "float8_e4m3fn"))


def attention(backend: str) -> dict[str, Any]:
    """By size GB/s of decode or TFLOP/s of prefill, microseconds of an op, and its relative error."""
    options = {"dtype": "bfloat16"} | ({"device": "cuda"} if backend == "torch" else {})
    # a whole cache of 8 bits is torch's
    return measured(get_backend(backend, options), SIZES + NARROW if backend == "torch" else SIZES)


def measured(backend: Backend, sizes: Sequence[Size]) -> dict[str, Any]:
    """All are compiled side by side, then they run one by one. Raises SystemExit if one is not right."""
    rng = np.random.default_rng(1)
    numbers = [rng.standard_normal((REPEATED, BLOCK, HEADS, DIM), np.float32) for _ in "kv"]
    queries = rng.standard_normal((REPEATED, HEADS, GROUP, DIM), np.float32).astype(ml_dtypes.bfloat16)
    subjects = [Subject(backend, size, numbers, queries) for size in sizes]
    calls = [(subject.run, subject.arguments) for subject in subjects]
    backend.rehearse(calls)
    backend.precompile(calls)
    found = {}
    for subject in subjects:
        error, seconds = subject.error(), subject.seconds()
        rate, unit = subject.size.rate(seconds)
        found[subject.size.name] = {"rate": rate, "unit": unit, "us": round(seconds * 1e6, 1), "error": error}
    return found


class Subject:
    """A program of a size's ops, one behind the other, and what it is called with.

    The layers' pools differ in memory, not in numbers: that is enough for the caches of the chip.
    """

    def __init__(self, backend: Backend, size: Size, numbers: Sequence[np.ndarray], queries: np.ndarray):
        self.backend, self.size, self.queries = backend, size, queries
        width, count = -(-size.length // BLOCK), size.count
        order = np.random.default_rng(0).permutation(size.seqs * width)
        self.tables = order.reshape(size.seqs, width).astype(np.int32) + 1
        shape = (size.seqs * width + 1, BLOCK, HEADS, DIM)
        pools, self.held = zip(*(_pool(backend, x, shape, size.cache) for x in numbers))
        self.caches = [tuple(make() for make in pools) for _ in range(size.layers)]
        q = np.resize(queries, (size.seqs * count, HEADS, GROUP, DIM))
        self.q = backend.place(q, ArraySpec(q.shape, (None,) * q.ndim))
        self.step = make_step(backend, self.tables, [size.length - count] * size.seqs, [count] * size.seqs, BLOCK)
        outs = ("middle", "last", "out", "caches")
        self.run = backend.compile(chain(size.rows), ("caches", "q", "step"), outs, consumes="caches")

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.caches, self.q, self.step

    def _call(self) -> tuple[Any, ...]:
        *outs, self.caches = self.run(*self.arguments)
        return tuple(outs)

    def error(self) -> float:
        """Relative, the larger of the checked rows'."""
        middle, last, _ = self._call()
        out = np.concatenate([self.backend.read(middle), self.backend.read(last)])
        return relative_error(out, self.queries, self.held, self.tables, self.size)

    def seconds(self) -> float:
        """Of an op, the best of a few rounds; gives the caches' memory back."""
        for _ in range(3):
            _, _, out = self._call()
        self.backend.read(out)
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(ROUNDS):
                _, _, out = self._call()
            self.backend.read(out)
            best = min(best, (time.perf_counter() - started) / ROUNDS / self.size.layers)
        self.caches = []
        return best


def chain(rows: Sequence[int]) -> Callable[..., tuple]:
    """A program of ops whose output is the next one's query, so that none is left out or moved."""

    def program(caches: list, q: Any, step: Step, *, ops: Any) -> tuple:
        """These rows of the first op, one of the last (all would take the host longer to read than the device to
        compute), and the caches."""
        ops, out, checked = ops.for_step([step]), q, []
        for (k, *k_scale), (v, *v_scale) in caches:
            scales = [(*k_scale, *v_scale)] if k_scale else []
            out = ops.attention(out, k, v, "n p k d", step, SPEC, None, *scales)
            checked = checked or [out[row : row + 1] for row in rows]
        return *checked, out[:1], caches

    return program


def _pool(backend: Backend, numbers: np.ndarray, shape: tuple[int, ...], cache: str | None) -> tuple[Any, np.ndarray]:
    """(what makes a pool of these numbers again and again, with its scales if it has any; what it holds)."""
    if cache is None:
        rounded = numbers.astype(ml_dtypes.bfloat16)
        parts, held = [(rounded, ArraySpec(shape, (None,) * 4))], rounded
    else:
        codes, scale = narrowed(numbers, cache)
        parts = [(codes, ArraySpec(shape, (None,) * 4, cache)), (scale, ArraySpec(shape[:-1], (None,) * 3, "float32"))]
        held = codes * scale[..., None]
    return lambda: tuple(backend.place_repeated(x.reshape(-1), spec) for x, spec in parts), held


def narrowed(x: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes as float32, scales) of keys or values in 8 bits."""
    scale = np.abs(x).max(-1) / (127.0 if cache == "int8" else 448.0)
    codes = x / scale[..., None]
    codes = np.round(codes) if cache == "int8" else codes.astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32), scale.astype(np.float32)


def relative_error(
    out: np.ndarray, queries: np.ndarray, pools: Sequence[np.ndarray], tables: np.ndarray, size: Size
) -> float:
    """Of the rows that are checked, `out`, against float64; `queries` and `pools` as they are repeated."""
    worst = 0.0
    for found, row in zip(out, size.rows, strict=True):
        at = np.arange(size.length - size.count + row + 1)
        k, v = (p[tables[0, at // BLOCK] % REPEATED, at % BLOCK].astype(np.float64) for p in pools)
        scores = np.einsum("kgd,mkd->kgm", queries[row % REPEATED].astype(np.float64), k) * SPEC.scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("kgm,mkd->kgd", weights / weights.sum(-1, keepdims=True), v)
        worst = max(worst, float(np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want)))
    if not worst < FAR:
        raise SystemExit(f"attention alone, {size.name}: relative error {worst}, which must be under {FAR}")
    return round(worst, 5)
