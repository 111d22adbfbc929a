"""The same steps on several implementations, told the same tokens: where do they part, in which layer and op?

The first implementation decides what is run; the float64 oracle, if it is among them, is what all are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..plan import Plan
from ..step_log import Entry
from .blocks import wrong_content, wrong_entry
from .errors import Error, kl_divergence
from .faults import Fault, compare_norms, compare_taps, first_fault, split_name
from .subjects import EngineSubject, Subject, make_request, make_subject

TIE = 5e-4  # a gap between the two likeliest logits that rounding may turn
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@dataclass
class Comparison:
    """One implementation against the reference. `ops` are in the order of computing."""

    name: str
    reference: str
    fault: Fault | None = None
    ops: dict[str, Error] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)  # nats, a sampled token
    num_agreeing: int = 0  # sampled tokens of which the likeliest is the same
    num_ties: int = 0  # of those that do not agree: ties
    free_agreement: float | None = None  # part of tokens equal when each goes on from its own

    @property
    def num_tokens(self) -> int:
        return len(self.kl)

    @property
    def ok(self) -> bool:
        return self.fault is None and self.num_agreeing + self.num_ties == self.num_tokens

    def by_op(self) -> list[dict[str, Any]]:
        """The greatest errors of each op over all layers, and in which layer they are."""
        worst: dict[str, tuple[Error, int | None]] = {}
        for name, error in self.ops.items():
            layer, op = split_name(name)
            if op not in worst or error.max_rel > worst[op][0].max_rel:
                worst[op] = error, layer
        return [
            {
                "op": op or "layer's output",
                "layer": layer,
                "max_rel": e.max_rel,
                "max_abs": e.max_abs,
                "ulps": e.ulp_summary(),
            }
            for op, (e, layer) in worst.items()
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reference": self.reference,
            "ok": self.ok,
            "fault": None if self.fault is None else {**vars(self.fault), "text": str(self.fault)},
            "num_tokens": self.num_tokens,
            "num_agreeing": self.num_agreeing,
            "num_ties": self.num_ties,
            "free_agreement": self.free_agreement,
            "max_kl": max(self.kl, default=0.0),
            "mean_kl": sum(self.kl) / max(1, len(self.kl)),
            "ops": [e.to_json() for e in self.ops.values()],
        }


def crosscheck(
    model: Any = "smollm2",
    against: Sequence[str] = ("oracle", "torch:reference", "torch:cpu"),
    *,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 8,
    free_running: bool = True,
    weights: Any = None,
    **arguments: Any,
) -> list[Comparison]:
    """Compares implementations ("backend:attention", "oracle" or "hf") op by op on the same steps.

    `prompts` are token ids; they run with chunked prefill and prefix hits. Taps are part of the compiled step. The
    reference is the oracle if it is among them, else the first; hf shows but the rows between layers, and logits.
    `arguments` are the engine's. Raises ValueError for a name that nobody knows.
    """
    if len(against) < 2:
        raise ValueError(f"against names {len(against)} implementations: it takes two to compare")
    if against[0] == "hf":
        raise ValueError("hf cannot come first: the first one's scheduler decides what is run")
    length = max(map(len, prompts)) + max_tokens
    options = LIMITS | {"max_model_len": length} | arguments
    subjects = [make_subject(name, model, weights, options) for name in against]
    reference = subjects[list(against).index("oracle") if "oracle" in against else 0]
    steps = list(_teach(subjects, prompts, max_tokens))
    found = {s.name: Comparison(s.name, reference.name) for s in subjects if s is not reference}
    for step in steps:
        compare_step(step, subjects, reference, found)
    if free_running:
        tokens = {s.name: s.free_run(prompts, max_tokens) for s in subjects}
        for c in found.values():
            c.free_agreement = agreement(tokens[c.name], tokens[c.reference])
    return list(found.values())


def _teach(subjects: Sequence[Subject], prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Entry]:
    """The steps that the first subject makes of the prompts; all are then ready to be shown them."""
    requests = [make_request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
    assert isinstance(subjects[0], EngineSubject)
    yield from subjects[0].run(requests)
    for s in subjects:
        s.learn({r.id: r.tokens for r in requests})


def compare_step(step: Entry, subjects: Sequence[Subject], reference: Subject, found: dict[str, Comparison]) -> None:
    """Shows one step to all, and compares each with the reference."""
    seen = {s.name: s.look(step) for s in subjects}
    wanted_taps, wanted_RV = seen[reference.name]
    for s in subjects:
        if s is reference:
            continue
        c, (taps, logits_RV) = found[s.name], seen[s.name]
        fault = compare_taps(step.plan, taps, wanted_taps, c.ops, s.dtype)
        if isinstance(reference, EngineSubject) and reference.name == "oracle":
            fault = first_fault(fault, compare_norms(step.plan, taps, reference.parts, s.dtype))
        if fault is not None and c.fault is None:
            c.fault = with_block(fault, step.plan, s, reference)
        compare_logits(logits_RV, wanted_RV, c)


def compare_logits(mine_RV: np.ndarray, wanted_RV: np.ndarray, c: Comparison) -> None:
    if not len(wanted_RV):
        return
    c.kl += kl_divergence(mine_RV, wanted_RV).tolist()
    same = mine_RV.argmax(-1) == wanted_RV.argmax(-1)
    second, first = np.partition(wanted_RV, -2, -1)[:, -2:].T
    c.num_agreeing += int(same.sum())
    c.num_ties += int((~same & (first - second < TIE)).sum())


def with_block(fault: Fault, plan: Plan, s: Subject, reference: Subject) -> Fault:
    """The fault, with the block that is to blame if the cache was written or read elsewhere, or holds other content."""
    at_cache = fault.op in ("rope.k", "rope.v", "attention")
    if not (at_cache and isinstance(s, EngineSubject) and isinstance(reference, EngineSubject)):
        return fault
    assert fault.layer is not None
    chunk = next(c for c in plan.chunks if c.request_id == fault.request_id)
    where = s.runner, reference.runner, fault.layer, chunk
    return replace(fault, block=wrong_entry(*where) or (wrong_content(*where) if fault.op == "attention" else None))


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """The part of tokens up to the first difference of each sequence."""
    same = sum(next((i for i, (x, y) in enumerate(zip(p, q)) if x != y), len(q)) for p, q in zip(a, b, strict=True))
    return same / sum(map(len, b))
