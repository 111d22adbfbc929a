"""What a cross-check compares: implementations that can be shown a step, told its tokens, and let run freely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ...models.interface import ModelSpec
from ..build import Parts, build
from ..config import engine_config
from ..request import Request
from ..sampling_params import SamplingParams
from ..step_log import Entry
from .numpy_backend import NumpyBackend
from .replay import Teller

EVERYTHING = ("*",)


class Subject(Protocol):
    """What is compared: it can be shown a step, told its tokens, and let run freely."""

    name: str
    dtype: str

    def learn(self, sequences: dict[str, list[int]]) -> None:
        """Makes ready to be shown the steps of these sequences, known by request id."""
        ...

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Taps [T, ...] of the step's tokens by name, and the logits of its sampled rows [R, V]."""
        ...

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, every one from the subject's own before it."""
        ...


class EngineSubject:
    """An implementation of ours: an engine's parts. The taps come out of its compiled steps."""

    def __init__(self, name: str, parts: Parts):
        self.name, self.parts, self.runner, self.dtype = name, parts, parts.runner, parts.config.dtype
        self.teller = Teller(parts.runner)
        compile = parts.backend.compile
        self.logits = compile(_logits(parts.model), ("weights", "hidden"), ("logits", "hidden"), "hidden")

    def learn(self, sequences: dict[str, list[int]]) -> None:
        """Empties the cache: the steps themselves say all that is to be known."""
        self.runner.reset()

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        runner, read = self.runner, self.runner.backend.read
        hidden = runner.launch_forward(step.plan, EVERYTHING)
        runner.launch_head(step.plan, hidden).result()
        self.teller.tell(step)
        at = [i for i, c in enumerate(step.plan.chunks) if c.samples]
        logits, _ = self.logits(runner.weights, hidden.last_RE)
        count = sum(c.num_tokens for c in step.plan.chunks)
        return {name: read(x)[:count] for name, x in hidden.rows.items() if name != "last"}, read(logits)[at]

    def run(self, requests: Sequence[Request]) -> Iterator[Entry]:
        """Runs requests to their end, one step at a time from an empty cache, and yields what each step was."""
        scheduler = self.parts.scheduler
        self.runner.reset()
        scheduler.abandon()
        for r in requests:
            scheduler.add(r)
        while scheduler.has_work:
            plan = scheduler.schedule()
            assert plan is not None
            tokens = self.runner.launch(plan).result().token_ids
            scheduler.update(plan, tokens)
            yield Entry(plan, tokens, None)

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        requests = [make_request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
        for _ in self.run(requests):
            pass
        return [r.output for r in requests]


def make_subject(name: str, model: Any, weights: Any, options: dict[str, Any]) -> Subject:
    backend, _, attention = name.partition(":")
    if name == "hf":
        from .hf_torch import HfSubject

        return HfSubject(model)
    if name == "oracle":
        config = engine_config(model, **{k: v for k, v in options.items() if k not in ("dtype", "device")})
        return EngineSubject(name, build(config, weights, NumpyBackend()))
    if backend not in ("jax", "torch"):
        raise ValueError(f"{name!r} is no implementation: use oracle, hf, or jax or torch with :attention")
    config = engine_config(model, backend=backend, attention=attention or "auto", **options)
    return EngineSubject(name, build(config, weights))


def make_request(i: int, prompt: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(str(i), list(prompt), params, arrival=i)


def _logits(model: ModelSpec) -> Any:
    def logits(weights: Any, hidden_RE: Any, *, ops: Any) -> Any:
        # the rows go back as they came: a program gives back what it consumes
        return model.unembed(weights, hidden_RE, ops), hidden_RE

    return logits
