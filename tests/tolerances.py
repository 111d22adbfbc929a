"""How far results may lie apart, by dtype and by what is compared. Changed only in a commit of its own that says why.

- "logits": of tiny random models (hidden size 64, initializer_range 0.2, 300 tokens), against float64 or transformers
- "checkpoint": logits of real checkpoints, against transformers; its own fp32 lies up to 7e-5 from fp64 (SmolLM2)
- "tie": two top logits closer than this may swap
- "attention": outputs for queries, keys and values of unit variance, against float64
- "op": outputs of a small op for inputs of unit variance, against float64
- "frequency": relative, of rotary frequencies against transformers: torch's fp32 power may be one unit in the last
  place off, and its reciprocal then two
- "attention" in bfloat16: outputs and weights are rounded to 2^-9 of values up to about 3
- "experts": outputs of a mixture of up to three experts, weighted by up to 3, against float64; what each product
  makes is rounded to 2^-9 (bfloat16) or 2^-12 (float16) of values up to about 6; 2.8e-2 and 2.4e-3 were seen
- "logits" in bfloat16: of such models drawn with 0.1, where logits reach 4, against float64 with the same weights
"""

from __future__ import annotations

TOLERANCES = {
    ("float32", "logits"): 1e-4,
    ("float32", "checkpoint"): 3e-4,
    ("float32", "tie"): 5e-4,
    ("float32", "attention"): 1e-5,
    ("float32", "op"): 1e-5,
    ("float32", "frequency"): 2**-22,
    ("bfloat16", "logits"): 0.15,
    ("bfloat16", "attention"): 2e-2,
    ("bfloat16", "experts"): 4e-2,
    ("float16", "experts"): 5e-3,
}


def tolerance(dtype: str, kind: str) -> float:
    return TOLERANCES[dtype, kind]
