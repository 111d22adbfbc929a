"""Requests as JSON-able values and back, for the scheduler's dump and load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import Any

from .edits import edits_from_json, edits_to_json
from .reads import wanted_from
from .request import Request
from .sampling_params import SamplingParams
from .structured_output_params import StructuredOutputsParams

# fields that JSON holds as they are
PLAIN = (
    *("id", "prompt", "priority", "arrival", "cache_salt", "index", "tokens", "limit", "variant", "num_logprobs"),
    *("computed", "in_flight", "row", "registered", "num_cached", "preemptions", "finish_reason", "stop_reason"),
    *("samples", "num_read", "complete", "first_step", "compiling"),
)


def dump_requests(alive: Iterable[Request], kept: Iterable[Request] = ()) -> list[dict[str, Any]]:
    """The requests that are alive, then those that have ended: first `kept`, then who is the first of a family."""
    listed = [*alive, *kept]
    listed = list(dict.fromkeys([*listed, *(r.first for r in listed if r.first is not None)]))
    at = {r: i for i, r in enumerate(listed)}
    return [_dump(r) | {"first": None if r.first is None else at[r.first]} for r in listed]


def load_requests(values: list[dict[str, Any]]) -> list[Request]:
    """New requests, equal to those that were dumped."""
    requests = [_load(v) for v in values]
    for r, v in zip(requests, values):
        r.first = None if v["first"] is None else requests[v["first"]]
    return requests


def _dump(r: Request) -> dict[str, Any]:
    value = {}
    for name in PLAIN:
        plain = getattr(r, name)
        value[name] = list(plain) if isinstance(plain, list) else plain
    params = {f.name: getattr(r.params, f.name) for f in fields(r.params)}
    return value | {
        "params": {name: _plain(v) for name, v in params.items() if v != getattr(SamplingParams, name)},
        "key": list(r.key),
        "wanted": vars(r.wanted).copy() if r.wanted else None,
        "edits": None if r.edits is None else edits_to_json(r.edits),
        "eos_ids": sorted(r.eos_ids),
        "block_digests": [d.hex() for d in r.block_digests],
        "blocks": [list(table) for table in r.blocks],
        "hashes": [h.hex() for h in r.hashes],
    }


def _load(value: dict[str, Any]) -> Request:
    first, second = value["key"]
    r = Request(
        value["id"],
        list(value["prompt"]),
        SamplingParams(**value["params"]),
        key=(first, second),
        eos_ids=frozenset(value["eos_ids"]),
        wanted=wanted_from(value["wanted"]),
        edits=None if value["edits"] is None else edits_from_json(value["edits"]),
    )
    for name in PLAIN[2:]:
        plain = value[name]
        setattr(r, name, list(plain) if isinstance(plain, list) else plain)
    r.blocks = [list(table) for table in value["blocks"]]
    r.block_digests = tuple(bytes.fromhex(d) for d in value["block_digests"])
    r.hashes = [bytes.fromhex(h) for h in value["hashes"]]
    return r


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputsParams):
        return value.as_dict()
    return list(value) if isinstance(value, tuple) else value.value if isinstance(value, Enum) else value
