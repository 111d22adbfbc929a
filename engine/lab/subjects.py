"""What a cross-check compares: implementations that can be shown a step, here or in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ...models.interface import ModelSpec
from ..build import Parts, build
from ..config import engine_config
from ..llm import LLM
from ..plan import Plan
from ..replica import check_alone
from ..request import Request
from ..runner import Hidden
from ..sampling_params import SamplingParams
from ..step_log import Entry
from ..user_code import function_in_file
from .numpy_backend import NumpyBackend
from .plant import one_stage
from .remote import Remote
from .replaying import Teller

EVERYTHING = ("*",)


class Subject(Protocol):
    """What is compared: it can be shown a step, told its tokens, and let run freely."""

    name: str

    @property
    def dtype(self) -> str: ...

    @property
    def has_cache(self) -> bool:
        """Whether there are block tables and a cache to look into."""
        ...

    @property
    def rounds(self) -> bool:
        """Whether its cache holds keys and values in another dtype than they are computed in."""
        ...

    def learn(self, sequences: dict[str, list[int]]) -> None:
        """Makes ready to be shown the steps of these sequences, known by request id."""
        ...

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Taps [T, ...] of the step's tokens by name, and the logits of its sampled rows [R, V]."""
        ...

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, every one from the subject's own before it."""
        ...


