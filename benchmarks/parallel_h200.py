"""Two GPUs: tensor parallelism over NCCL. Tokens of one GPU in float32 on a small model, then the Llama-8B shape.

    python benchmarks/parallel_h200.py --part torch-equal|torch-8b|jax-equal [--device cpu]

Prints lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from typing import Any

from octavo.engine import LLM, SamplingParams
from octavo.engine.bench.workloads import CONFIGS, workload, write_config
from octavo.engine.errors import RankLostError

SMALL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 1024, "torch_dtype": "float32", "eos_token_id": 1,
}  # fmt: skip


def put(name: str, **values: Any) -> None:
    print(json.dumps({"part": name} | values), flush=True)


def equal(backend: str, device: str) -> None:
    """Greedy tokens of one device and of two, in float32, with chunks, hits and a preemption."""
    CONFIGS["small"] = SMALL
    folder, found = write_config("small"), []
    prompts = [p[:n] for (p, _), n in zip(workload("decode-64", 2000)[:12], range(5, 125, 10))]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
    for size in (1, 2):
        began = time.perf_counter()
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, backend=backend, device=device, dtype="float32",
            tensor_parallel_size=size, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
            num_gpu_blocks_override=40, state_check_interval=16,
        )  # fmt: skip
        outputs = [o for _ in range(2) for o in llm.generate(prompts, params, use_tqdm=False)]
        found.append([(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs])
        put(f"{backend} tp {size}", seconds=round(time.perf_counter() - began, 1),
            preemptions=llm.scheduler.num_preemptions, compiles=llm.backend.num_compiles())  # fmt: skip
        llm.shutdown()
        del llm
    same = sum(a[0] == b[0] for a, b in zip(*found))
    worst = max(abs(a[1] - b[1]) for a, b in zip(*found) if a[0] == b[0])
    put(f"{backend} equal", same=same, of=len(found[0]), largest_difference_of_cumulative_logprobs=worst)


def llama(device: str, model: str) -> None:
    """Decode of one and of 64 sequences on two GPUs, random weights in bfloat16; then a rank is killed."""
    began = time.perf_counter()
    llm = LLM(
        write_config(model), load_format="dummy", skip_tokenizer_init=True, backend="torch", device=device,
        tensor_parallel_size=2, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**32 if device == "cuda" else 2**26,
    )  # fmt: skip
    put("llama ready", seconds=round(time.perf_counter() - began, 1), weights=llm.memory_plan.weights_bytes,
        collectives=[vars(c) for c in llm.memory_plan.collectives])  # fmt: skip
    vocab = CONFIGS[model]["vocab_size"]
    for name, count in (("decode-1", 256), ("decode-64", 128)):
        prompts = [p for p, _ in workload(name, vocab)]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        # records the graphs of these shapes
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
        before, started = llm.backend.num_compiles(), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        put(f"llama {name}", tok_s=round(len(prompts) * count / seconds, 1), seconds=round(seconds, 3),
            recorded=llm.backend.num_compiles() - before, graphs=before)  # fmt: skip
    assert llm.team and llm.team.peers[0].child
    os.kill(llm.team.peers[0].child.pid, signal.SIGKILL)
    started = time.perf_counter()
    try:
        llm.generate(prompts, params, use_tqdm=False)
    except (RankLostError, RuntimeError) as error:
        put("llama killed", seconds=round(time.perf_counter() - started, 2), error=f"{type(error).__name__}: {error}")
    # what is left of NCCL may wait for the one that is gone
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("torch-equal", "torch-8b", "jax-equal"), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=list(CONFIGS), default="llama-8b")
    args = parser.parse_args()
    if args.part == "torch-8b":
        llama(args.device, args.model)
    else:
        equal(args.part.split("-")[0], args.device)


if __name__ == "__main__":
    main()
