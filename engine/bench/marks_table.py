"""What peers reached on one H200, what octavo is to reach there, and the table of all that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .workloads import NAMES

# vLLM 0.26.0, output tokens a second; of "prefill" input tokens, of "startup" seconds with cold caches
VLLM: dict[str, dict[str, float]] = {
    "llama-8b": {
        "startup": 69, "decode-1": 205, "decode-64": 9460, "prefill": 41100, "offline": 9050, "prefix": 8600,
    },
    "qwen3-0.6b": {
        "startup": 77, "decode-1": 376, "decode-64": 22400, "prefill": 326000, "offline": 13500, "prefix": 14500,
    },
    "qwen3-30b-a3b": {"startup": 92, "decode-1": 241, "decode-64": 3500, "offline": 5100},
}  # fmt: skip
MARKS: dict[str, dict[str, dict[str, float]]] = {
    "torch": {
        "llama-8b": {
            "startup": 20, "decode-1": 235, "decode-64": 11000, "prefill": 41000, "offline": 10000, "prefix": 12000,
            "startup-warm": 10,
        },
        "qwen3-0.6b": {
            "startup": 15, "decode-1": 1000, "decode-64": 32000, "prefill": 340000, "offline": 27000, "prefix": 28000,
            "startup-warm": 8,
        },
        "qwen3-30b-a3b": {"decode-1": 270, "decode-64": 4500, "offline": 6500},
    },
    "jax": {
        "llama-8b": {
            "startup": 45, "decode-1": 230, "decode-64": 10800, "prefill": 40000, "offline": 9800, "prefix": 12000,
            "startup-warm": 12,
        },
        "qwen3-0.6b": {
            "startup": 40, "decode-1": 850, "decode-64": 30000, "prefill": 330000, "offline": 25000, "prefix": 25000,
            "startup-warm": 10,
        },
        "qwen3-30b-a3b": {"decode-1": 216, "decode-64": 3600, "offline": 5200},
    },
}  # fmt: skip


def rows(values: dict[str, Any], backend: str, models: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each part of these models in a file of results; on an H200 beside vLLM's figures and the marks."""
    peers = "H200" in values[f"{backend}//machine"].get("gpu", "")
    for model in models:
        for part in ("startup", "startup-warm", *NAMES):
            if (found := values.get(f"{backend}/{model}/{part}")) is None:
                continue
            row = {"model": model, "part": part, "octavo": found.get("tok_s", found.get("seconds"))}
            row |= {"unit": "s" if "tok_s" not in found else "input tok/s" if part == "prefill" else "tok/s"}
            row |= {"compiles": found.get("compiles"), "preemptions": found.get("preemptions")}
            if peers:
                row |= {"vLLM 0.26": VLLM.get(model, {}).get(part), "mark": MARKS[backend].get(model, {}).get(part)}
            yield row
        if equal := values.get(f"{backend}/{model}/identical"):
            told = f"{equal['same']} of {equal['of']}"
            row = {"model": model, "part": "identical", "octavo": told, "unit": "requests"}
            yield row | dict.fromkeys(("compiles", "preemptions", *(("vLLM 0.26", "mark") if peers else ())))


def attention_rows(values: dict[str, Any], backend: str) -> list[dict[str, Any]]:
    """A row for each size at which attention alone was measured."""
    measured = values.get(f"{backend}//attention", {})
    return [{"attention": name} | found for name, found in measured.items()]
