"""Weights, the one live CacheState, and the compiled programs. launch() returns before the device is done."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from ..models import step
from ..models.interface import (
    Array,
    CacheLayout,
    CacheState,
    Mixture,
    ModelSpec,
    Output,
    Sampling,
    StepInput,
    layer_specs,
    map_tree,
)
from ..models.logit_edits import LogitsProcessor
from ..models.sampling import row_specs
from .backend import Backend
from .batch import Shapes, edit_values, move_input, row_values, sampling_input, step_input
from .collector import Paused, age
from .expert_load import ExpertLoad
from .logits_processors import checked_processors
from .plan import Admission, Plan, Transfer
from .prompt_embeds import PromptEmbeds
from .read_head import ReadHead, ReadResult, Reads
from .recipe import Recipe
from .routed_experts import RoutingStack, expert_taps
from .shared_prefixes import PrefixFinder
from .steady import Steady
from .warm_up import JOINED, Call, every_program, first_runs, rehearsal

if TYPE_CHECKING:
    from .weights_source import WeightsSource

log = logging.getLogger(__name__)

# of the head: arguments, results, and what it consumes
HEAD = ("last_weights", "rows", "hidden", "sampling"), ("output", "rows"), "rows"


@dataclass(frozen=True)
class Hidden:
    """What a forward leaves: the last hidden row of each sequence, and of a mixed step all rows [T, E], by name."""

    last_RE: Array | None  # None: this is no last stage
    rows: dict[str, Array]
    routed: tuple[Array, ...] = ()  # experts [T, layers, chosen] of one stage after the other, where requests are told


@dataclass(frozen=True)
class StepResult:
    """What a step sampled, on the host; one entry a sampled chunk. Logprobs are there if the plan asked for them.

    `reads` has one entry for each of the plan's.
    """

    token_ids: list[int]
    logprobs: np.ndarray | None = None  # [R], of the sampled tokens
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None  # [R, N]
    top_logprobs: np.ndarray | None = None
    digests: list[int] | None = None
    id_logprobs: np.ndarray | None = None  # [R, N], of the ids that were asked for by name
    id_ranks: np.ndarray | None = None
    reads: list[ReadResult] = field(default_factory=list)
    routed: np.ndarray | None = None  # experts of all its tokens, [tokens, layers, chosen]


@dataclass(frozen=True)
class Pending:
    """A launched step whose result has not been read."""

    plan: Plan
    output: Output | None
    backend: Backend
    reads: Reads | None = None
    routed: tuple[Array, ...] = ()

    def is_ready(self) -> bool:
        """Whether what it sampled is there: result() would not wait."""
        return self.output is None or self.backend.is_ready(self.output.token_ids_R)

    def result(self) -> StepResult:
        """Waits for the step and reads it."""
        reads = self.reads.result(self.plan, self.backend) if self.reads else []
        routed = np.concatenate([self.backend.read(x) for x in self.routed], 1) if self.routed else None
        if self.output is None:
            return StepResult([], reads=reads, routed=routed)
        count, o = len(self.plan.sampled), self.output

        def read(x: Array | None) -> Any:
            return None if x is None else self.backend.read(x)[:count]

        digests = read(o.digests_R)
        return StepResult(
            read(o.token_ids_R).tolist(),
            read(o.logprobs_R),
            read(o.ranks_R),
            read(o.top_ids_RN),
            read(o.top_logprobs_RN),
            None if digests is None else digests.tolist(),
            read(o.id_logprobs_RN),
            read(o.id_ranks_RN),
            reads,
            routed,
        )


def cache_specs(
    model: ModelSpec, layout: CacheLayout, num_blocks: Sequence[int], max_num_seqs: int, max_model_len: int
) -> CacheState:
    """The ArraySpecs of a whole CacheState, in its own shape."""
    groups = tuple(
        tuple(layer_specs(layout, model.attention[i], n, max_num_seqs + 1) for i in group.layers)
        for n, group in zip(num_blocks, model.groups, strict=True)
    )
    return CacheState(groups, row_specs(max_num_seqs + 1, max_model_len, model.vocab_size))


def empty_cache(specs: CacheState, backend: Backend) -> CacheState:
    """A CacheState of zeros on the device."""
    return CacheState(map_tree(backend.zeros, specs.groups), map_tree(backend.zeros, specs.rows))


class Runner:
    """Owns what lives on the device. Everything it is told comes in a Plan."""

    def __init__(
        self,
        backend: Backend,
        model: ModelSpec,
        layout: CacheLayout,
        weights: dict[str, Any],
        *,
        num_blocks: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        shapes: Shapes,
        digest: bool = False,
        processors: Sequence[LogitsProcessor] = (),
        logprobs_mode: str = "raw_logprobs",
        masks: bool = False,
        expert_load: bool = False,
        routed: bool = False,
        mixture: Mixture | None = None,  # the experts of which it knows where tokens went
    ):
        self.backend, self.model, self.shapes, self.digest = backend, model, shapes, digest
        self.logprobs_mode, self.is_rehearsed = logprobs_mode, False
        self.masks = masks  # whether warm_up expects grammar masks
        self.block_size, self.scratch = layout.block_size, max_num_seqs
        windows = [group.window for group in model.groups]
        self.prefixes = PrefixFinder(windows, layout.block_size) if shapes.shared else None
        self.steady = Steady(layout.block_size)
        self.specs = self.own(cache_specs(model, layout, num_blocks, max_num_seqs, max_model_len))
        # of its weights and of itself; who builds it says so
        self.source: WeightsSource | None = None
        self.recipe: Recipe | None = None
        self.stored: Any = None  # the weights on the host, asleep
        self._use_weights(weights)
        for name, specs in (
            ("weights", model.weights),
            ("last_weights", {name: s for name, s in model.weights.items() if name != "layers"}),
            ("cache", self.specs),
            ("rows", self.specs.rows),
            ("groups", self.specs.groups),
        ):
            backend.declare(name, specs)
        self.use(model, layout)
        head, compile = partial(step.head, model=model), backend.compile
        self.head = compile(head, *HEAD)
        self.processors, self.num_late_processors = tuple(processors), 0
        self.head_with_processors = self._compile_processors()
        self.read_head = ReadHead(backend, model, shapes, logprobs_mode)
        self.set_rows = compile(step.set_rows, ("rows", "at", "values"), ("rows",), "rows")
        self.move_blocks = compile(step.move_blocks, ("groups", "source", "target"), ("groups",), "groups")
        self.mixture, known = mixture, mixture if self.learns_experts else None
        # what every step has to keep, sorted as replicas that step together have their taps
        self.taps = tuple(sorted(expert_taps(mixture))) if mixture and (expert_load or routed) else ()
        self.expert_load = ExpertLoad(backend, known) if expert_load and known else None
        self.routed = RoutingStack(backend, known) if routed and known else None
        # of requests that are alive, by id: whoever has them drops them
        self.embeds: WeakValueDictionary[str, PromptEmbeds] = WeakValueDictionary()
        self.reset()

    @property
    def learns_experts(self) -> bool:
        """Whether it is here that the experts of a step are counted, and laid out for whoever is told."""
        return True

    def own(self, specs: Any) -> Any:
        """Specs of what each replica has of its own. There is one."""
        return specs

    def same(self, args: Any) -> Any:
        """Arguments of a program, where each replica's are these."""
        return args

    def gathered(self, x: Array) -> Array:
        """What a program returned, of all replicas."""
        return x

    def use(self, model: ModelSpec, layout: CacheLayout) -> None:
        """Compiles the forward programs of a model, or of one that differs from it in its functions alone."""
        args, compile = ("weights", "cache", "inputs"), self.backend.compile
        given = {"model": model, "layout": layout, "max_num_seqs": self.scratch}
        self.model, self.layout = model, layout
        self.forward = compile(partial(step.forward, **given), args, ("hidden", "cache"), "cache")
        both = partial(step.forward_and_head, **given)
        self.forward_and_head = compile(both, (*args, "sampling"), ("output", "cache"), "cache")
        outs = ("hidden", "rows_of_all", "cache")
        self.forward_all = compile(partial(step.forward_all, **given), args, outs, "cache")

    def register(self, processor: LogitsProcessor) -> None:
        """Lets requests select one more. The head that holds them all is compiled anew when a request selects one."""
        self.processors = checked_processors("logits_processors", (*self.processors, processor))
        self.head_with_processors = self._compile_processors()
        self.num_late_processors += 1
        log.warning(
            "logits processor %s is registered late: the next request that selects a processor waits for compiling. "
            "total_late_processors=%d",
            processor.name,
            self.num_late_processors,
        )

    def _compile_processors(self) -> Any:
        """The head with the processors. Apart from the other, which needs none of them and stays."""
        head = partial(step.head, model=self.model, processors=self.processors)
        return self.backend.compile(head, *HEAD)

    def reset(self) -> None:
        """Starts from an empty cache."""
        self._empty()

    def _empty(self) -> None:
        # the old one goes first: there may not be room for two
        vars(self).pop("cache", None)
        self.cache = empty_cache(self.specs, self.backend)
        self.tables = [np.zeros((self.scratch + 1, self.shapes.widths[-1]), np.int32) for _ in self.model.groups]
        self.steady.forget()
        if self.prefixes:
            self.prefixes.forget()

    def _use_weights(self, weights: dict[str, Any]) -> None:
        self.weights = weights
        # the head is called every step: what it does not read would only cost the host
        self.last_weights = {name: w for name, w in weights.items() if name != "layers"}

    def sleep(self, level: int) -> None:
        """Frees cache and weights; at level 1 these go to the host. Nothing may be in flight."""
        backend, weights, cache = self.backend, self.weights, self.cache
        del self.weights, self.last_weights, self.cache
        self.stored = backend.offload(weights) if level == 1 else None
        backend.free((None if level == 1 else weights, cache))

    def check_weights(self, weights: Any) -> None:
        """Raises ValueError if wake_up could not bring them back: others, if given."""
        if weights is not None or not (self.has_weights or self.stored is not None):
            assert self.source
            self.source.check(weights)

    def wake_up(self, tags: Sequence[str], weights: Any = None) -> None:
        """Brings back "weights" (others, if given) and an empty "kv_cache". What came back before a failure is kept."""
        if "weights" in tags and (weights is not None or not self.has_weights):
            if self.has_weights:
                old = self.weights
                del self.weights, self.last_weights
                self.backend.free(old)
            if weights is None and self.stored is not None:
                self._use_weights(self.backend.restore(self.stored))
            else:
                assert self.source
                self._use_weights(self.source.again(weights))
            self.stored = None
        if "kv_cache" in tags:
            self._empty()

    @property
    def stages(self) -> tuple[Runner, ...]:
        """The Runners of all stages that this process has, the last one behind the others."""
        return (self,)

    @property
    def load_of_all(self) -> ExpertLoad | None:
        """The load of all stages' experts."""
        return self.expert_load

    @property
    def has_weights(self) -> bool:
        """Whether they are on the device: not asleep."""
        return "weights" in vars(self)

    @property
    def has_cache(self) -> bool:
        """Whether there is a cache: not once `reset` has failed."""
        return "cache" in vars(self)

    def launch(self, plan: Plan, mask: np.ndarray | None = None) -> Pending:
        """Starts one step. Programs run in stream order, so all that was launched before has then been written."""
        if mask is not None or not self.shapes.joined:
            return self.launch_head(plan, self.launch_forward(plan), mask)
        inputs = self._inputs(plan)
        if self._is_joined(plan, inputs):
            return self._launch_joined(plan, inputs)
        return self.launch_head(plan, self._run_forward(inputs))

    def launch_forward(self, plan: Plan, taps: tuple[str, ...] = ()) -> Hidden:
        """Prepares, and runs the layers; returns the hidden rows that launch_head wants, and the taps."""
        inputs = self._inputs(plan)
        return self._run_forward(replace(inputs, taps=inputs.taps + taps) if taps else inputs)

    def _inputs(self, plan: Plan) -> StepInput:
        """Prepares, and returns the step."""
        self.prepare(plan)
        how = self.tables, self.shapes, self.block_size, self.embeds, self.prefixes, self.taps
        return self.steady.step_input(plan, partial(step_input, plan, *how))

    def _run_forward(self, inputs: StepInput) -> Hidden:
        return self._kept(*self._run_layers(inputs))

    def _run_layers(self, inputs: StepInput) -> tuple[Array, dict[str, Array]]:
        """Returns the last hidden row of each sequence, and what else the step keeps."""
        if inputs.decode and not inputs.taps:
            last, self.cache = self.forward(self.weights, self.cache, inputs)
            return last, {}
        last, rows, self.cache = self.forward_all(self.weights, self.cache, inputs)
        return last, rows

    def _kept(self, last: Array | None, rows: dict[str, Array]) -> Hidden:
        """What a forward leaves, once its experts are counted, and laid out for whoever is told."""
        if self.expert_load:
            self.expert_load.add(rows)
        if not self.routed:
            return Hidden(last, rows)
        routed, of_cache = self.routed.launch(self.cache.rows, rows)
        self.cache = step.with_rows(self.cache, of_cache)
        self.backend.prefetch(routed)
        return Hidden(last, rows, (routed,))

    def prepare(self, plan: Plan) -> None:
        """Fills rows and block tables, and moves blocks: all that a step asks for before its layers run."""
        if self.prefixes:
            self.prefixes.note(plan.admitted, plan.table_writes)
        self._admit(plan.admitted)
        for w in plan.table_writes:
            self.tables[w.group][w.row, w.index : w.index + len(w.blocks)] = w.blocks
        self._move(plan.transfers)

    def _is_joined(self, plan: Plan, inputs: StepInput) -> bool:
        """Whether a step and its head are one program: of a size and kind that is compiled so."""
        plain = plan.variant in JOINED and plan.num_logprobs < 0 and not any(plan.token_ids)
        size = inputs.decode and len(inputs.rows_S) in self.shapes.joined
        return plain and size and not inputs.taps and not any(inputs.shared) and len(plan.sampled) == len(plan.chunks)

    def _launch_joined(self, plan: Plan, inputs: StepInput) -> Pending:
        sampling = self.steady.sampling(plan, True, partial(self.sampling_all, inputs, plan.variant))
        output, self.cache = self.forward_and_head(self.weights, self.cache, inputs, sampling)
        return Pending(plan, self._fetched(output), self.backend)

    def sampling_all(self, inputs: StepInput, variant: str) -> Sampling:
        """Every sequence of a decode step sampled."""
        rows = inputs.rows_S
        at = np.arange(len(rows), dtype=np.int32)
        return Sampling(at, rows, variant, digest=self.digest, logprobs_mode=self.logprobs_mode)

    def launch_head(self, plan: Plan, hidden: Hidden, mask: np.ndarray | None = None) -> Pending:
        """Samples. Apart from the forward, so that a grammar mask (as sampling_input's) delays this half alone."""
        output, reads = self._sample(plan, hidden.last_RE, mask) if plan.sampled else None, None
        if plan.reads:
            reads, rows = self.read_head.launch(plan, self.weights, self.cache.rows, hidden.rows)
            self.cache = step.with_rows(self.cache, rows)
        return Pending(plan, output, self.backend, reads, hidden.routed)

    def _sample(self, plan: Plan, hidden: Array, mask: np.ndarray | None) -> Output:
        make = partial(sampling_input, plan, self.shapes, self.scratch, self.digest, mask, self.logprobs_mode)
        sampling = make() if mask is not None or plan.token_ids else self.steady.sampling(plan, False, make)
        output, rows = self.head_of(plan.variant)(self.last_weights, self.cache.rows, hidden, sampling)
        self.cache = step.with_rows(self.cache, rows)
        return self._fetched(output)

    def _fetched(self, output: Output) -> Output:
        """The output, on its way to the host."""
        for x in vars(output).values():
            if x is not None:
                self.backend.prefetch(x)
        return output

    def head_of(self, variant: str) -> Any:
        """The program of the head for a variant."""
        return self.head_with_processors if variant == "processors" else self.head

    def _admit(self, admitted: Sequence[Admission]) -> None:
        if not admitted:
            return
        for a in admitted:
            for table in self.tables:
                table[a.row] = 0
        at, values = row_values(admitted, self.shapes, self.scratch)
        self.cache = step.with_rows(self.cache, self.set_rows(self.cache.rows, at, values))
        if edited := [a for a in admitted if a.edits]:
            at, values = edit_values(edited, self.shapes, self.scratch, self.model.vocab_size)
            self.cache = step.with_rows(self.cache, self.set_rows(self.cache.rows, at, values))

    def _move(self, transfers: Sequence[Transfer]) -> None:
        if transfers:
            source, target = move_input(transfers, len(self.tables), self.shapes)
            self.cache = CacheState(self.move_blocks(self.cache.groups, source, target), self.cache.rows)

    def every_call(self) -> Iterator[Call]:
        """Every program with arguments of every shape, as warm_up wants them: padding only, and never run."""
        for program, args in self.calls():
            yield program, self.same(args)

    def calls(self) -> Iterator[Call]:
        """The same, of one replica."""
        return every_program(self)

    def first_runs(self) -> None:
        """Runs once what most requests are computed by, where that spares them something."""
        first_runs(self)

    def warm_up(self) -> int:
        """Compiles every program of the chains, several at a time. Returns how many.

        Left out, and compiled when first asked for: logprobs over the whole vocabulary or of ids by name, and taps. All
        rows of the last layer come out of every mixed step.
        """
        before = self.backend.num_compiles()
        # programs are made of much that is kept: a collector would look at all of it again and again
        with Paused():
            if not self.is_rehearsed:
                # after a sleep all kernels are there
                self.backend.rehearse(rehearsal(self), self.recipe)
                self.is_rehearsed = True
            self.backend.precompile(self.every_call(), self.recipe)
            self.first_runs()
            # else the first collections of what is young take 0.1 s and more, in somebody's request
            age()
        return self.backend.num_compiles() - before
