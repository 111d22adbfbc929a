"""Rotary frequencies, made on the host: theta never enters a compiled function.

The formulas are those of transformers' modeling_rope_utils.py, in its order of fp32 operations. Only the power is
float64, rounded once: numpy's own fp32 power differs from torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

INFORMATIVE = {"rope_type", "type", "rope_theta", "finetuned"}
OPTIONS = {  # what a config may say of each kind; anything else is refused
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"}
    | {"attention_factor", "mscale", "mscale_all_dim"},
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Each field after `theta` names the kinds that read it."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # all but default
    trained_len: int = 0  # tokens, before scaling; all but default
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn; multiplies q and k, so attention's scale takes its square

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> RopeConfig:
        """Reads transformers 5's `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
        given = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        given = {name: value for name, value in given.items() if value is not None}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in OPTIONS:
            raise NotImplementedError(f"rope_type {kind!r} is not supported; known: {', '.join(OPTIONS)}")
        refuse_partial(given.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor"))
        if unknown := set(given) - OPTIONS[kind] - INFORMATIVE:
            raise NotImplementedError(f"rope_type {kind!r} does not support {sorted(unknown)}")
        theta = given.get("rope_theta") or hf.get("rope_theta") or 10_000.0
        if kind == "default":
            return RopeConfig(theta=theta)
        trained_len, factor = trained(kind, given, hf)
        own = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"} & set(given)
        options = {name: given[name] for name in own}
        return RopeConfig(kind, theta, factor, trained_len, attention_factor=attention_factor(factor, given), **options)


def trained(kind: str, given: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[int, float]:
    """The length before scaling, and the factor."""
    max_len = hf["max_position_embeddings"]
    length = max_len
    if kind in ("llama3", "yarn"):
        length = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings", max_len)
    if "factor" in given:
        return length, given["factor"]
    if kind == "yarn":
        return length, max_len / length
    raise ValueError(f"rope_type {kind!r} needs a 'factor'; the config gives {dict(given)}")


def refuse_partial(fraction: float | None) -> None:
    if fraction not in (None, 1.0):
        raise NotImplementedError(f"partial_rotary_factor {fraction} is not supported; only 1.0 is")


def attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """Yarn's correction of the softmax temperature (arXiv:2309.00071, 3.4); 1 for the other kinds."""
    if given.get("rope_type", given.get("type")) != "yarn":
        return 1.0
    if "attention_factor" in given:
        return given["attention_factor"]

    def mscale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


def max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest context that the config promises, in tokens, as vLLM derives it.

    linear, dynamic and yarn stretch the trained length by their factor; a llama3 config states the stretched length.
    """
    if rope.kind in ("default", "llama3"):
        return max_position_embeddings
    return int(rope.trained_len * rope.factor)


def inv_freq(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The angle that each pair of a head turns by a position: [head_dim / 2], float32."""
    return KINDS[rope.kind](rope, head_dim)


def powers(theta: float, dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def default(rope: RopeConfig, dim: int) -> np.ndarray:
    return np.float32(1) / powers(rope.theta, dim)


def linear(rope: RopeConfig, dim: int) -> np.ndarray:
    return default(rope, dim) / np.float32(rope.factor)


def dynamic(rope: RopeConfig, dim: int) -> np.ndarray:
    """Fixed at load for the longest context, as vLLM does; transformers grows it with the sequence."""
    stretch = rope.factor * rope.factor - (rope.factor - 1)
    return np.float32(1) / powers(rope.theta * stretch ** (dim / (dim - 2)), dim)


def llama3(rope: RopeConfig, dim: int) -> np.ndarray:
    """Slow waves are stretched by the factor, fast ones kept, those between blended."""
    freq, low, high = default(rope, dim), rope.low_freq_factor, rope.high_freq_factor
    turns = np.float32(rope.trained_len) / (np.float32(2 * math.pi) / freq)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * freq / np.float32(rope.factor) + blend * freq
    return np.where(turns < low, freq / np.float32(rope.factor), np.where(turns > high, freq, blended))


def yarn(rope: RopeConfig, dim: int) -> np.ndarray:
    """As llama3, but blended over dims, between those that turn beta_fast and beta_slow times in the trained length."""

    def dim_that_turns(times: float) -> float:
        return dim * math.log(rope.trained_len / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept, power = 1 - ramp, powers(rope.theta, dim)
    return np.float32(1) / (np.float32(rope.factor) * power) * (1 - kept) + np.float32(1) / power * kept


KINDS: dict[str, Callable[[RopeConfig, int], np.ndarray]] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
}
