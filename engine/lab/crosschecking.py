"""The same steps on several implementations, told the same tokens: where do they part, in which layer and op?

The first implementation decides what is run; the float64 oracle, if it is among them, is what all are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..plan import Plan
from ..step_log import Entry
from .blocks import wrong_content, wrong_entry
from .errors import Error, kl_divergence
from .faults import ROUNDED, Fault, compare_norms, compare_scales, compare_taps, first_fault, order_of, split_name
from .subjects import EngineSubject, RemoteSubject, Subject, check_name, is_users, make_subject

# a gap between the two likeliest logits that rounding may turn
TIES = {"float32": 5e-4, "float64": 5e-4, "float16": 2e-2, "bfloat16": 2e-1, ROUNDED: 2e-1}
Map = Callable[..., Iterable[Any]]  # as the built-in one: a function over a sequence
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

    @property
    def verdict(self) -> str:
        """A line: where it parts from the reference, if it does."""
        if self.fault is not None:
            return str(self.fault)
        if self.ok:
            return f"agrees with {self.reference}"
        wrong = self.num_tokens - self.num_agreeing - self.num_ties
        return f"{wrong} of {self.num_tokens} tokens are not those of {self.reference}, though no op stands out"

    def by_layer(self) -> list[dict[str, Any]]:
        """The greatest errors and the ULP histogram of each op of each layer, in the order of computing."""
        return [_row(*split_name(name), e, e) for name, e in sorted(self.ops.items(), key=lambda x: order_of(x[0]))]

    def by_op(self) -> list[dict[str, Any]]:
        """The greatest errors of each op over all layers, in which layer they are, and the histogram of all layers."""
        worst: dict[str, tuple[int | None, Error]] = {}
        whole: dict[str, Error] = {}
        for name, error in sorted(self.ops.items(), key=lambda x: order_of(x[0])):
            layer, op = split_name(name)
            whole.setdefault(op, Error(op)).ulps.update(error.ulps)
            if op not in worst or error.max_rel > worst[op][1].max_rel:
                worst[op] = layer, error
        return [_row(layer, op, e, whole[op]) for op, (layer, e) in worst.items()]

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


def _row(layer: int | None, op: str, error: Error, ulps: Error) -> dict[str, Any]:
    """A row of the printed table."""
    numbers = {"rel": f"{error.max_rel:.0e}", "abs": f"{error.max_abs:.0e}"}
    return {"op": op or "output", "layer": layer} | numbers | ulps.histogram()


def crosscheck(
    model: Any = "smollm2",
    against: Sequence[str] = ("oracle", "torch:reference", "torch:cpu"),
    *,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 8,
    free_running: bool = True,
    separate: bool | None = None,
    weights: Any = None,
    **arguments: Any,
) -> list[Comparison]:
    """Compares implementations ("backend:attention", "oracle", "hf", FILE.py:NAME) op by op on the same steps.

    `prompts` are token ids; they run with chunked prefill and prefix hits. Taps are part of the compiled step. The
    reference is the oracle if it is among them, else the first; hf shows but the rows between layers, and logits.
    `separate` says whether each but the oracle gets a process of its own; None: if there are several array libraries.
    `arguments` are the engine's. Raises ValueError for a name that nobody knows.
    """
    if len(against) < 2:
        raise ValueError(f"against names {len(against)} implementations: it takes two to compare")
    if against[0] == "hf":
        raise ValueError("hf cannot come first: the first one's scheduler decides what is run")
    for name in against:
        check_name(name)
    if not prompts:
        raise ValueError("there are no prompts to compare on")
    length = max(map(len, prompts)) + max_tokens
    options = LIMITS | {"max_model_len": length} | arguments
    remote = several_libraries(against) if separate is None else separate
    subjects = [_subject(name, model, weights, options, remote) for name in against]
    if not remote:
        return _compared(subjects, prompts, max_tokens, free_running, map)
    with ThreadPoolExecutor(len(subjects)) as pool:
        try:
            # in processes of their own they compute at the same time
            return _compared(subjects, prompts, max_tokens, free_running, pool.map)
        finally:
            for s in subjects:
                if isinstance(s, RemoteSubject):
                    s.remote.close()


def several_libraries(names: Sequence[str]) -> bool:
    """Whether these need more than one array library; who knows what a user's file needs."""
    libraries = {{"hf": "torch"}.get(name, name.rpartition(":")[0] if is_users(name) else name.partition(":")[0])
                 for name in names}  # fmt: skip
    return len(libraries - {"oracle"}) > 1


