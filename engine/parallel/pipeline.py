"""The stages of a pipeline (decision 026): what each does, and all of them in one process (JAX).

Where each has processes of its own (torch), stage_runner.py has them send what here is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...models import step
from ...models.interface import Array, ArraySpec, CacheLayout, ModelSpec, StepInput
from ...models.stage import HIDDEN, taps_of, with_rows_from_before
from ..batch import token_input
from ..expert_load import ExpertLoads
from ..plan import Plan
from ..runner import Hidden, Runner
from ..warm_up import Call, experts, forwards, heads, updates


class Stage(Runner):
    """A Runner of some layers. The first stage looks tokens up, which the last one samples.

    What is sampled reaches the first one in a later plan, when a step wants it: the host has read it by then, and no
    step waits for the one before it.
    """

    @property
    def is_first(self) -> bool:
        return HIDDEN not in self.model.extra

    @property
    def is_last(self) -> bool:
        return "final_norm" in self.model.weights

    @property
    def layers(self) -> range:
        """Those of the whole model that it has."""
        return range(self.model.first_layer, self.model.first_layer + len(self.model.attention))

    def use(self, model: ModelSpec, layout: CacheLayout) -> None:
        super().use(model, layout)
        run, outs = partial(step.forward_stage, model=model, layout=layout), ("rows_of_all", "cache")
        self.forward_stage = self.backend.compile(run, ("weights", "cache", "inputs"), outs, "cache")
        self.put = self.backend.compile(step.put_tokens, ("rows", "at", "places", "tokens"), ("rows",), "rows")

    def prepare(self, plan: Plan) -> None:
        super().prepare(plan)
        if self.is_first and (found := self._sampled(plan)):
            self.cache = step.with_rows(self.cache, self.put(self.cache.rows, *found))

    def _sampled(self, plan: Any) -> tuple[np.ndarray, ...]:
        """Where the tokens belong that a plan says were sampled, and they; empty: it names none."""
        return token_input(plan.tokens, self.shapes, self.scratch) if plan.tokens else ()

    def calls(self) -> Iterator[Call]:
        yield from updates(self)
        for n in self.shapes.admitted if self.is_first else ():
            yield self.put, (self.cache.rows, *token_input(((self.scratch, 0, 0),) * n, self.shapes, self.scratch))
        for program, (weights, cache, inputs) in forwards(self):
            inputs = inputs if self.is_first else with_rows_from_before(inputs, self.room(inputs.num_tokens))
            yield program if self.is_last else self.forward_stage, (weights, cache, inputs)
        yield from experts(self)
        if self.is_last:
            yield from heads(self)
            yield from self.read_head.calls(self.weights, self.cache.rows, self.own)

    def first_runs(self) -> None:
        """Nothing: a stage alone is not a step."""

    def room(self, num_tokens: int) -> Array:
        """Rows as the stage before makes them."""
        row = self.model.extra[HIDDEN]
        return self.backend.zeros(self.own(ArraySpec((num_tokens, *row.shape), (None, *row.axes), row.dtype)))


class Earlier(Stage):
    """A stage that is not the last. `send` brings rows to the devices of the next."""

    def __init__(self, send: Callable[[Array], Array], *args: Any, **kwargs: Any):
        self.send = send
        super().__init__(*args, **kwargs)

    def run(self, inputs: StepInput) -> tuple[Array, Hidden]:
        """Runs the layers on a step, `prepare` having been called. Returns its rows on the next devices, and taps."""
        inputs = replace(inputs, taps=taps_of(inputs.taps, self.layers) + self.taps)
        rows, self.cache = self.forward_stage(self.weights, self.cache, inputs)
        return self.send(rows.pop("last")), self._kept(None, rows)


class Pipeline(Stage):
    """The last stage, which has the others do what it is told. Every call only enqueues: each stage has devices of its
    own, which go on with the next step as soon as they are done with one.
    """

    def __init__(self, earlier: Sequence[Earlier], *args: Any, **kwargs: Any):
        self.earlier = tuple(earlier)
        super().__init__(*args, **kwargs)

    @property
    def stages(self) -> tuple[Runner, ...]:
        return (*self.earlier, self)

    @property
    def load_of_all(self) -> ExpertLoads | None:
        loads = [stage.expert_load for stage in self.stages if stage.expert_load]
        return ExpertLoads(loads) if loads else None

    def prepare(self, plan: Plan) -> None:
        for stage in self.earlier:
            stage.prepare(plan)
        super().prepare(plan)

    def _run_forward(self, inputs: StepInput) -> Hidden:
        given, found, routed = inputs, {}, ()
        for stage in self.earlier:
            x_TE, kept = stage.run(given)
            given = with_rows_from_before(inputs, x_TE)
            found, routed = found | kept.rows, routed + kept.routed
        hidden = super()._run_forward(given)
        return Hidden(hidden.last_RE, found | hidden.rows, routed + hidden.routed)

    def reset(self) -> None:
        for stage in self.earlier:
            stage.reset()
        super().reset()

    def sleep(self, level: int) -> None:
        for stage in self.earlier:
            stage.sleep(level)
        super().sleep(level)

    def wake_up(self, tags: Sequence[str], weights: Any = None) -> None:
        for stage in self.earlier:
            stage.wake_up(tags, weights)
        super().wake_up(tags, weights)

    def warm_up(self) -> int:
        return sum(stage.warm_up() for stage in self.earlier) + super().warm_up()
