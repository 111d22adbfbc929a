"""What an engine did, in lines of JSON: enough to do it again, and to see whether it came out the same.

The first line is a header: what must be equal for a bit-equal replay (versions, machine, threads, model, a hash of its
weights, bucket sizes), and the scheduler as it was. The others are in the order in which things happened: what came to
the scheduler from outside (`add`, `finish` ...), each `plan` it made, and what was `read` of it: the tokens it sampled,
and digests of their fp32 logits.
"""

from __future__ import annotations

import json
import weakref
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .edits import edits_from_json, edits_to_json
from .json_file import read_text
from .plan import Admission, Chunk, Plan, Read, Reason, TableWrite, Transfer

FORMAT = 3


@dataclass(frozen=True)
class Entry:
    """One step as it went. `digests` has one int a sampled token, None if the engine makes none."""

    plan: Plan
    token_ids: list[int]
    digests: list[int] | None
    line: int = 0  # of the log, from 1, that reads it
    mask: np.ndarray | None = None  # of its head, where requests have a grammar


class StepLog:
    """An open log. Every line is written through at once, so that it survives the process."""

    def __init__(self, path: str | Path, header: Mapping[str, Any]):
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 - it stays open
        weakref.finalize(self, self.file.close)
        self.header = dict(header)
        self.write("header", self.header, format=FORMAT)

    def write(self, kind: str, value: Any, **more: Any) -> None:
        """Adds a line of one kind."""
        self.file.write(json.dumps({kind: value, **more}, separators=(",", ":"), default=repr) + "\n")

    def planned(self, plan: Plan) -> None:
        """Adds a plan, when it is made."""
        self.write("plan", to_json(plan))

    def masked(self, plan: Plan, mask: np.ndarray) -> None:
        """Adds the grammar mask of a plan's head, before the plan is read."""
        packed = b64encode(zlib.compress(mask.tobytes(), 1)).decode()
        self.write("mask", plan.step, words=mask.shape[1], packed=packed)

    def append(self, plan: Plan, token_ids: Sequence[int], digests: Sequence[int] | None) -> None:
        """Adds what a step sampled, when it is read. Steps are read in the order in which they were launched."""
        self.write("read", plan.step, tokens=list(token_ids), digests=None if digests is None else list(digests))

    def close(self) -> None:
        self.file.close()


def mask_of(line: Mapping[str, Any]) -> np.ndarray:
    """The mask that a line holds, int32 [sampled chunks, W]."""
    data = zlib.decompress(b64decode(line["packed"]))
    return np.frombuffer(data, np.int32).reshape(-1, line["words"])


def read_lines(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the other lines of a log. Raises ValueError for a line cut short, and for another format."""
    lines = read_text(Path(path)).splitlines()
    values = [_parsed(line, i, path) for i, line in enumerate(lines, 1)]
    found = values[0].get("format") if values and isinstance(values[0], dict) else None
    if found != FORMAT:
        why = lines[0][:80] if lines else "it is empty"
        if isinstance(found, int):
            why = f"it has format {found}, so use the version of octavo that wrote it, or record the run again"
        raise ValueError(f"{path} is not a step log of format {FORMAT}: {why}")
    return values[0]["header"], values[1:]


def read_log(path: str | Path) -> tuple[dict[str, Any], list[Entry]]:
    """The header of a log and its steps, those that were read."""
    header, lines = read_lines(path)
    plans, masks, entries = {}, {}, []
    for number, line in enumerate(lines, 2):
        if "plan" in line:
            plans[line["plan"]["step"]] = from_json(line["plan"])
        elif "mask" in line:
            masks[line["mask"]] = mask_of(line)
        elif "read" in line:
            if line["read"] not in plans:
                raise ValueError(f"{path}: line {number} reads step {line['read']}, which no line before it plans")
            mask = masks.pop(line["read"], None)
            entries.append(Entry(plans.pop(line["read"]), line["tokens"], line["digests"], number, mask))
    return header, entries


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as a JSON-able value. Parts that are empty are left out."""
    value: dict[str, Any] = {"step": plan.step, "variant": plan.variant, "num_logprobs": plan.num_logprobs}
    value["chunks"] = [[c.request_id, c.row, c.start, c.num_tokens, c.samples] for c in plan.chunks]
    if plan.admitted:
        value["admitted"] = [
            [a.row, list(a.tokens), a.num_computed, a.prompt_len, list(a.key), list(a.params)]
            + ([a.min_tokens, list(a.stop_ids)] if a.min_tokens or a.stop_ids or a.edits else [])
            + ([edits_to_json(a.edits)] if a.edits else [])
            for a in plan.admitted
        ]
    if plan.table_writes:
        value["table_writes"] = [[w.group, w.row, w.index, list(w.blocks)] for w in plan.table_writes]
    if plan.transfers:
        value["transfers"] = [[t.group, t.source, t.target] for t in plan.transfers]
    if plan.reasons:
        value["reasons"] = [list(reason) for reason in plan.reasons]
    if plan.reads:
        value["reads"] = [list(vars(read).values()) for read in plan.reads]
    if plan.token_ids:
        value["token_ids"] = [list(ids) for ids in plan.token_ids]
    if plan.ended:
        value["ended"] = list(plan.ended)
    if plan.cuts:
        value["cuts"] = True
    if plan.tokens:
        value["tokens"] = [list(token) for token in plan.tokens]
    return value


def from_json(value: Mapping[str, Any]) -> Plan:
    """The plan that to_json was given."""
    return Plan(
        value["step"],
        tuple(Chunk(*c) for c in value["chunks"]),
        tuple(_admission(*a) for a in value.get("admitted", ())),
        tuple(TableWrite(group, row, i, tuple(blocks)) for group, row, i, blocks in value.get("table_writes", ())),
        tuple(Transfer(*t) for t in value.get("transfers", ())),
        value["variant"],
        value["num_logprobs"],
        tuple((request_id, Reason(code)) for request_id, code in value.get("reasons", ())),
        tuple(_read(*r) for r in value.get("reads", ())),
        tuple(map(tuple, value.get("token_ids", ()))),
        tuple(value.get("ended", ())),
        value.get("cuts", False),
        tuple((row, position, token) for row, position, token in value.get("tokens", ())),
    )


def _read(
    chunk: int, start: int, stop: int, targets: list[int], num_logprobs: int, ids: list[list[int]], hidden: list[str]
) -> Read:
    return Read(chunk, start, stop, tuple(targets), num_logprobs, tuple(map(tuple, ids)), tuple(hidden))


def _admission(
    row: int,
    tokens: list[int],
    num_computed: int,
    prompt_len: int,
    key: list[int],
    params: list[float],
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    edits: Mapping[str, Any] | None = None,
) -> Admission:
    first, second = key
    known, numbers = tuple(tokens), tuple(params)
    admitted = Admission(row, known, num_computed, prompt_len, (first, second), numbers, min_tokens, tuple(stop_ids))
    return replace(admitted, edits=edits_from_json(edits)) if edits else admitted


def _parsed(line: str, number: int, path: str | Path) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {number} is not JSON, perhaps cut short: {line[-80:]!r}") from error
