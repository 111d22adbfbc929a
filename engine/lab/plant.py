"""Changes to one part of an engine that is already built: to plant a fault in it, or to try an idea."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...models.interface import AttentionSpec
from ...models.stage import HIDDEN
from ..plan import Plan
from ..replica import check_alone
from ..runner import Runner


class HasRunner(Protocol):
    """An LLM, or a subject of a cross-check."""

    @property
    def runner(self) -> Runner: ...


def one_stage(runner: Runner) -> None:
    """Raises NotImplementedError for a pipeline, of which a Runner holds a part of the model alone."""
    if HIDDEN in runner.model.extra:
        raise NotImplementedError("the laboratory looks into engines of one stage: leave out pipeline_parallel_size")


@dataclass(frozen=True)
class Changed(AttentionSpec):
    """The spec of a layer that is computed otherwise. It is part of every program's key, unlike a layer's number."""

    layer: int = -1


def change_layer(engine: HasRunner, n: int, change: Callable[[Callable], Callable]) -> None:
    """Has layer n computed by change(layer): both take (weights, cache, x_TE, step, spec, ops, layout).

    Of the layer's name and place nothing changes, so taps of it are named as before.
    """
    check_alone(engine)
    one_stage(engine.runner)
    model = engine.runner.model
    if not 0 <= n < len(model.attention):
        raise ValueError(f"layer {n}: the model has layers 0 to {len(model.attention) - 1}")
    layer, changed = model.layer, change(model.layer)

    def chosen(w: Any, cache: Any, x_TE: Any, step: Any, spec: AttentionSpec, ops: Any, layout: Any) -> Any:
        run = changed if isinstance(spec, Changed) and spec.layer == n else layer
        return run(w, cache, x_TE, step, spec, ops, layout)

    attention = list(model.attention)
    fields: dict[str, Any] = vars(attention[n]) | {"layer": n}
    attention[n] = Changed(**fields)
    engine.runner.use(replace(model, layer=chosen, attention=tuple(attention)), engine.runner.layout)


def change_plans(engine: HasRunner, change: Callable[[Plan], Plan]) -> None:
    """Has the engine's runner carry out change(plan) for every plan that the scheduler makes."""
    check_alone(engine)
    launch = engine.runner.launch_forward
    # every step is to go through it
    engine.runner.shapes = replace(engine.runner.shapes, joined=())

    def changed(plan: Plan, taps: tuple[str, ...] = ()) -> Any:
        return launch(change(plan), taps)

    engine.runner.launch_forward = changed