class CachedSubject(Subject, Protocol):
    """One that has a cache like an engine's, and a scheduler."""

    @property
    def block_size(self) -> int: ...

    def lead(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Entry], dict[str, list[int]]]:
        """Runs the prompts to their end: the steps that were made, and the tokens of each request."""
        ...

    def table(self, layer: int, row: int) -> list[int]:
        """The block table of a row, in the cache group of a layer."""
        ...

    def content(self, layer: int, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        """What these blocks of a layer hold, by array: [len(blocks), ...]."""
        ...


class EngineSubject:
    """An implementation of ours: an engine's parts. The taps come out of its compiled steps."""

    has_cache = True

    def __init__(self, name: str, parts: Parts | LLM):
        check_alone(parts)
        one_stage(parts.runner)
        self.name, self.parts, self.runner, self.dtype = name, parts, parts.runner, parts.config.dtype
        self.block_size, self.teller = parts.runner.block_size, Teller(parts.runner)
        specs = parts.layout.spec(parts.model.attention[0], 2).values()
        self.rounds = any(s.dtype is not None for s in specs)
        compile = parts.backend.compile
        self.logits = compile(_logits(parts.model), ("weights", "hidden"), ("logits", "hidden"), "hidden")

    def learn(self, sequences: dict[str, list[int]]) -> None:
        """Empties the cache: the steps themselves say all that is to be known."""
        self.runner.reset()

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        hidden, logits = self._step(step, EVERYTHING)
        count = sum(c.num_tokens for c in step.plan.chunks)
        read = self.runner.backend.read
        return {name: read(x)[:count] for name, x in hidden.rows.items() if name != "last"}, logits

    def _step(self, step: Entry, taps: tuple[str, ...] = ()) -> tuple[Hidden, np.ndarray]:
        """Runs one step and is told its tokens. Returns the hidden rows, and the logits [R, V] of its sampled rows."""
        runner = self.runner
        hidden = runner.launch_forward(step.plan, taps)
        runner.launch_head(step.plan, hidden).result()
        self.teller.tell(step)
        at = [i for i, c in enumerate(step.plan.chunks) if c.samples]
        logits, _ = self.logits(runner.weights, hidden.last_RE)
        return hidden, runner.backend.read(logits)[at]

    def table(self, layer: int, row: int) -> list[int]:
        return self.runner.tables[self._home(layer)[0]][row].tolist()

    def content(self, layer: int, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        g, i = self._home(layer)
        held = self.runner.backend.read_tree(self.runner.cache.groups[g][i])
        return {name: x[list(blocks)] for name, x in held.items()}

    def _home(self, layer: int) -> tuple[int, int]:
        """The cache group of a layer, and its place in it."""
        return next((g, x.layers.index(layer)) for g, x in enumerate(self.runner.model.groups) if layer in x.layers)

    def run(self, requests: Sequence[Request]) -> Iterator[Entry]:
        """Runs requests to their end, one step at a time from an empty cache, and yields what each step was."""
        for plan in self._plans(requests):
            tokens = self.runner.launch(plan).result().token_ids
            self.parts.scheduler.update(plan, tokens)
            yield Entry(plan, tokens, None)

    def forced(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Runs prompts with given tokens in place of its own. Yields a prompt's number, a token's, its logits [V]."""
        requests = [make_request(i, *each) for i, each in enumerate(zip(prompts, map(len, outputs), strict=True))]
        for plan in self._plans(requests):
            names = [(int(c.request_id), c.start + c.num_tokens) for c in plan.sampled]
            at = [(i, known - len(prompts[i])) for i, known in names]
            step = Entry(plan, [outputs[i][j] for i, j in at], None)
            for (i, j), logits_V in zip(at, self._step(step)[1], strict=True):
                yield i, j, logits_V
            self.parts.scheduler.update(plan, step.token_ids)

    def _plans(self, requests: Sequence[Request]) -> Iterator[Plan]:
        """The scheduler's plans from an empty cache to the requests' end; each must be read before the next."""
        scheduler = self.parts.scheduler
        self.runner.reset()
        scheduler.abandon()
        for r in requests:
            scheduler.add(r)
        while scheduler.has_work:
            plan = scheduler.schedule()
            assert plan is not None
            yield plan

    def lead(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Entry], dict[str, list[int]]]:
        requests = [make_request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
        steps = list(self.run(requests))
        return steps, {r.id: r.tokens for r in requests}

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        _, sequences = self.lead(prompts, max_tokens)
        return [sequences[str(i)][len(prompt) :] for i, prompt in enumerate(prompts)]


class RemoteSubject:
    """A subject in a process of its own."""

    def __init__(self, name: str, model: Any, weights: Any, options: dict[str, Any]):
        self.name, self.remote = name, Remote(make_subject, name, model, weights, options)

    @property
    def dtype(self) -> str:
        return self.remote.call("dtype")

    @property
    def rounds(self) -> bool:
        return self.remote.call("rounds")

    @property
    def block_size(self) -> int:
        return self.remote.call("block_size")

    @property
    def has_cache(self) -> bool:
        return self.remote.call("has_cache")

    def lead(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Entry], dict[str, list[int]]]:
        return self.remote.call("lead", prompts, max_tokens)

    def learn(self, sequences: dict[str, list[int]]) -> None:
        self.remote.call("learn", sequences)

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return self.remote.call("look", step)

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        return self.remote.call("free_run", prompts, max_tokens)

    def table(self, layer: int, row: int) -> list[int]:
        return self.remote.call("table", layer, row)

    def content(self, layer: int, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        return self.remote.call("content", layer, blocks)


def make_subject(name: str, model: Any, weights: Any, options: dict[str, Any]) -> Subject:
    """The implementation of that name: oracle, hf, backend:attention, or what a user's FILE.py:NAME makes."""
    if is_users(name):
        return _users_subject(name, model, weights, options)
    backend, _, attention = name.partition(":")
    if name == "hf":
        from .hf_torch import HfSubject

        return HfSubject(model)
    if name == "oracle":
        config = engine_config(model, **{k: v for k, v in options.items() if k not in ("dtype", "device")})
        return EngineSubject(name, build(config, weights, NumpyBackend()))
    check_name(name)
    config = engine_config(model, backend=backend, attention=attention or "auto", **options)
    return EngineSubject(name, build(config, weights))


def is_users(name: str) -> bool:
    """Whether it is FILE.py:NAME."""
    return name.rpartition(":")[0].endswith(".py")


def check_name(name: str) -> None:
    """Raises ValueError for a name of which nothing can be made."""
    if name not in ("hf", "oracle") and name.partition(":")[0] not in ("jax", "torch") and not is_users(name):
        raise ValueError(f"{name!r} is no implementation: use oracle, hf, jax or torch with :attention, FILE.py:NAME")


def _users_subject(name: str, model: Any, weights: Any, options: dict[str, Any]) -> Subject:
    def make(of: str, **changes: Any) -> Subject:
        check_name(of)
        return make_subject(of, model, weights, options | changes)

    subject = function_in_file(name)(make)
    if not hasattr(subject, "look"):
        raise ValueError(f"{name} returns {subject!r}, which is nothing that make() makes")
    subject.name = name
    return subject


def make_request(i: int, prompt: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(str(i), list(prompt), params, arrival=i)


def _logits(model: ModelSpec) -> Any:
    def logits(weights: Any, hidden_RE: Any, *, ops: Any) -> Any:
        # the rows go back as they came: a program gives back what it consumes
        return ops.xp.astype(model.unembed(weights, hidden_RE, ops), ops.xp.float32), hidden_RE

    return logits
