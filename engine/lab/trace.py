"""Golden traces: what was asked, the steps that were planned, and what must come out, as one JSON file.

The tokens and logprobs are those of a float64 oracle with a sampler of plain loops (tests/golden/make_traces.py), so
that every backend is held to the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..json_file import read_json
from ..plan import Plan
from ..sampling_params import SamplingParams
from ..step_log import from_json

FORMAT = 1
SHIPPED = Path(__file__).parent / "traces" / "smollm2.json"


@dataclass(frozen=True)
class Stream:
    """What one sample must be. `gaps` say by how much each token is ahead of the next best, noise included."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Asked:
    """One request. Ids of its samples are its own, or 0_id, 1_id ... where there are several."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: Mapping[str, Any]
    streams: tuple[Stream, ...]

    def sampling_params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**(dict(self.params) | more))

    def names(self) -> list[str]:
        return [self.id] if len(self.streams) == 1 else [f"{i}_{self.id}" for i in range(len(self.streams))]


@dataclass(frozen=True)
class Trace:
    """`options` are the engine arguments that the plans fit."""

    model: str
    made_with: Mapping[str, str]
    options: Mapping[str, Any]
    requests: tuple[Asked, ...]
    plans: tuple[Plan, ...]

    def streams(self) -> dict[str, tuple[Asked, Stream]]:
        """What each request of the scheduler must sample, by its id."""
        return {name: (r, s) for r in self.requests for name, s in zip(r.names(), r.streams, strict=True)}


def read_trace_file(path: str | Path = SHIPPED) -> Trace:
    """The trace of a file. Raises ValueError for one of another format."""
    try:
        value = read_json(Path(path))
    except ValueError as error:
        raise ValueError(f"{path} is no golden trace of format {FORMAT}: {error}") from error
    if value.get("format") != FORMAT:
        raise ValueError(f"{path} is no golden trace of format {FORMAT}: its format is {value.get('format')!r}")
    return trace_from_json(value)


def trace_from_json(value: Mapping[str, Any]) -> Trace:
    requests = [
        Asked(r["id"], tuple(r["ids"]), r["params"], tuple(_stream(s) for s in r["streams"])) for r in value["requests"]
    ]
    plans = tuple(from_json(p) for p in value["plans"])
    return Trace(value["model"], value["made_with"], value["options"], tuple(requests), plans)


def _stream(value: Mapping[str, Any]) -> Stream:
    tops = tuple(map(tuple, value["top_ids"])), tuple(map(tuple, value["top_logprobs"]))
    return Stream(tuple(value["tokens"]), tuple(value["gaps"]), tuple(value["logprobs"]), *tops)


def with_logprobs(plan: Plan, count: int) -> Plan:
    """The plan, asking for the logprobs of so many of the likeliest tokens."""
    return replace(plan, num_logprobs=max(plan.num_logprobs, count))
