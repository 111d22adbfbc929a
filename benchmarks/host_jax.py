"""What a steady decode step costs the host on the JAX path: programs take and return all arrays, and compute nothing.

    python benchmarks/host_jax.py [--requests 1 64] [--layers 28] [--real qwen3-0.6b]

The engine's way for one GPU, on whatever device JAX has: on a CPU processor time of all threads, on a GPU wall time.
Each of two generates of different lengths, by steps: admissions drop out. Then the medians of a step's parts in wall
time. "direct" is how programs are called (engine/direct_jax.py), "jit" how JAX calls them. `--real`: a model's own
programs, compiled lazily; where `result`, which waits for the device, is not small, the host is not what counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from octavo.engine import LLM, SamplingParams, backend_jax, narrow_jax, runner, saved_jax
from octavo.engine.bench.marks_worker import start
from octavo.engine.intake import Intake
from octavo.engine.scheduler import Scheduler
from octavo.models import llama, qwen3
from octavo.models.interface import CacheState, Output, Sampling

SHORT, LONG = 40, 240  # tokens of a request
SEQS = 64


def _touched(*trees: Any) -> Any:
    """A number for which every array is read."""
    return sum(x[(0,) * x.ndim].astype(jnp.int32) for x in jax.tree.leaves(trees))


def nothing(*xs: Any, ops: Any, outs: tuple[str, ...], at: int, name: str) -> Any:
    """As forward, head and both in one, but for what they compute."""
    state, number = xs[at], _touched(xs)
    rows = state.rows if isinstance(state, CacheState) else state
    if "rows" in outs or name == "forward_and_head":
        rows = rows | {"tokens": rows["tokens"].at[0, 0].set(number & 7)}
    if name != "head":
        rows = rows | {"num_computed": rows["num_computed"] + (number & 1)}
    sampling = next((x for x in xs if isinstance(x, Sampling)), None)
    made = {
        "hidden": lambda: jnp.zeros((SEQS, 8)) + number,
        "rows_of_all": dict,
        "output": lambda: Output(jnp.full_like(sampling.rows_R, 7) + (number & 0)),  # type: ignore[union-attr]
        "cache": lambda: CacheState(state.groups, rows),
        "rows": lambda: rows,
    }
    return tuple(made[out]() for out in outs)


class NoDevice(backend_jax.JaxBackend):
    """The backend of one GPU, whose programs of a step compute nothing."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.lean, self.joined_seqs = True, SEQS

    def compile(self, fn: Any, args: tuple[str, ...], outs: tuple[str, ...], consumes: str) -> Any:
        name = getattr(fn, "func", fn).__name__
        if name in ("forward", "forward_all", "forward_and_head", "head"):
            fn = partial(nothing, outs=outs, at=args.index(consumes), name=name)
        return super().compile(fn, args, outs, consumes)


def timed(found: dict[str, list[float]], name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return fn(*args)
        finally:
            found.setdefault(name, []).append(time.perf_counter() - began)

    return call


def engine(layers: int) -> LLM:
    backend_jax.JaxBackend = NoDevice  # type: ignore[misc]
    model = llama.LlamaConfig(
        vocab_size=1000, embed_dim=8, mlp_dim=8, num_layers=layers, num_heads=1, num_kv_heads=1,
        # one that the GPU's kernels take
        head_dim=8 if jax.default_backend() == "cpu" else 128, max_model_len=4352,
    )  # fmt: skip
    return LLM(
        qwen3.spec(model), load_format="dummy", skip_tokenizer_init=True, backend="jax", max_model_len=4352,
        max_num_seqs=SEQS, max_num_batched_tokens=8192, num_gpu_blocks_override=24 * SEQS, dtype="float32",
    )  # fmt: skip


def through_jit(compiled: Any) -> Callable[[list[Any]], Any]:
    return lambda leaves: compiled(*compiled.in_tree.unflatten(leaves)[0])


def keep_both(way: list[str]) -> None:
    """Has programs called the way that is named last."""
    calls = {"direct": narrow_jax.direct, "jit": through_jit}

    def keep(self: saved_jax.Held, kind: Any, compiled: Any, notes: Any) -> None:
        made = {}
        for name, call in calls.items():
            narrow_jax.direct = call
            made[name] = self.program.bound(compiled, notes)
        self.ready[kind] = lambda args: made[way[-1]](args)

    saved_jax.Held._keep = keep  # type: ignore[method-assign]


def measure(llm: LLM, requests: int) -> dict[str, int]:
    """Microseconds a steady step, and the medians of its parts."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    prompts = [[110 + i % 700, 100 + i // 700, *range(100, 130)] for i in range(requests)]

    def generate(length: int) -> float:
        llm.reset_prefix_cache()
        began = clock()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), use_tqdm=False)
        return clock() - began

    generate(LONG)
    shorter, longer = (min(generate(n) for _ in range(3)) for n in (SHORT, LONG))
    found: dict[str, list[float]] = {}
    parts = [
        (Scheduler, "schedule"),
        (Scheduler, "update"),
        (runner.Runner, "_inputs"),
        (runner.Pending, "result"),
        (type(llm.backend), "prefetch"),
        (Intake, "read_oldest"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in parts]
    own = llm.runner.forward_and_head
    for owner, name, fn in before:
        setattr(owner, name, timed(found, name, fn))
    llm.runner.forward_and_head = timed(found, "the call", own)
    collections: list[float] = []
    gc.callbacks.append(lambda phase, info: collections.append(time.perf_counter() * (1 if phase == "stop" else -1)))
    generate(LONG)
    gc.callbacks.pop()
    llm.runner.forward_and_head = own
    for owner, name, fn in before:
        setattr(owner, name, fn)
    step = (longer - shorter) / (LONG - SHORT)
    whole = {"step": round(step * 1e6), "of it garbage": round(sum(collections) / LONG * 1e6)}
    return whole | {name: round(statistics.median(x) * 1e6) for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--real", metavar="MODEL", default="")
    args = parser.parse_args()
    way: list[str] = ["direct"]
    keep_both(way)
    more = {"warmup": "lazy", "kv_cache_memory_bytes": 2**33}
    llm = start("jax", "auto", args.real, **more) if args.real else engine(args.layers)
    found = {}
    for n in args.requests:
        for name in ("jit", "direct"):
            way.append(name)
            found[f"{n} sequences, {name}"] = row = measure(llm, n)
            print(f"{n} sequences, {name}:", ", ".join(f"{what} {us} us" for what, us in row.items()), flush=True)
    about = {"device": jax.devices()[0].device_kind, "real": args.real, "jax": jax.__version__}
    folder = Path(os.environ.get("OUT", Path(__file__).parent))
    (folder / f"host_jax{args.real and '_real'}.json").write_text(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
