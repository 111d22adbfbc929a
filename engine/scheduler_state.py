"""A scheduler's state as a JSON-able value, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from .edits import edits_from_json, edits_to_json
from .limits import Limits
from .plan import Reason
from .reads import wanted_from
from .request import Request
from .sampling_params import SamplingParams
from .structured_output_params import StructuredOutputsParams

if TYPE_CHECKING:
    from .scheduler import Scheduler

# fields that JSON holds as they are
PLAIN = (
    *("id", "prompt", "priority", "arrival", "cache_salt", "index", "tokens", "limit", "variant", "num_logprobs"),
    *("computed", "in_flight", "row", "registered", "num_cached", "preemptions", "finish_reason", "stop_reason"),
    *("samples", "num_read", "complete", "first_step", "compiling", "last_step"),
)
COUNTERS = (
    "held",
    "step",
    "first_step",
    "num_preemptions",
    "num_prompt_tokens",
    "num_queried_tokens",
    "num_hit_tokens",
)


def dump_state(s: Scheduler) -> dict[str, Any]:
    """Everything that a scheduler is, its requests included."""
    # one that has given up its seat may be alive and leave its blocks to siblings
    at = {r: i for i, r in enumerate(dict.fromkeys([*s.alive.values(), *s.estates.kept]))}
    return {
        "config": vars(s.config).copy(),
        "policy": s.policy.name,
        "limits": vars(s.limits).copy(),
        "blocks": s.blocks.dump(),
        "requests": dump_requests(s.alive.values(), s.estates.kept),
        "kept": [at[r] for r in s.estates.kept],
        "num_alive": len(s.alive),
        "running": [at[r] for r in s.running],
        "waiting": [at[r] for r in s.waiting],
        "ending": [at[r] for r in s.ending],
        "left": sorted(at[r] for r in s.left),
        "free_rows": list(s.free_rows),
        "orphans": dict(s.orphans),
        "events": [list(event) for event in s.events],
        "counters": {name: getattr(s, name) for name in COUNTERS},
    }


def load_state(s: Scheduler, value: dict[str, Any]) -> None:
    """Fills a new scheduler, of the dumped config and blocks. Raises ValueError if its policy is of another name."""
    if s.policy.name != value["policy"]:
        raise ValueError(f"the dump is of policy {value['policy']!r}: pass it as policy=, not {s.policy.name!r}")
    s.limits = Limits(**value["limits"])
    requests = load_requests(value["requests"])
    s.alive = {r.id: r for r in requests[: value["num_alive"]]}
    s.running, s.ending = ({requests[i]: None for i in value[name]} for name in ("running", "ending"))
    s.left = {requests[i] for i in value["left"]}
    for i in value["waiting"]:
        s.waiting.push(requests[i])
        s.estates.expect(requests[i])
    s.estates.kept = [requests[i] for i in value["kept"]]
    s.free_rows, s.orphans = list(value["free_rows"]), dict(value["orphans"])
    s.events = [(name, Reason(code)) for name, code in value["events"]]
    for name in COUNTERS:
        setattr(s, name, value["counters"][name])


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
