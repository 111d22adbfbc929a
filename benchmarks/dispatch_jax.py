"""What a decode step costs the host on JAX, and what XLA's options make of it: one line a variant, as they come.

    python benchmarks/dispatch_jax.py --model qwen3-0.6b [--cases "two/default 64" "one/cublas 2" "prefill/cublas 4096"]

A case is how the step is cut, how it is compiled, and for how many sequences. "two": forward and head as the engine
calls them; "one": both in one program; "prefill": a full budget of sequences of that length. `host` is the time in the
calls, `wall` a step's, tokens read one step behind; `places` how many addresses the outputs had: each new one makes XLA
rewrite nodes of its CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.bench.marks_worker import start
from octavo.engine.bench.profile_jax import events
from octavo.engine.bench.profiling import busiest
from octavo.engine.bench.workloads import CONFIGS

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
PDL = {"xla_gpu_enable_pdl": True, "xla_gpu_enable_pdl_launch": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cublas": CUBLAS | {"xla_gpu_autotune_level": 0},
    "cublas-tuned": CUBLAS,
    "triton": {"xla_gpu_autotune_level": 0},
    "pdl": CUBLAS | {"xla_gpu_autotune_level": 0} | PDL,
    "concurrent": CUBLAS | {"xla_gpu_autotune_level": 0, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
    "plain": CUBLAS | {"xla_gpu_autotune_level": 0, "xla_gpu_graph_min_graph_size": 1000000},
}
CONTEXT, BLOCKS = 200, 32  # tokens of a sequence at first, and blocks that it may fill


class Bench:
    """An engine's weights and cache, and programs of our own over them."""

    def __init__(self, llm: Any):
        self.runner, self.ops, self.layout = llm.runner, llm.backend.ops, llm.config.layout

    def state(self) -> Any:
        """The cache with all rows at the same context."""
        import jax.numpy as jnp

        cache = self.runner.cache
        computed = jnp.full_like(cache.rows["num_computed"], CONTEXT)
        return replace(cache, rows=cache.rows | {"num_computed": computed})

    def inputs(self, cut: str, seqs: int) -> Any:
        from octavo.models.interface import Sampling, StepInput

        r, width = self.runner, self.runner.shapes.widths[-1]
        tables = np.zeros((seqs, width), np.int32)
        tables[:, :BLOCKS] = 1 + np.arange(seqs * BLOCKS).reshape(seqs, BLOCKS)
        rows = np.arange(seqs, dtype=np.int32)
        if cut == "prefill":
            # a step's budget in sequences of so many tokens
            length, most = seqs, r.scratch
            count, budget = r.shapes.tokens[-1] // length, r.shapes.tokens[-1] // length * length
            starts = np.minimum(np.arange(most + 1) * length, budget).astype(np.int32)
            tables, blocks = np.zeros((most, width), np.int32), -(-length // self.layout.block_size)
            tables[:count, :blocks] = 1 + np.arange(count * blocks).reshape(count, blocks)
            rows = np.arange(most, dtype=np.int32)
            return StepInput(rows, starts, (tables,) * len(r.tables), r.shapes.tokens[-1], False), None
        step = StepInput(rows, np.arange(seqs + 1, dtype=np.int32), (tables,) * len(r.tables), seqs, True)
        return step, Sampling(rows, rows, "greedy")

    def programs(self, cut: str, options: dict[str, Any]) -> list[Any]:
        """The jitted programs of a cut; each takes what `run` gives it."""
        import jax

        from octavo.models import step

        r = self.runner
        given = {"ops": self.ops, "model": r.model, "layout": self.layout, "max_num_seqs": r.scratch}
        forward = partial(step.forward, **given)
        head = partial(step.head, ops=self.ops, model=r.model)

        def both(weights: Any, cache: Any, inputs: Any, sampling: Any) -> Any:
            hidden, cache = forward(weights, cache, inputs)
            output, rows = head(weights, cache.rows, hidden, sampling)
            return output, step.with_rows(cache, rows)

        jit = partial(jax.jit, donate_argnums=1, compiler_options=options or None)
        if cut == "prefill":
            return [jit(partial(step.forward_all, **given))]
        return [jit(both)] if cut == "one" else [jit(forward), jit(head)]

    def lowered(self, cut: str, options: dict[str, Any], seqs: int) -> list[Any]:
        step, sampling = self.inputs(cut, seqs)
        w, cache, programs = self.runner.weights, self.runner.cache, self.programs(cut, options)
        if cut == "one":
            return [programs[0].lower(w, cache, step, sampling)]
        if cut == "prefill":
            return [programs[0].lower(w, cache, step)]
        hidden = np.zeros((self.runner.scratch, w["final_norm"].shape[0]), w["final_norm"].dtype)
        few = {name: x for name, x in w.items() if name != "layers"}
        return [programs[0].lower(w, cache, step), programs[1].lower(few, cache.rows, hidden, sampling)]

    def run(self, cut: str, compiled: list[Any], seqs: int, steps: int) -> dict[str, Any]:
        """Microseconds a step, in the calls and in all."""
        import jax

        from octavo.models.step import with_rows

        if cut == "prefill":
            return self.run_prefill(compiled[0], seqs)
        w, (step, sampling) = self.runner.weights, jax.device_put(self.inputs(cut, seqs))
        few = {name: x for name, x in w.items() if name != "layers"}
        host, places, previous = [0.0, 0.0], [set(), set()], None
        cache = self.state()
        del self.runner.cache
        for i in range(steps + 8):
            if i == 8:
                jax.block_until_ready(cache.rows["tokens"])
                host, began = [0.0, 0.0], time.perf_counter()
            t0 = time.perf_counter()
            if cut == "one":
                output, cache = compiled[0](w, cache, step, sampling)
                t1 = time.perf_counter()
            else:
                hidden, cache = compiled[0](w, cache, step)
                t1 = time.perf_counter()
                output, rows = compiled[1](few, cache.rows, hidden, sampling)
                cache = with_rows(cache, rows)
                places[0].add(hidden.unsafe_buffer_pointer())
                del hidden
            host[0] += t1 - t0
            host[1] += time.perf_counter() - t1
            output.token_ids_R.copy_to_host_async()
            places[1].add(output.token_ids_R.unsafe_buffer_pointer())
            if previous is not None:
                np.asarray(previous)
            previous = output.token_ids_R
        np.asarray(previous)
        wall = time.perf_counter() - began
        self.runner.cache = cache
        us = [round(x / steps * 1e6) for x in (wall, *host)]
        return {"wall": us[0], "host": us[1:], "places": [len(p) for p in places]}

    def run_prefill(self, compiled: Any, length: int) -> dict[str, Any]:
        """Microseconds of one step, the best of five."""
        import jax
        import jax.numpy as jnp

        w, (step, _) = self.runner.weights, jax.device_put(self.inputs("prefill", length))
        cache, taken = self.runner.cache, []
        del self.runner.cache
        for _ in range(6):
            cache = replace(cache, rows=cache.rows | {"num_computed": jnp.zeros_like(cache.rows["num_computed"])})
            jax.block_until_ready(cache.rows["num_computed"])
            began = time.perf_counter()
            last, _, cache = compiled(w, cache, step)
            jax.block_until_ready((last, cache))
            taken.append(time.perf_counter() - began)
        self.runner.cache = cache
        best = min(taken[1:])
        return {"wall": round(best * 1e6), "tok_s": round(self.runner.shapes.tokens[-1] / best)}


def measure(bench: Bench, names: list[str], steps: int, profiled: list[str]) -> dict[str, Any]:
    """Every case. What is not tuned is compiled at once, the rest one by one."""
    found, waiting = {}, {}
    pool = ThreadPoolExecutor(12)

    def options(name: str) -> dict[str, Any]:
        return OPTIONS[name.split()[0].split("/")[1]]

    for name in names:
        cut = name.split("/")[0]
        lowered = bench.lowered(cut, options(name), int(name.split()[1]))
        if "xla_gpu_autotune_level" in options(name):
            waiting[name] = [pool.submit(x.compile) for x in lowered]
        else:
            waiting[name] = lowered
    for jobs in waiting.values():
        for job in jobs:
            if hasattr(job, "result"):
                job.exception()
    for name in names:
        began = time.perf_counter()
        try:
            compiled = [x.result() if hasattr(x, "result") else x.compile() for x in waiting[name]]
            seconds = round(time.perf_counter() - began, 2)
            found[name] = bench.run(name.split("/")[0], compiled, int(name.split()[1]), steps) | {"compile_s": seconds}
            if name in profiled:
                run: Callable[[], Any] = partial(bench.run, name.split("/")[0], compiled, int(name.split()[1]), 8)
                found[name]["profile"] = busiest(events(run), 6 if name.startswith("prefill") else 16)
        # an option that this XLA does not know, or a program too large
        except (RuntimeError, ValueError) as error:
            found[name] = {"error": str(error)[:300]}
            bench.runner.reset()
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", default=["two/default 64", "two/cublas 64", "one/cublas 64"])
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    llm = start("jax", args.device, args.model, warmup="lazy", kv_cache_memory_bytes=2**33)
    print(f"engine after {time.perf_counter() - began:.1f} s", flush=True)
    found = measure(Bench(llm), args.cases, args.steps, args.profile)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
