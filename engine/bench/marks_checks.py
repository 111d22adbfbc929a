"""Parts of `octavo bench marks` without a benchmark's model, on a GPU: is it right, and how fast is attention alone."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np

from ...models import llama
from ...models.interface import ArraySpec, AttentionSpec, ModelSpec, Step, map_tree
from ..backend import get_backend
from ..llm import LLM
from ..sampling_params import SamplingParams
from .steps import make_step

BLOCK, HEADS, GROUP, DIM = 16, 8, 4, 128
SPEC = AttentionSpec(HEADS, GROUP, DIM, DIM, DIM**-0.5)
SMALL = llama.LlamaConfig(
    vocab_size=512, embed_dim=64, mlp_dim=128, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16,
    max_model_len=512, windows=(None, 24, None),
)  # fmt: skip
# name: (sequences, tokens each), and FlashAttention-3's GB/s or TFLOP/s there
DECODE = {
    "decode 1 x 8192": (1, 8192, 821),
    "decode 1 x 32768": (1, 32768, 2454),
    "decode 8 x 8192": (8, 8192, 3212),
    "decode 16 x 4096": (16, 4096, 3245),
    "decode 64 x 4096": (64, 4096, 4068),
    "decode 256 x 1024": (256, 1024, 3770),
}
# the int8 layout is to be 1.6 times as fast as bfloat16 at this size
NARROW = {"decode 64 x 4096 int8": (64, 4096, "int8"), "decode 64 x 4096 fp8": (64, 4096, "float8_e4m3fn")}
PREFILL = {"prefill 1 x 4096": (1, 4096, 575), "prefill 2 x 4096": (2, 4096, 542), "prefill 1 x 16384": (1, 16384, 603)}
ROUNDS = 10
REPEATED = 1031  # blocks of different numbers; a prime


def check(backend: str) -> dict[str, Any]:
    """Greedy fp32 tokens of a small random model on the GPU are those of the CPU, in both layouts; raises if not."""
    model = llama.spec(SMALL)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, n).tolist() for n in (1, 7, 40, 130, 9, 64, 3, 200)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    weights = random_weights(model)

    def tokens(on: str, device: str, **more: Any) -> list[list[int]]:
        llm = LLM(model, weights=weights, backend=on, device=device, dtype="float32", max_num_seqs=6,
                  max_num_batched_tokens=96, num_gpu_blocks_override=60, max_model_len=256, **more)  # fmt: skip
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    want = tokens("torch", "cpu")
    found = {}
    for name, more in (
        ("token_major", {}),
        ("head_major", {"layout": "head_major"}),
        ("warm", {"warmup": "all"}),
        ("eager", {"enforce_eager": True}),
        ("synchronous", {"async_scheduling": False}),
    ):
        found[name] = tokens(backend, "cuda", **more) == want
    if not all(found.values()):
        raise SystemExit(f"tokens on the GPU are not the CPU's: {found}")
    return found


def random_weights(model: ModelSpec) -> Any:
    rng = np.random.default_rng(1)

    def leaf(spec: ArraySpec, source: Any) -> np.ndarray:
        if spec.init == "host":
            return source
        x = np.ones(spec.shape) if spec.init == "ones" else rng.normal(0, 0.2, spec.shape)
        return x.astype(np.float32)

    return map_tree(leaf, model.weights, model.checkpoint)


def attention(backend: str) -> dict[str, Any]:
    """GB/s of decode (keys and values read once) and TFLOP/s of causal prefill, each checked against float64 first."""
    runner = get_backend(
        backend, {"device": "cuda", "dtype": "bfloat16"} if backend == "torch" else {"dtype": "bfloat16"}
    )
    found = {}
    for name, (seqs, length, fa3) in DECODE.items():
        seconds, error = measure(runner, seqs, length, decode=True)
        size = seqs * length * HEADS * DIM * 2 * 2
        found[name] = {"rate": round(size / seconds / 1e9), "unit": "GB/s", "fa3": fa3, "error": error}
    for name, (seqs, length, cache) in (NARROW if backend == "torch" else {}).items():
        seconds, error = measure(runner, seqs, length, decode=True, cache=cache)
        size = seqs * length * HEADS * (DIM + 4) * 2
        found[name] = {"rate": round(size / seconds / 1e9), "unit": "GB/s", "fa3": "-", "error": error}
        found[name]["us"] = round(seconds * 1e6, 1)
    for name, (seqs, length, fa3) in PREFILL.items():
        seconds, error = measure(runner, seqs, length, decode=False)
        work = 2 * seqs * length**2 * HEADS * GROUP * DIM
        found[name] = {"rate": round(work / seconds / 1e12), "unit": "TFLOP/s", "fa3": fa3, "error": error}
    return found


def measure(backend: Any, seqs: int, length: int, decode: bool, cache: str | None = None) -> tuple[float, float]:
    """Seconds of one attention op, and the relative error of one of its rows against float64.

    `cache` is "int8" or "float8_e4m3fn", with scales; None: bfloat16.

    A program holds several ops, each with a cache of its own, so that none is read from a processor's cache.
    """
    width = -(-length // BLOCK)
    count = 1 if decode else length
    layers = max(2, min(32, int(6e9 / (seqs * length * HEADS * DIM * 4)))) if decode else 2
    tables = np.random.default_rng(0).permutation(seqs * width).reshape(seqs, width).astype(np.int32) + 1
    step = make_step(backend, tables, [length - count] * seqs, [count] * seqs, BLOCK)
    rng = np.random.default_rng(1)
    small = [rng.standard_normal((REPEATED, BLOCK, HEADS, DIM), np.float32) for _ in "kv"]
    shape = (seqs * width + 1, BLOCK, HEADS, DIM)

    def pool(x: np.ndarray) -> Any:
        return backend.place_repeated(x.astype(ml_dtypes.bfloat16).reshape(-1), ArraySpec(shape, (None,) * 4))

    def narrow(codes: np.ndarray, scale: np.ndarray) -> tuple[Any, Any]:
        specs = ArraySpec(shape, (None,) * 4, cache), ArraySpec(shape[:-1], (None,) * 3, "float32")
        return tuple(backend.place_repeated(x.reshape(-1), spec) for x, spec in zip((codes, scale), specs))

    def place(x: np.ndarray) -> Any:
        return backend.place(x, ArraySpec(x.shape, (None,) * x.ndim))

    # the layers' pools differ in memory, not in numbers: that is enough for the caches of the chip
    if cache is None:
        held = [x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in small]
        caches = [(pool(small[0]), pool(small[1])) for _ in range(layers)]
    else:
        coded = [narrowed(x, cache) for x in small]
        held = [codes.astype(np.float64) * scale[..., None] for codes, scale in coded]
        caches = []
        for _ in range(layers):
            (k, k_scale), (v, v_scale) = (narrow(*x) for x in coded)
            caches.append((k, v, (k_scale, v_scale)))
    q = rng.standard_normal((seqs * count, HEADS, GROUP, DIM), np.float32)

    def program(caches: list, q: Any, step: Step, *, ops: Any) -> tuple:
        ops, out = ops.for_step([step]), q
        for k, v, *scales in caches:
            out = ops.attention(q, k, v, "n p k d", step, SPEC, None, *scales)
        return out, caches

    def chained(caches: list, q: Any, step: Step, *, ops: Any) -> tuple:
        ops, out = ops.for_step([step]), q
        # each op's output is the next one's query, so that none is left out or moved
        for k, v, *scales in caches:
            out = ops.attention(out, k, v, "n p k d", step, SPEC, None, *scales)
        # all of it would take the host longer to read than the device to compute
        return out[:1], caches

    once = backend.compile(program, ("caches", "q", "step"), ("out", "caches"), consumes="caches")
    out, caches = once(caches, place(q), step)
    error = relative_error(backend.read(out), q, held, tables, length, count)
    run = backend.compile(chained, ("caches", "q", "step"), ("out", "caches"), consumes="caches")
    placed = place(q)
    for _ in range(3):
        out, caches = run(caches, placed, step)
    backend.read(out)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(ROUNDS):
            out, caches = run(caches, placed, step)
        backend.read(out)
        best = min(best, (time.perf_counter() - started) / ROUNDS / layers)
    return best, error


def narrowed(x: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes as float32, scales) of keys or values in 8 bits."""
    scale = np.abs(x).max(-1) / (127.0 if cache == "int8" else 448.0)
    codes = x / scale[..., None]
    codes = np.round(codes) if cache == "int8" else codes.astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32), scale.astype(np.float32)


def relative_error(out: np.ndarray, q: np.ndarray, pools: Any, tables: np.ndarray, length: int, count: int) -> float:
    """Of the last row of the first sequence, and of one in its middle, against float64; `pools` as they are held."""
    worst = 0.0
    for row in {count - 1, count // 2}:
        position = length - count + row
        at = np.arange(position + 1)
        k, v = (p[tables[0, at // BLOCK] % REPEATED, at % BLOCK] for p in pools)
        query = q[row].astype(ml_dtypes.bfloat16).astype(np.float64)
        scores = np.einsum("kgd,mkd->kgm", query, k) * SPEC.scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("kgm,mkd->kgd", weights / weights.sum(-1, keepdims=True), v)
        worst = max(worst, float(np.linalg.norm(out[row].astype(np.float64) - want) / np.linalg.norm(want)))
    if not worst < 1e-2:
        raise SystemExit(f"attention over {tables.shape[0]} x {length}: relative error {worst}")
    return round(worst, 5)


CHECKS = {"check": check, "attention": attention}
