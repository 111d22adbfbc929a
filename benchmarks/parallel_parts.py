"""What parallel_h200.py runs, each part in a process of its own: engines over two devices, right, hurt, or timed.

A part prints lines of JSON. A timed one says that it is ready, and measures the workloads named on stdin, one a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from dataclasses import dataclass, field
from typing import Any

from octavo.engine import LLM, SamplingParams
from octavo.engine.bench.workloads import CONFIGS, LLAMA, QWEN3_MOE, workload
from octavo.engine.errors import DivergenceError, RankLostError

GIB = 2**30
SHAPE: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 2048, "torch_dtype": "float32", "eos_token_id": 1, "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
SMALL = {
    "small": LLAMA | SHAPE,
    "small-moe": QWEN3_MOE | SHAPE | EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
# so little of everything that prompts come in chunks and somebody is preempted
TIGHT = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40,
    "state_check_interval": 16,
}  # fmt: skip
ROOM = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
PP, DP, TP = ({f"{name}_parallel_size": 2} for name in ("pipeline", "data", "tensor"))
EP, SP, ROUTED = {"enable_expert_parallel": True}, {"enable_sp": True}, {"enable_return_routed_experts": True}
ALL = {"warmup": "all"}


@dataclass(frozen=True)
class Part:
    """`does` names what is done with the engine: "equal", "fails", "lost", "diverges" or "timed"."""

    name: str
    backend: str
    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    does: str = "equal"
    work: tuple[str, ...] = ()  # workloads, of a timed one
    cache: int = 0  # GiB a device, of a timed one
    gpu: str = ""  # the only one that it sees
    late: bool = False  # without early launches, which meet NCCL in graphs

    @property
    def like(self) -> str:
        """The part that has the same requests, on one device."""
        return f"{self.backend} {self.model}"


def _equal(backend: str) -> list[Part]:
    """In order of worth; what others are compared with comes first."""
    dense, moe = f"{backend} small", f"{backend} small-moe"
    return [
        Part(dense, backend, "small"),
        Part(moe, backend, "small-moe", ROUTED),
        Part(f"{dense} pp 2", backend, "small", PP),
        Part(f"{dense} dp 2", backend, "small", DP),
        Part(f"{moe} dp 2 ep", backend, "small-moe", DP | EP),
        Part(f"{moe} tp 2 ep", backend, "small-moe", TP | EP),
        Part(f"{moe} pp 2 routed", backend, "small-moe", PP | ROUTED),
    ]


WORK = ("decode-1", "decode-64", "offline")
TIMED = (
    Part("torch llama-8b tp 2", "torch", "llama-8b", TP, "timed", WORK, 16),
    Part("torch llama-8b pp 2", "torch", "llama-8b", PP, "timed", WORK, 16),
    Part("torch llama-8b dp 2", "torch", "llama-8b", DP, "timed", WORK, 16),
    Part("jax qwen3-0.6b tp 2", "jax", "qwen3-0.6b", TP, "timed", WORK[:2], 8),
)
DIVERGING = Part("torch small tp 2 diverging", "torch", "small", TP, "diverges")
# only if they are named
SPARE = (
    *(Part(f"{backend} small tp 2 sp", backend, "small", TP | SP) for backend in ("torch", "jax")),
    Part("torch small pp 2 failed step", "torch", "small", PP, "fails"),
    Part("torch small pp 2 killed", "torch", "small", PP, "lost"),
    Part("torch small tp 2 late", "torch", "small", TP, late=True),
    Part("torch small pp 2 warm", "torch", "small", PP | ALL),
    Part("torch small-moe dp 2 ep warm", "torch", "small-moe", DP | EP | ALL),
    Part("torch llama-8b", "torch", "llama-8b", {}, "timed", WORK, 30, gpu="1"),
    Part("torch qwen3-30b-a3b tp 2 ep", "torch", "qwen3-30b-a3b", TP | EP, "timed", WORK[:2], 4),
    Part("torch qwen3-30b-a3b", "torch", "qwen3-30b-a3b", {}, "timed", WORK[:2], 4, gpu="0"),
    Part("torch llama-8b tp 2 late", "torch", "llama-8b", TP, "timed", WORK[:2], 4, late=True),
)
# in order of worth; timed ones start beside the last of the others, and measure alone
USUAL = (*_equal("torch"), *_equal("jax"), *TIMED, DIVERGING)
PARTS = {part.name: part for part in (*USUAL, *SPARE)}


def put(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def engine(part: Part, device: str, folder: str, **more: Any) -> LLM:
    """Random weights of the part's shape."""
    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "backend": part.backend, "device": device}
    if part.late:
        from late import LATE

        fixed["logits_processors"] = [LATE]
    return LLM(folder, **fixed, **part.arguments, **more)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def small_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 5 to 115 tokens, greedy; then four that are sampled twice each."""
    prompts = [p for p, _ in workload("decode-64", SHAPE["vocab_size"])[:16]]
    lengths = (*range(5, 125, 10), 20, 40, 60, 80)
    random = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=32, ignore_eos=True)
    return [p[:n] for p, n in zip(prompts, lengths, strict=True)], [greedy(48)] * 12 + [random] * 4


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(o.token_ids) for each in outputs for o in each.outputs]


def equal(part: Part, device: str, folder: str) -> None:
    """Tokens of requests asked twice, so that the second time there are hits; and of some greedy ones the logprobs."""
    began = time.perf_counter()
    llm = engine(part, device, folder, dtype="float32", **TIGHT)
    ready, compared = time.perf_counter() - began, count_comparisons(llm)
    prompts, params = small_requests()
    rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    told = llm.generate(prompts[:12], greedy(48, logprobs=0), use_tqdm=False)
    experts = [o.outputs[0].routed_experts for o in told]
    put(
        tokens=[x for outputs in rounds for x in ids(outputs)],
        told=ids(told),
        logprobs=[o.outputs[0].cumulative_logprob for o in told],
        routed=[zlib.crc32(x.tobytes()) for x in experts if x is not None] if "routed" in _has(part) else None,
        preemptions=sum(r.scheduler.num_preemptions for r in llm.replicas),
        hits=sum(r.scheduler.num_hit_tokens for r in llm.replicas),
        replicas=[r.scheduler.num_hit_tokens for r in llm.replicas],
        compared=len(compared),
        compiles=llm.backend.num_compiles(),
        ready=round(ready, 1),
        seconds=round(time.perf_counter() - began, 1),
    )
    llm.shutdown()


def _has(part: Part) -> tuple[str, ...]:
    return ("routed",) if "enable_return_routed_experts" in part.arguments else ()


def count_comparisons(llm: LLM) -> list[Any]:
    """What will hold the digests of rank 0 that others are compared with."""
    found: list[Any] = []
    team = getattr(llm.runner, "team", None)
    if team is not None:
        compare = team.compare
        team.compare = lambda digest: (found.append(digest), compare(digest))
    return found


def fails(part: Part, device: str, folder: str) -> None:
    """A head that fails in the last stage alone: its requests end, and the next ones have their tokens."""
    llm = engine(part, device, folder, dtype="float32", **TIGHT)
    prompts, params = small_requests()
    before = ids(llm.generate(prompts, params, use_tqdm=False))
    runner: Any = llm.runner
    left = [5]

    def head_of(variant: str) -> Any:
        left[0] -= 1
        if not left[0]:
            del runner.head_of
            raise RuntimeError("planted")
        return type(runner).head_of(runner, variant)

    runner.head_of = head_of
    said = "nothing was raised"
    try:
        llm.generate(prompts, params, use_tqdm=False)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    began = time.perf_counter()
    after = ids(llm.generate(prompts, params, use_tqdm=False))
    put(said=said, same=sum(a == b for a, b in zip(before, after, strict=True)), of=len(before),
        seconds=round(time.perf_counter() - began, 2))  # fmt: skip
    llm.shutdown()


def lost(part: Part, device: str, folder: str) -> None:
    """A rank killed while it computes; then another engine."""
    llm = engine(part, device, folder, dtype="float32", **TIGHT)
    prompts, params = small_requests()
    before = ids(llm.generate(prompts, params, use_tqdm=False))
    assert llm.team and llm.team.peers[0].child
    pid, killed = llm.team.peers[0].child.pid, []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.1, kill).start()
    until, said = time.perf_counter() + 30, "nothing was raised"
    try:
        while time.perf_counter() < until:
            llm.generate(prompts, params, use_tqdm=False)
    except (RankLostError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    put(said=said, seconds=round(time.perf_counter() - killed[0], 2))
    llm.shutdown()
    after = ids(engine(part, device, folder, dtype="float32", **TIGHT).generate(prompts, params, use_tqdm=False))
    put(same=sum(a == b for a, b in zip(before, after, strict=True)), of=len(before))


def diverges(part: Part, device: str, folder: str) -> None:
    """Rank 0 has other tokens from some step on."""
    import torch

    llm = engine(part, device, folder, dtype="float32", **TIGHT)
    prompts, params = small_requests()
    llm.generate(prompts, params, use_tqdm=False)
    with torch.inference_mode():
        llm.runner.cache.rows["tokens"][:, :2] += 1
    began, said = time.perf_counter(), "nothing was raised"
    try:
        llm.generate(prompts[:1], greedy(100), use_tqdm=False)
    except DivergenceError as error:
        said = f"{type(error).__name__}: {error}"
    put(said=said, seconds=round(time.perf_counter() - began, 2))


def timed(part: Part, device: str, folder: str) -> None:
    """Tokens a second of workloads it is asked for. Each was run before, so that all it needs is compiled, recorded."""
    on_gpu = device != "cpu"
    began = time.perf_counter()
    more: dict[str, Any] = {"kv_cache_memory_bytes": part.cache * GIB if on_gpu else 2**26}
    more |= {} if on_gpu else {"dtype": "float32"}
    llm = engine(part, device, folder, **ROOM, **more)
    built, vocab = time.perf_counter() - began, llm.model.vocab_size
    for name in part.work:
        llm.generate(*requests(name, vocab, on_gpu, None if name == "offline" else 4), use_tqdm=False)
    put(ready=round(time.perf_counter() - began, 1), built=round(built, 1), weights=llm.memory_plan.weights_bytes)
    for line in sys.stdin:
        measure(llm, line.strip(), on_gpu)
    llm.shutdown()


def measure(llm: LLM, name: str, on_gpu: bool) -> None:
    prompts, params = requests(name, llm.model.vocab_size, on_gpu)
    llm.reset_prefix_cache()
    compiles, preemptions = llm.backend.num_compiles(), llm.get_stats().num_preemptions
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    put(work=name, tok_s=round(made / seconds, 1), seconds=round(seconds, 3), tokens=made,
        compiles=llm.backend.num_compiles() - compiles,
        preemptions=llm.get_stats().num_preemptions - preemptions)  # fmt: skip


def requests(name: str, vocab: int, on_gpu: bool, most: int | None = None) -> tuple[list[list[int]], list[Any]]:
    """Those of a workload, as `octavo bench marks` has them; of "offline" a quarter. `most`: tokens of each."""
    found = workload(name, vocab)[: 256 if on_gpu else 4]
    counts = [min(n, most or n, n if on_gpu else 8) for _, n in found]
    return [p for p, _ in found], [greedy(n) for n in counts]


DOES = {"equal": equal, "fails": fails, "lost": lost, "diverges": diverges, "timed": timed}


def run(name: str, device: str, folder: str) -> None:
    """One part; ends the process, whatever NCCL still waits for."""
    status = 0
    try:
        DOES[PARTS[name].does](PARTS[name], device, folder)
    except BaseException as error:
        traceback.print_exc()
        put(error=f"{type(error).__name__}: {error}")
        status = 1
    sys.stderr.flush()
    os._exit(status)


def shape_of(model: str, device: str) -> dict[str, Any]:
    """A part's config.json; on a CPU all are small."""
    if device == "cpu" and model not in SMALL:
        model = "small-moe" if "moe" in CONFIGS[model]["model_type"] else "small"
    return SMALL.get(model) or CONFIGS[model]
