"""One engine of compare_vllm_cpu.py, in a process of its own and in its own environment: imports nothing of ours but
octavo, and that only where octavo is the engine.

    python cpu_worker.py ENGINE FOLDER DTYPE MAX_MODEL_LEN MAX_NUM_SEQS

Its stdin has lines of JSON, {"prompts": [[id, ...], ...], "new": tokens}; stdout answers each with {"seconds": s,
"tokens": [[id, ...], ...]}, after a first line of {"versions": {...}, "start": seconds}. What libraries print goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def of_octavo(backend: str, folder: str, dtype: str, length: int, seqs: int) -> tuple[Generate, list[str]]:
    from octavo.engine import LLM, SamplingParams

    llm = LLM(folder, backend=backend, dtype=dtype, max_model_len=length, max_num_seqs=seqs, skip_tokenizer_init=True,
              enable_prefix_caching=False)  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    return generate, ["octavo", backend]


def of_vllm(folder: str, dtype: str, length: int, seqs: int) -> tuple[Generate, list[str]]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    # else 0.92 of the machine's memory must be free
    llm: Any = LLM(folder, dtype=dtype, max_model_len=length, max_num_seqs=seqs, skip_tokenizer_init=True,
                   enable_prefix_caching=False, kv_cache_memory_bytes=2**29)  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return generate, ["vllm-cpu", "torch"]


def of_transformers(folder: str, dtype: str, length: int, seqs: int) -> tuple[Generate, list[str]]:
    """`generate` with static batching: prompts of one length, so that nothing is padded."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
                             do_sample=False, pad_token_id=0)  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    return generate, ["transformers", "torch"]


def main() -> None:
    engine, folder, dtype, length, seqs = sys.argv[1:]
    # stdout is for answers alone
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    arguments = (folder, dtype, int(length), int(seqs))
    if engine in ("torch", "jax"):
        generate, packages = of_octavo(engine, *arguments)
    else:
        generate, packages = {"vllm": of_vllm, "transformers": of_transformers}[engine](*arguments)
    versions = {name: version(name) for name in packages}
    print(json.dumps({"versions": versions, "start": round(time.perf_counter() - started, 1)}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = generate(asked["prompts"], asked["new"])
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
