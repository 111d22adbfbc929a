"""What peers reached on one H200, what octavo is to reach there, and all that was measured as one text of tables.

Tables are those of GitHub's README, in 80 columns, so a terminal and a page show the same.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
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
# of attention alone: FlashAttention-3's, and what octavo is to reach on each backend, GB/s or TFLOP/s
FA3 = {
    "decode 1 x 8192": 821, "decode 1 x 32768": 2454, "decode 8 x 8192": 3212, "decode 16 x 4096": 3245,
    "decode 64 x 4096": 4068, "decode 256 x 1024": 3770, "prefill 1 x 4096": 575, "prefill 2 x 4096": 542,
    "prefill 1 x 16384": 603,
}  # fmt: skip
ATTENTION_MARKS = {
    backend: {
        "decode 1 x 32768": 2600, "decode 8 x 8192": 3300, "decode 64 x 4096": 3900, "decode 256 x 1024": 3900,
        "prefill 1 x 16384": prefill,
    }
    for backend, prefill in (("torch", 450), ("jax", 500))
}  # fmt: skip
NARROW_MARK = 1.6  # times as fast over int8 as over bfloat16, on torch
STEP = ("wall_us", "device_us", "launches")
LIMITS = ("startup", "startup-warm")  # seconds: less is better


def report(values: dict[str, Any], backends: Sequence[str], models: Sequence[str]) -> str:
    """Where and with what, which checks held, attention alone, each model: of these, all that `values` have.

    On an H200 beside the marks and what peers reached.
    """
    peers = all("H200" in values[f"{backend}//machine"].get("gpu", "") for backend in backends)
    blocks = [_about(values, backends), _checks(values, backends), _attention(values, backends, peers)]
    for model in models:
        blocks += [_model(values, backends, model, peers), _profile(values, backends, model)]
    return "\n\n".join(block for block in blocks if block)


def _about(values: dict[str, Any], backends: Sequence[str]) -> str:
    machines = [values[f"{backend}//machine"] for backend in backends]
    on = dict.fromkeys(m.get("gpu") or m["cpu"] for m in machines)
    versions = dict(item for m in machines for item in m["versions"].items())
    dates = dict.fromkeys(m["date"] for m in machines)
    told = [*on, *dates, f"Python {machines[0]['python']}", *(f"{name} {text}" for name, text in versions.items())]
    with_ = [f"{b} with {json.dumps(given)}" for b in backends if (given := values.get(f"{b}//arguments"))]
    return textwrap.fill("; ".join([", ".join(told), *with_]), 80)


def _checks(values: dict[str, Any], backends: Sequence[str]) -> str:
    """What was found right before anything was timed."""
    said = [f"greedy fp32 tokens of a small model on {b} are the CPU's, {len(found)} ways"
            for b in backends if (found := values.get(f"{b}//check"))]  # fmt: skip
    if found := values.get("//kernels"):
        said.append(f"tests of kernels and engines on the GPU: {found['passed']} passed in {found['seconds']:.0f} s")
    return textwrap.fill(f"Checks: {'; '.join(said)}.", 80) if said else ""


def _attention(values: dict[str, Any], backends: Sequence[str], peers: bool) -> str:
    found = {backend: values.get(f"{backend}//attention", {}) for backend in backends}
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    if not names:
        return ""
    marks = ATTENTION_MARKS if peers else {}
    rows = [
        [name, *(_beside(of.get(name, {}).get("rate"), marks.get(b, {}).get(name)) for b, of in found.items())]
        + ([_number(FA3.get(name))] if peers else [])
        for name in names
    ]
    times = [_beside(_times_as_fast(of), NARROW_MARK if peers and b == "torch" else None) for b, of in found.items()]
    if any(text != "-" for text in times):
        rows.append(["int8 for bf16, times", *times, *(["-"] if peers else [])])
    worst = max(of["error"] for each in found.values() for of in each.values())
    return _table(f"Attention alone, GB/s or TFLOP/s; relative error at most {worst}",
                  ["", *_heads(backends, peers), *(["FA3"] if peers else [])], rows)  # fmt: skip


def _times_as_fast(found: dict[str, Any]) -> float | None:
    """How many times as fast attention over a cache of int8 is as over one of bfloat16."""
    wide, narrow = (found.get(f"decode 64 x 4096{kind}", {}).get("us") for kind in ("", " int8"))
    return round(wide / narrow, 2) if wide and narrow else None


def _model(values: dict[str, Any], backends: Sequence[str], model: str, peers: bool) -> str:
    rows, unexpected = [], []
    for part in (*LIMITS, *NAMES, "identical"):
        found = {backend: values.get(f"{backend}/{model}/{part}") for backend in backends}
        if not any(found.values()):
            continue
        marks = {b: MARKS[b].get(model, {}).get(part) if peers else None for b in backends}
        cells = [_cell(part, value, marks[b]) for b, value in found.items()]
        rows.append([part, *cells, *([_number(VLLM.get(model, {}).get(part))] if peers else [])])
        unexpected += [f"{value[what]} {what} in {part} on {backend}" for backend, value in found.items()
                       for what in ("compiles", "preemptions") if part in NAMES and value and value[what]]  # fmt: skip
    if not rows:
        return ""
    table = _table(f"{model}: tokens a second (of prefill: input tokens); start-ups in seconds",
                   ["", *_heads(backends, peers), *(["vLLM 0.26"] if peers else [])], rows)  # fmt: skip
    return f"{table}\n\n{textwrap.fill('While these ran: ' + ('; '.join(unexpected) or NOTHING) + '.', 80)}"


def _profile(values: dict[str, Any], backends: Sequence[str], model: str) -> str:
    """Steps in short; their kernels are in `values`."""
    found = {backend: values.get(f"{backend}/{model}/profile", {}) for backend in backends}
    rows = [
        [case, *(" / ".join(_number(of.get(case, {}).get(what)) for what in STEP) for of in found.values())]
        for case in dict.fromkeys(case for of in found.values() for case in of)
    ]
    title = f"A step of {model}: microseconds, on the device alone, launches"
    return _table(title, ["", *backends], rows) if rows else ""


NOTHING = "nothing was compiled, no request was preempted"


def _heads(backends: Sequence[str], peers: bool) -> list[str]:
    return [f"{backend}, mark" if peers else backend for backend in backends]


def _cell(part: str, value: dict[str, Any] | None, mark: float | None) -> str:
    if value and part == "identical":
        return f"{value['same']} of {value['of']}" + ("" if value["equal"] else " SHORT")
    number = value.get("tok_s", value.get("seconds")) if value else None
    return _beside(number, mark, less_is_better=part in LIMITS)


def _beside(value: float | None, mark: float | None, less_is_better: bool = False) -> str:
    """A value, and whether it reaches its mark."""
    if value is None or mark is None:
        return _number(value)
    met = value <= mark if less_is_better else value >= mark
    return f"{_number(value)} {'met' if met else 'SHORT'} {_number(mark)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([title, "", *text])
