"""Parts of `octavo bench marks` in a process of their own: python -m octavo.engine.bench.marks_worker JOB, as JSON.

Output tokens a second over the wall time of one `generate`; of "prefill", input tokens a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..json_file import read_json
from ..llm import LLM
from ..sampling_params import SamplingParams
from .marks import Results
from .profiling import profile, profiler
from .workloads import CONFIGS, NAMES, workload, write_config

ENGINE = {"max_model_len": 4352, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "warmup": "all"}


def start(backend: str, device: str, model: str, **more: Any) -> LLM:
    """An engine with random weights of this shape: a name of CONFIGS, or a folder with a config.json."""
    folder = write_config(model) if model in CONFIGS else model
    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "backend": backend, "device": device}
    return LLM(folder, **(fixed | ENGINE | more))


def vocab_of(model: str) -> int:
    config = CONFIGS[model] if model in CONFIGS else read_json(Path(model) / "config.json")
    return config["vocab_size"]


def run_workload(llm: LLM, name: str, vocab: int) -> dict[str, float]:
    """Tokens a second of one workload."""
    requests = workload(name, vocab)
    prompts, counts = [p for p, _ in requests], [n for _, n in requests]
    llm.reset_prefix_cache()
    compiles, preemptions = llm.backend.num_compiles(), llm.get_stats().num_preemptions
    started = time.perf_counter()
    outputs = llm.generate(prompts, [_exactly(n) for n in counts], use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(o.outputs[0].token_ids) for o in outputs]
    if made != counts:
        raise RuntimeError(f"{name}: {sum(made)} tokens were made, expected {sum(counts)}")
    tokens = sum(map(len, prompts)) if name == "prefill" else sum(counts)
    return {
        "tok_s": round(tokens / seconds, 1),
        "seconds": round(seconds, 3),
        "compiles": llm.backend.num_compiles() - compiles,
        "preemptions": llm.get_stats().num_preemptions - preemptions,
    }


def _exactly(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def run_identical(vocab: int, make: Callable[..., LLM]) -> dict[str, Any]:
    """Overlapped and synchronous runs of a quarter of the offline workload give the same tokens."""
    requests = workload("offline", vocab)[:256]
    found = []
    for overlap in (True, False):
        llm = make(async_scheduling=overlap, warmup="lazy")
        outputs = llm.generate([p for p, _ in requests], [_exactly(n) for _, n in requests], use_tqdm=False)
        found.append([list(o.outputs[0].token_ids) for o in outputs])
        llm.shutdown()
        del llm
    same = sum(a == b for a, b in zip(*found))
    return {"equal": same == len(requests), "same": same, "of": len(requests)}


def work(job: dict[str, Any]) -> None:
    """The parts of one model, or of none, in this process. `job["began"]`: when it was started, in time.time()."""
    backend, device, model, results = job["backend"], job["device"], job["model"], Results(Path(job["out"]))
    if not model:
        from .marks_checks import CHECKS

        for part in job["parts"]:
            results.put(f"{backend}//{part}", CHECKS[part](backend))
        return
    named, vocab = f"{backend}/{model}/", vocab_of(model)

    def make(**more: Any) -> LLM:
        return start(backend, device, model, **(job["arguments"] | more))

    llm = make()
    # the second process, that of parts that are no workloads, finds what the first has compiled
    warm = named + "startup" in results and not (job["again"] and any(part in NAMES for part in job["parts"]))
    results.put(
        named + ("startup-warm" if warm else "startup"),
        {"seconds": round(time.time() - job["began"], 2), "compiles": llm.backend.num_compiles()},
    )
    if not warm:
        results.put(named + "memory", {"plan": llm.memory_plan.total_bytes, "blocks": llm.memory_plan.num_blocks})
    for part in job["parts"]:
        if part in NAMES:
            results.put(named + part, run_workload(llm, part, vocab))
        elif part == "profile":
            results.put(named + part, profile(llm, vocab))
    if not warm and device != "cpu":
        results.put(named + "memory", results.values[named + "memory"] | {"peak": profiler(backend).peak_memory()})
    if "identical" in job["parts"]:
        llm.shutdown()
        del llm
        # two engines, one behind the other, beside whatever the first has left on a GPU
        room = {} if device == "cpu" else {"kv_cache_memory_bytes": 2**33}
        results.put(named + "identical", run_identical(vocab, lambda **more: make(**(room | job["arguments"] | more))))


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
