"""Part "check" of `octavo bench marks`: whether a small model's tokens on this GPU are the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...models import llama
from ...models.interface import ArraySpec, ModelSpec, map_tree
from ..llm import LLM
from ..sampling_params import SamplingParams

SMALL = llama.LlamaConfig(
    vocab_size=512, embed_dim=64, mlp_dim=128, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16,
    max_model_len=512, windows=(None, 24, None),
)  # fmt: skip


def check(backend: str) -> dict[str, Any]:
    """Greedy fp32 tokens of a small random model on the GPU are those of the CPU, in both layouts; raises if not."""
    model = llama.spec(SMALL)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, n).tolist() for n in (1, 7, 40, 130, 9, 64, 3, 200)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    weights = random_weights(model)

    def tokens(on: str, device: str, num: int | None = None, **more: Any) -> list[list[int]]:
        llm = LLM(model, weights=weights, backend=on, device=device, dtype="float32", max_num_seqs=6,
                  max_num_batched_tokens=96, num_gpu_blocks_override=60, max_model_len=256, **more)  # fmt: skip
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts[:num], params, use_tqdm=False)]

    # more threads would spin beside the other checks
    want = tokens("torch", "cpu", threads=1)
    found = {}
    ways: dict[str, dict[str, Any]] = {
        # first: what it compiles side by side the others find on disk
        "warm": {"warmup": "all"},
        "token_major": {},
        "head_major": {"layout": "head_major"},
        # op by op XLA compiles each op for each size of a step: of all prompts some 650 programs
        "eager": {"enforce_eager": True, "num": 3},
        "synchronous": {"async_scheduling": False},
    }
    for name, more in ways.items():
        found[name] = tokens(backend, "cuda", **more) == want[: more.get("num")]
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