def _subject(name: str, model: Any, weights: Any, options: dict[str, Any], remote: bool) -> Subject:
    if remote and name != "oracle":
        return RemoteSubject(name, model, weights, options)
    return make_subject(name, model, weights, options)


def _compared(
    subjects: Sequence[Subject], prompts: Sequence[Sequence[int]], max_tokens: int, free_running: bool, each: Map
) -> list[Comparison]:
    names = [s.name for s in subjects]
    reference = subjects[names.index("oracle") if "oracle" in names else 0]
    first: Any = subjects[0]
    steps, sequences = first.lead(prompts, max_tokens)
    list(each(lambda s: s.learn(sequences), subjects))
    found = {s.name: Comparison(s.name, reference.name) for s in subjects if s is not reference}
    for step in steps:
        compare_step(step, subjects, reference, found, each)
    if free_running:
        runs = each(lambda s: s.free_run(prompts, max_tokens), subjects)
        tokens = dict(zip(names, runs, strict=True))
        for c in found.values():
            c.free_agreement = agreement(tokens[c.name], tokens[c.reference])
    return list(found.values())


def compare_step(
    step: Entry, subjects: Sequence[Subject], reference: Subject, found: dict[str, Comparison], each: Map
) -> None:
    """Shows one step to all, and compares each with the reference."""
    seen = dict(zip(subjects, each(lambda s: s.look(step), subjects), strict=True))
    wanted_taps, wanted_RV = seen[reference]
    for s in subjects:
        if s is reference:
            continue
        c, (taps, logits_RV) = found[s.name], seen[s]
        kind = ROUNDED if s.rounds else s.dtype
        fault = compare_taps(step.plan, taps, wanted_taps, c.ops, kind)
        if s.rounds:
            fault = first_fault(fault, compare_scales(step.plan, taps))
        if isinstance(reference, EngineSubject) and reference.name == "oracle":
            fault = first_fault(fault, compare_norms(step.plan, taps, reference.parts, s.dtype))
        if fault is not None and c.fault is None:
            c.fault = with_block(fault, step.plan, s, reference)
        compare_logits(logits_RV, wanted_RV, c, TIES[kind])


def compare_logits(mine_RV: np.ndarray, wanted_RV: np.ndarray, c: Comparison, tie: float) -> None:
    """Adds up KL and agreement of sampled rows; a token that is less than `tie` behind the reference's is no other."""
    if not len(wanted_RV):
        return
    c.kl += kl_divergence(mine_RV, wanted_RV).tolist()
    same = mine_RV.argmax(-1) == wanted_RV.argmax(-1)
    second, first = np.partition(wanted_RV, -2, -1)[:, -2:].T
    c.num_agreeing += int(same.sum())
    c.num_ties += int((~same & (first - second < tie)).sum())


def with_block(fault: Fault, plan: Plan, s: Any, reference: Any) -> Fault:
    """The fault, with the block that is to blame if the cache was written or read elsewhere, or holds other content."""
    at_cache = fault.op.startswith("rope.") or fault.op == "attention"
    if fault.block is not None or not (at_cache and s.has_cache and reference.has_cache):
        return fault
    assert fault.layer is not None
    chunk = next(c for c in plan.chunks if c.request_id == fault.request_id)
    where = s, reference, fault.layer, chunk
    block = wrong_entry(*where)
    if block is None and fault.op == "attention":
        block = wrong_content(*where, reference.block_size)
    return replace(fault, block=block)


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """The part of tokens up to the first difference of each sequence."""
    same = sum(next((i for i, (x, y) in enumerate(zip(p, q)) if x != y), len(q)) for p, q in zip(a, b, strict=True))
    return same / sum(map(len, b))
