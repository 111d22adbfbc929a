"""Writes engine/lab/traces/smollm2.json: what `octavo certify` holds every backend to.

    python tests/golden/make_traces.py

The plans are the production scheduler's, with preemptions, prefix hits, chunks and forks; the logits the float64
oracle's (engine/lab/numpy_ops.py); the tokens those that tests/sampling_oracle.py draws from them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from sampling_oracle import asked_of, token

from octavo.engine.build import build
from octavo.engine.config import engine_config
from octavo.engine.lab.numpy_backend import NumpyBackend
from octavo.engine.lab.prompts import OPENING, tokenized
from octavo.engine.lab.subjects import EngineSubject
from octavo.engine.lab.trace import FORMAT, SHIPPED
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams, request_key
from octavo.engine.step_log import Entry, to_json

NUM_TOP = 5
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 96,
    "block_size": 16,
    "num_gpu_blocks_override": 9,
}
SHAPED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
WANTED = (
    (OPENING + "Then he", {"temperature": 0.0, "max_tokens": 20}),
    (OPENING + "In the morning", {"temperature": 0.0, "max_tokens": 20}),
    ("def fold(sheet):", {"temperature": 0.0, "max_tokens": 20}),
    ("日本の首都は", {"temperature": 0.0, "max_tokens": 12, "repetition_penalty": 1.2}),
    ("Die Seiten eines Buches", SHAPED | {"seed": 3, "max_tokens": 20}),
    (OPENING + "The apprentice", SHAPED | {"seed": 7, "max_tokens": 16, "n": 3}),
    ("1, 2, 3, 4, 5,", {"temperature": 1.0, "seed": 11, "max_tokens": 12}),
)


def make_trace(model: Any, weights: Any, wanted: list[tuple[list[int], dict[str, Any]]], options: dict) -> dict:
    """The trace of these prompts (ids) and sampling parameters, as a JSON-able value."""
    subject = EngineSubject("oracle", build(engine_config(model, **options), weights, NumpyBackend()))
    asked = [_Asked(str(i), *each) for i, each in enumerate(wanted)]
    known = {request.id: (a, k, request) for a in asked for k, request in enumerate(a.requests)}
    plans = []
    for plan in subject._plans([request for a in asked for request in a.requests]):
        plans.append(plan)
        hidden = subject.runner.launch_forward(plan)
        logits, _ = subject.logits(subject.runner.weights, hidden.last_RE)
        at, sampled = [i for i, c in enumerate(plan.chunks) if c.samples], []
        for row, chunk in zip(at, plan.sampled, strict=True):
            a, k, request = known[chunk.request_id]
            sampled.append(a.take(k, request.output, np.asarray(logits[row], np.float64)))
        subject.teller.tell(Entry(plan, sampled, None))
        subject.parts.scheduler.update(plan, sampled)
    reasons = Counter(str(code) for plan in plans for _, code in plan.reasons)
    print(len(plans), "steps:", dict(reasons), "hits:", subject.parts.scheduler.num_hit_tokens, file=sys.stderr)
    return {
        "format": FORMAT,
        "model": model if isinstance(model, str) else model.name,
        "made_with": {"numpy": version("numpy")},
        "options": options,
        "requests": [a.to_json() for a in asked],
        "plans": [to_json(plan) for plan in plans],
    }


class _Asked:
    """One prompt, its requests, and what is drawn for each."""

    def __init__(self, name: str, ids: list[int], params: dict[str, Any]):
        self.name, self.ids, self.params = name, ids, params
        self.sampling = SamplingParams(**params, ignore_eos=True)
        n = self.sampling.n
        self.requests: list[Request] = []
        for k in range(n):
            own = name if n == 1 else f"{k}_{name}"
            key = request_key(self.sampling.seed or 0, k)
            request = Request(own, list(ids), self.sampling, key, arrival=100 * int(name) + k, index=k)
            request.first = self.requests[0] if self.requests else None
            self.requests.append(request)
        self.streams: list[dict[str, list]] = [
            {"tokens": [], "gaps": [], "logprobs": [], "top_ids": [], "top_logprobs": []} for _ in range(n)
        ]

    def take(self, k: int, output: list[int], logits_V: np.ndarray) -> int:
        """Draws the next token of the k-th sample. One that is preempted is not drawn again: it is known."""
        seed = self.sampling.seed or 0
        drawn, gap = token(logits_V, asked_of(self.sampling), self.ids, output, seed + k)
        logprobs = logits_V - logits_V.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        top = np.argsort(-logprobs, kind="stable")[:NUM_TOP]
        row = drawn, gap, logprobs[drawn], top.tolist(), [round(float(x), 6) for x in logprobs[top]]
        for value, values in zip(row, self.streams[k].values(), strict=True):
            values.append(round(float(value), 6) if isinstance(value, float) else value)
        return drawn

    def to_json(self) -> dict[str, Any]:
        params = self.params | {"ignore_eos": True}
        return {"id": self.name, "ids": self.ids, "params": params, "streams": self.streams}


def main() -> None:
    ids = tokenized("smollm2", [text for text, _ in WANTED])
    wanted = [(i, params) for i, (_, params) in zip(ids, WANTED, strict=True)]
    value = make_trace("smollm2", None, wanted, OPTIONS)
    parts = {name: json.dumps(x) for name, x in value.items() if name not in ("requests", "plans")}
    for name in ("requests", "plans"):
        parts[name] = "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in value[name]) + "\n]"
    SHIPPED.parent.mkdir(exist_ok=True)
    SHIPPED.write_text("{" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n")


if __name__ == "__main__":
    main()
