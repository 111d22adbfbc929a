"""A model's part on one stage of a pipeline: the same functions over neighbouring layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .interface import Array, ArraySpec, ModelSpec, Step, StepInput
from .layers import HIDDEN as BY_TOKENS
from .layers import WHOLE

HIDDEN = "hidden"  # in StepInput.extra of every stage but the first: the rows [T, E] that the stage before has made


def stage_of(model: ModelSpec, layers: range) -> ModelSpec:
    """The stage that has these layers of a whole model.

    Its cache groups are the model's, so that one set of block tables serves all stages, some of them perhaps without a
    layer. What names layers, taps and `mixture`, counts them as the whole model does.
    """
    if not 0 <= layers.start < layers.stop <= len(model.attention) or layers.step != 1 or model.first_layer:
        raise ValueError(f"layers {layers} are no stage of a whole model of {len(model.attention)} layers")
    if len(layers) == len(model.attention):
        return model
    groups = (replace(g, layers=tuple(n - layers.start for n in g.layers if n in layers)) for g in model.groups)
    mixture = model.mixture
    experts = tuple(n for n in mixture.layers if n in layers) if mixture else ()
    stage = replace(
        model,
        weights=stage_tree(model, layers, model.weights),
        checkpoint=stage_tree(model, layers, model.checkpoint),
        groups=tuple(groups),
        attention=model.attention[layers.start : layers.stop],
        mixture=replace(mixture, layers=experts) if mixture and experts else None,
        first_layer=layers.start,
    )
    if layers.start == 0:
        return stage
    row = ArraySpec((model.weights["embed"].shape[1],), (None,))
    return replace(stage, embed=rows_from_before, extra={HIDDEN: row})


def stage_tree(model: ModelSpec, layers: range, tree: dict[str, Any]) -> dict[str, Any]:
    """The part that a stage needs of a tree like the model's weights.

    The table is needed where tokens come in, what follows the layers at the last stage, where a tied table is both.
    """
    is_first, is_last = layers.start == 0, layers.stop == len(model.attention)
    found = {"layers": tree["layers"][layers.start : layers.stop]}
    for name, part in tree.items():
        tied = "unembed" not in tree
        needed = (is_first or (is_last and tied)) if name == "embed" else is_last or name == "ropes"
        if name != "layers" and needed:
            found[name] = part
    return found


def rows_from_before(w: dict, step: Step, ops: Any) -> Array:
    """`embed` of a later stage."""
    return ops.constrain(step.extra[HIDDEN], WHOLE, BY_TOKENS)


def taps_of(taps: Sequence[str], layers: range) -> tuple[str, ...]:
    """Those that stages with these layers keep, by name: each once, in an order that is the same in all stages."""
    return tuple(sorted({name for name in taps if _layer_of(name) in layers}))


def _layer_of(tap: str) -> int:
    """The layer whose stage keeps it; -1: the last stage does, behind all layers."""
    if tap == "embed":
        return 0
    kind, _, rest = tap.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "layer" and number.isdecimal() else -1


def with_rows_from_before(inputs: StepInput, x_TE: Array) -> StepInput:
    """A step as a later stage gets it: what requests brought for the table is of no use there."""
    return replace(inputs, extra={HIDDEN: x_TE})
