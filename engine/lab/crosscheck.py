"""The same steps on several implementations, told the same tokens: where do they part, in which layer and op?

The first implementation decides what is run; the float64 oracle, if it is among them, is what all are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...models.interface import ModelSpec
from ..build import Parts, build
from ..config import engine_config
from ..plan import Plan
from ..request import Request
from ..runner import Runner
from ..sampling_params import SamplingParams
from ..scheduler import Scheduler
from .blocks import wrong_block
from .errors import Error, kl_divergence
from .numpy_backend import NumpyBackend
from .replay import LoggedStep, Teller

# a fault is an error this many times greater than all before it in the step, and greater than the dtype's noise
JUMP = 10.0
NOISE = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 1e-1, "float64": 3e-5}
NOISE_OF_NORM = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
TIE = 5e-4  # a gap between the two likeliest logits that rounding may turn
EVERYTHING = ("*",)
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@dataclass(frozen=True)
class Fault:
    """Where an implementation parts from the reference, first in the order of computing."""

    step: int
    request_id: str
    position: int  # of the token in its sequence
    layer: int | None
    op: str
    error: float  # relative
    before: float  # the greatest relative error of what was computed before it in the step
    block: str | None = None  # which block of the cache holds other content, if one does

    def __str__(self) -> str:
        where = self.op if self.layer is None else f"layer {self.layer}, {self.op}"
        block = f"; {self.block}" if self.block else ""
        return (
            f"{where}: relative error {self.error:.1e} ({self.before:.1e} before it) at step {self.step}, request "
            f"{self.request_id!r}, token {self.position}{block}"
        )


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


@dataclass(frozen=True)
class Subject:
    """An implementation made ready."""

    name: str
    parts: Parts
    teller: Teller
    logits: Any  # the program

    @property
    def runner(self) -> Runner:
        return self.parts.runner


@dataclass(frozen=True)
class Seen:
    """What one subject made of one step: taps [T, ...] of the real tokens by name, logits of the sampled rows."""

    taps: dict[str, np.ndarray]
    logits_RV: np.ndarray


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
    """Compares implementations ("backend:attention", or "oracle") op by op on the same steps.

    `prompts` are token ids; they run with chunked prefill and prefix hits. Taps are part of the compiled step. The
    reference is the oracle if it is among them, else the first. Raises ValueError for a name that nobody knows.
    """
    if len(against) < 2:
        raise ValueError(f"against names {len(against)} implementations: it takes two to compare")
    length = max(map(len, prompts)) + max_tokens
    options = LIMITS | {"max_model_len": length} | arguments
    subjects = [make_subject(name, model, weights, options) for name in against]
    at = list(against).index("oracle") if "oracle" in against else 0
    requests = [make_request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
    steps = list(drive(subjects[0].parts.scheduler, subjects[0].runner, requests))
    found = {s.name: Comparison(s.name, subjects[at].name) for s in subjects if s is not subjects[at]}
    for s in subjects:
        s.runner.reset()
    for step in steps:
        compare_step(step, subjects, subjects[at], found)
    if free_running:
        tokens = {s.name: free_run(s, prompts, max_tokens) for s in subjects}
        for c in found.values():
            c.free_agreement = agreement(tokens[c.name], tokens[c.reference])
    return list(found.values())


def make_subject(name: str, model: Any, weights: Any, options: dict[str, Any]) -> Subject:
    backend, _, attention = name.partition(":")
    if backend == "oracle":
        config = engine_config(model, **{k: v for k, v in options.items() if k not in ("dtype", "device")})
        parts = build(config, weights, NumpyBackend())
    elif backend in ("jax", "torch"):
        parts = build(engine_config(model, backend=backend, attention=attention or "auto", **options), weights)
    else:
        raise ValueError(f"{name!r} is no implementation: use oracle, or jax or torch with :attention")
    runner = parts.runner
    program = runner.backend.compile(_logits(parts.model), ("weights", "hidden"), ("logits", "hidden"), "hidden")
    return Subject(name, parts, Teller(runner), program)


def _logits(model: ModelSpec) -> Any:
    def logits(weights: Any, hidden_RE: Any, *, ops: Any) -> Any:
        # the rows go back as they came: a program gives back what it consumes
        return model.unembed(weights, hidden_RE, ops), hidden_RE

    return logits


def make_request(i: int, prompt: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(str(i), list(prompt), params, arrival=i)


def drive(scheduler: Scheduler, runner: Runner, requests: Sequence[Request]) -> Iterator[LoggedStep]:
    """Runs requests to their end, one step at a time, and yields what each step was."""
    for r in requests:
        scheduler.add(r)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        tokens = runner.launch(plan).result().token_ids
        scheduler.update(plan, tokens)
        yield LoggedStep(0, plan, tokens, None)


def compare_step(
    step: LoggedStep, subjects: Sequence[Subject], reference: Subject, found: dict[str, Comparison]
) -> None:
    """Runs one step on all, and compares each with the reference."""
    seen = {s.name: look(s, step) for s in subjects}
    wanted = seen[reference.name]
    for s in subjects:
        if s is reference:
            continue
        c, mine = found[s.name], seen[s.name]
        fault = compare_taps(step.plan, mine.taps, wanted.taps, c, s.parts.config.dtype)
        if reference.name == "oracle":
            fault = first_fault(fault, compare_norms(step.plan, mine.taps, reference.parts, s.parts.config.dtype))
        if fault is not None and c.fault is None:
            c.fault = with_block(fault, step.plan, s, reference)
        compare_logits(mine.logits_RV, wanted.logits_RV, c)


def look(s: Subject, step: LoggedStep) -> Seen:
    """Runs one step on one subject with every tap, and tells it the tokens."""
    hidden = s.runner.launch_forward(step.plan, EVERYTHING)
    s.runner.launch_head(step.plan, hidden).result()
    s.teller.tell(step)
    at = [i for i, c in enumerate(step.plan.chunks) if c.samples]
    logits, _ = s.logits(s.runner.weights, hidden.last_RE)
    count = sum(c.num_tokens for c in step.plan.chunks)
    taps = {name: s.runner.backend.read(x)[:count] for name, x in hidden.rows.items() if name != "last"}
    return Seen(taps, s.runner.backend.read(logits)[at])


def compare_taps(
    plan: Plan, mine: dict[str, np.ndarray], wanted: dict[str, np.ndarray], c: Comparison, dtype: str
) -> Fault | None:
    """Adds up the errors of all taps; the first that jumps is a fault."""
    worst, fault = 0.0, None
    # the order of computing is that of the oracle, or of torch: a compiled program returns its taps by name
    for name in sorted(wanted, key=order_of):
        error_T = c.ops.setdefault(name, Error(name)).add(mine[name], wanted[name])
        t = int(error_T.argmax())
        error = float(error_T[t])
        if fault is None and error > max(NOISE[dtype], JUMP * worst):
            fault = make_fault(plan, t, name, error, worst)
        worst = max(worst, error)
    return fault


def compare_norms(plan: Plan, mine: dict[str, np.ndarray], oracle: Parts, dtype: str) -> Fault | None:
    """The first norm that is not what the oracle makes of the same input.

    A wrong epsilon is small beside what rounding has done to the input by then, so a norm is judged by its own.
    """
    before = "embed"
    for n, weights in enumerate(oracle.runner.weights["layers"]):
        for name, source in (("attn_norm", before), ("mlp_norm", f"layer.{n}.residual")):
            tap, scale = f"layer.{n}.{name}", weights.get(name)
            if tap not in mine or scale is None:
                continue
            x = mine[source].astype(np.float64)
            wanted = oracle.backend.ops.rms_norm(x, scale, oracle.backend.ops.epsilons[id(scale)])
            error_T = Error(name).add(mine[tap], wanted)
            t = int(error_T.argmax())
            if error_T[t] > NOISE_OF_NORM[dtype]:
                return make_fault(plan, t, tap, float(error_T[t]), 0.0)
        before = f"layer.{n}"
    return None


def make_fault(plan: Plan, t: int, name: str, error: float, before: float) -> Fault:
    request_id, position = _token(plan, t)
    layer, op = _split(name)
    return Fault(plan.step, request_id, position, layer, op or "output", error, before)


def first_fault(a: Fault | None, b: Fault | None) -> Fault | None:
    """The one that comes first in the order of computing."""
    found = [f for f in (a, b) if f is not None]
    return min(found, key=lambda f: _order(f.layer, f.op), default=None)


OPS_ORDER = (
    *("attn_norm", "qkv", "q_norm", "k_norm", "rope", "rope.#1", "attention", "out"),
    *("residual", "mlp_norm", "gate_up", "gated_mlp_act", "down"),
)


def order_of(name: str) -> tuple[int, int]:
    """The place of a tap in the order of computing. The rows behind a layer come after all its ops."""
    return _order(*_split(name))


def _order(layer: int | None, op: str) -> tuple[int, int]:
    if layer is None:
        return -1, 0
    if op in ("", "output"):
        return layer, len(OPS_ORDER) + 1
    return layer, OPS_ORDER.index(op) if op in OPS_ORDER else len(OPS_ORDER)


def compare_logits(mine_RV: np.ndarray, wanted_RV: np.ndarray, c: Comparison) -> None:
    if not len(wanted_RV):
        return
    c.kl += kl_divergence(mine_RV, wanted_RV).tolist()
    same = mine_RV.argmax(-1) == wanted_RV.argmax(-1)
    second, first = np.partition(wanted_RV, -2, -1)[:, -2:].T
    c.num_agreeing += int(same.sum())
    c.num_ties += int((~same & (first - second < TIE)).sum())


def with_block(fault: Fault, plan: Plan, s: Subject, reference: Subject) -> Fault:
    """The fault, with the block that is to blame if attention read other keys or values than the reference."""
    if fault.op != "attention" or fault.layer is None:
        return fault
    chunk = next(c for c in plan.chunks if c.request_id == fault.request_id)
    named = wrong_block(s.runner, reference.runner, fault.layer, chunk)
    return Fault(**{**vars(fault), "block": named})


def free_run(s: Subject, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The tokens of each prompt, every one from the subject's own before it."""
    s.runner.reset()
    s.parts.scheduler.abandon()
    requests = [make_request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
    for _ in drive(s.parts.scheduler, s.runner, requests):
        pass
    return [r.output for r in requests]


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """The part of tokens up to the first difference of each sequence."""
    same = sum(next((i for i, (x, y) in enumerate(zip(p, q)) if x != y), len(q)) for p, q in zip(a, b, strict=True))
    return same / sum(map(len, b))


def _token(plan: Plan, t: int) -> tuple[str, int]:
    """Whose the t-th token of a step is, and its position."""
    for c in plan.chunks:
        if t < c.num_tokens:
            return c.request_id, c.start + t
        t -= c.num_tokens
    raise ValueError(f"the step has {t} tokens less than asked for")


def _split(name: str) -> tuple[int | None, str]:
    """layer.7.rope -> (7, rope); layer.7 -> (7, ""); embed -> (None, embed)."""
    parts = name.split(".", 2)
    if parts[0] != "layer":
        return None, name
    return int(parts[1]), parts[2] if len(parts) > 2 else ""
