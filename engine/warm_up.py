"""What a runner compiles before the first request: every program, with padding of every shape of the chains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.interface import ArraySpec, ModelSpec, Sampling, SharedPrefixes, StepInput
from ..models.sampling import PARAMS, VARIANTS, at_least
from ..models.step import with_rows
from .batch import PLAIN, all_allowed, edit_values, move_input, padded, row_values, with_extra
from .plan import Admission, Transfer

if TYPE_CHECKING:
    from .runner import Runner

JOINED = ("greedy", "sample")  # variants of the heads that are joined with a forward: what most requests ask for
Call = tuple[Any, tuple[Any, ...]]  # a program, and its arguments


def every_program(runner: Runner) -> Iterator[Call]:
    """Those of a Runner that has all layers."""
    yield from updates(runner)
    yield from forwards(runner)
    yield from heads(runner)
    yield from experts(runner)
    yield from runner.read_head.calls(runner.weights, runner.cache.rows, runner.own)


def rehearsal(runner: Runner) -> Iterator[Call]:
    """The same with a model of one layer of each kind: all kernels of ours, and few launches.

    The heads that few ask for, and what is read of a step, come in one size: no kernel of theirs depends on it.
    """
    thin, layers = copy.copy(runner), _one_of_each_kind(runner.model)
    thin.shapes = replace(runner.shapes, seldom=runner.shapes.sampled[:1])
    thin.read_head = copy.copy(runner.read_head)
    thin.read_head.shapes = replace(runner.shapes, tokens=runner.shapes.tokens[:1])
    specs = runner.model.weights["layers"]
    home = {n: (g, i) for g, group in enumerate(runner.model.groups) for i, n in enumerate(group.layers)}
    groups = [tuple(n for n in group.layers if n in layers) for group in runner.model.groups]
    cache = tuple(tuple(runner.cache.groups[home[n][0]][home[n][1]] for n in group) for group in groups)
    thin.weights = runner.weights | {"layers": [runner.weights["layers"][n] for n in layers]}
    thin.cache = replace(runner.cache, groups=cache)
    model = replace(
        runner.model,
        weights=runner.model.weights | {"layers": [specs[n] for n in layers]},
        attention=tuple(runner.model.attention[n] for n in layers),
        groups=tuple(
            replace(group, layers=tuple(layers.index(n) for n in own))
            for group, own in zip(runner.model.groups, groups, strict=True)
        ),
    )
    thin.use(model, runner.layout)
    yield from thin.every_call()


def _one_of_each_kind(model: ModelSpec) -> list[int]:
    """The first layers of each cache group with weights and attention of their own."""
    kinds: dict[Any, int] = {}
    for g, group in enumerate(model.groups):
        for n in group.layers:
            kinds.setdefault((g, model.attention[n], *model.weights["layers"][n].items()), n)
    return sorted(kinds.values())


def first_runs(runner: Runner) -> None:
    """Runs on padding, once, what most requests are computed by: where a first run takes what no later one does.

    The largest come first: they take the memory in which others find room, and the host goes on meanwhile.
    """
    if not runner.backend.loads_late:
        return
    for program, (weights, _, *step) in sorted(forwards(runner), key=lambda call: -call[1][2].num_tokens):
        *_, runner.cache = program(weights, runner.cache, *step)
    for program, (_, *values) in admissions(runner):
        runner.cache = with_rows(runner.cache, program(runner.cache.rows, *values))
    for program, (weights, _, hidden, sampling) in heads(runner):
        if sampling.variant in PLAIN and sampling.num_logprobs < 0 and sampling.mask_RW is None:
            output, rows = program(weights, runner.cache.rows, hidden, sampling)
            runner.cache = with_rows(runner.cache, rows)
            runner.backend.prefetch(output.token_ids_R)
            runner.backend.read(output.token_ids_R)


def padding(runner: Runner, seqs: int, tokens: int, decode: bool, width: int) -> StepInput:
    """A step of nobody, of these padded sizes."""
    tables = tuple(np.zeros((seqs, width), np.int32) for _ in runner.tables)
    return StepInput(padded((), seqs, runner.scratch), np.zeros(seqs + 1, np.int32), tables, tokens, decode)


def updates(runner: Runner) -> Iterator[Call]:
    """Admitting, also what asks for edits of its logits, and moving blocks."""
    shapes, groups, rows = runner.shapes, len(runner.tables), runner.cache.rows
    yield from admissions(runner)
    for n in shapes.admitted:
        fillers = (filler_of(runner.scratch, 1),) * n
        yield runner.set_rows, (rows, *edit_values(fillers, shapes, runner.scratch, runner.model.vocab_size))
    for n in shapes.moved:
        pairs = [Transfer(g, 0, 0) for g in range(groups) for _ in range(n)]
        yield runner.move_blocks, (runner.cache.groups, *move_input(pairs, groups, shapes))


def admissions(runner: Runner) -> Iterator[Call]:
    """Admitting."""
    for n in runner.shapes.admitted:
        for known in runner.shapes.known:
            fillers = (filler_of(runner.scratch, known),) * n
            yield runner.set_rows, (runner.cache.rows, *row_values(fillers, runner.shapes, runner.scratch))


def forwards(runner: Runner) -> Iterator[Call]:
    """Mixed steps and decode steps, alone and joined; each also with shared prefixes where steps may have some."""
    shapes, model = runner.shapes, (runner.weights, runner.cache)
    for width in shapes.widths:
        # first what takes longest to compile
        for n in shapes.tokens:
            for inputs in with_extra(padding(runner, runner.scratch, n, False, width), runner.model):
                yield _tapped(runner, inputs)
        for n in shapes.seqs:
            yield _tapped(runner, padding(runner, n, n, True, width))
        for n in shapes.joined:
            inputs = padding(runner, n, n, True, width)
            for variant in () if runner.taps else JOINED:
                yield runner.forward_and_head, (*model, inputs, runner.sampling_all(inputs, variant))
        for n in shapes.shared:
            inputs = replace(padding(runner, n, n, True, width), shared=_no_prefixes(runner, n))
            yield _tapped(runner, inputs)
        for n in shapes.shared_tokens:
            shared = _no_prefixes(runner, runner.scratch)
            yield _tapped(runner, replace(padding(runner, runner.scratch, n, False, width), shared=shared))


def _tapped(runner: Runner, inputs: StepInput) -> Call:
    """A forward of that step."""
    inputs = replace(inputs, taps=runner.taps)
    program = runner.forward if inputs.decode and not inputs.taps else runner.forward_all
    return program, (runner.weights, runner.cache, inputs)


def experts(runner: Runner) -> Iterator[Call]:
    """What is done with the experts that a step was routed to."""
    shapes, about = runner.shapes, runner.expert_load or runner.routed
    if about is None:
        return
    for n in sorted({*shapes.seqs, *shapes.tokens, *shapes.shared, *shapes.shared_tokens}):
        spec = ArraySpec((n, about.num_chosen), (None, None), "int32")
        found = tuple(runner.backend.zeros(runner.own(spec)) for _ in about.taps)
        if runner.expert_load:
            yield runner.expert_load.count, (runner.expert_load.counts, found)
        if runner.routed:
            yield runner.routed.run, (runner.cache.rows, found)


def heads(runner: Runner) -> Iterator[Call]:
    shapes, vocab_size = runner.shapes, runner.model.vocab_size
    size = runner.model.weights["final_norm"].shape[0]
    hidden = runner.backend.zeros(runner.own(ArraySpec((runner.scratch, size), (None, None))))
    for variant in VARIANTS if runner.processors else VARIANTS[:-1]:
        for k in shapes.logprobs[:-1]:
            for n in shapes.heads(variant, k):
                rows, mask = (padded((), n, 0), padded((), n, runner.scratch)), all_allowed(n, vocab_size)
                for m in (None, mask) if runner.masks and at_least(variant, "edits") else (None,):
                    sampling = Sampling(*rows, variant, k, runner.digest, m, runner.logprobs_mode)
                    yield runner.head_of(variant), (runner.last_weights, runner.cache.rows, hidden, sampling)


def _no_prefixes(runner: Runner, seqs: int) -> tuple[SharedPrefixes | None, ...]:
    return runner.prefixes.nothing(seqs) if runner.prefixes else ()


def filler_of(scratch: int, known: int) -> Admission:
    """An admission of nobody, of so many tokens."""
    return Admission(scratch, (0,) * known, 0, 1, (0, 0), (0.0,) * len(PARAMS))
