"""What peers reached on one H200, what octavo is to reach there, and the table of all that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def rows(values: dict[str, Any], backends: Sequence[str], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each part of these models in a file of results, a column a backend.

    On an H200 beside the marks and vLLM's figures. What was compiled or preempted is that of all backends.
    """
    peers = all("H200" in values[f"{backend}//machine"].get("gpu", "") for backend in backends)
    for model in models:
        for part in ("startup", "startup-warm", *NAMES, "identical"):
            found = {backend: values.get(f"{backend}/{model}/{part}") for backend in backends}
            if any(found.values()):
                yield _row(model, part, found, peers)


def _row(model: str, part: str, found: dict[str, Any], peers: bool) -> dict[str, Any]:
    seconds = part.startswith("startup")
    unit = "s" if seconds else {"prefill": "input tok/s", "identical": "requests"}.get(part, "tok/s")
    row: dict[str, Any] = {"model": model, "part": part, "unit": unit}
    row |= {backend: _told(part, value) for backend, value in found.items()}
    if peers:
        row |= {f"mark, {backend}": MARKS[backend].get(model, {}).get(part) for backend in found}
        row["vLLM 0.26"] = VLLM.get(model, {}).get(part)
    for what in ("compiles", "preemptions"):
        counts = [value[what] for value in found.values() if value and what in value]
        row[what] = sum(counts) if counts else None
    return row


def _told(part: str, value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    return f"{value['same']} of {value['of']}" if part == "identical" else value.get("tok_s", value.get("seconds"))


def attention_rows(values: dict[str, Any], backends: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each size at which attention alone was measured, by backend."""
    return [
        {"attention": name, "backend": backend} | found
        for backend in backends
        for name, found in values.get(f"{backend}//attention", {}).items()
    ]
