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


def run_identical(llm: LLM, vocab: int) -> dict[str, Any]:
    """Overlapped and synchronous runs of a quarter of the offline workload give the same tokens."""
    requests, found = workload("offline", vocab)[:256], []
    prompts, params = [p for p, _ in requests], [_exactly(n) for _, n in requests]
    before = llm.max_unread
    # all that async_scheduling says to an engine: how many steps are launched before the oldest is read
    for most in (2, 1):
        llm.max_unread = most
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(o.outputs[0].token_ids) for o in outputs])
    llm.max_unread = before
    same = sum(a == b for a, b in zip(*found))
    return {"equal": same == len(requests), "same": same, "of": len(requests)}


def work(job: dict[str, Any]) -> None:
    """The parts of one model, or of none, in this process.

    `job["began"]`: when it was started, in time.time(); `job["startup"]`: by which name that is told, None: not at all.
    """
    backend, device, model, results = job["backend"], job["device"], job["model"], Results(Path(job["out"]))
    if not model:
        for part in job["parts"]:
            results.put(f"{backend}//{part}", _without_model(part)(backend))
        return
    named, vocab = f"{backend}/{model}/", vocab_of(model)
    llm = start(backend, device, model, **job["arguments"])
    seconds = round(time.time() - job["began"], 2)
    if job["startup"]:
        results.put(named + job["startup"], {"seconds": seconds, "compiles": llm.backend.num_compiles()})
    for part in job["parts"]:
        if part in NAMES:
            results.put(named + part, run_workload(llm, part, vocab))
        elif part == "profile":
            results.put(named + part, profile(llm, vocab))
        else:
            results.put(named + part, run_identical(llm, vocab))
    if any(part in NAMES for part in job["parts"]):
        memory = {"plan": llm.memory_plan.total_bytes, "blocks": llm.memory_plan.num_blocks}
        peak = {} if device == "cpu" else {"peak": profiler(backend).peak_memory()}
        results.put(named + "memory", memory | peak)


def _without_model(part: str) -> Callable[[str], Any]:
    if part == "check":
        from .marks_checks import check

        return check
    from .marks_attention import attention

    return attention


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
