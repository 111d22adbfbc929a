"""Programs as CUDA graphs: inputs at fixed places, filled by one copy; recorded once a shape, then replayed.

The first call of a shape runs op by op, for real, and is recorded after that: a recording runs nothing, so state is
never advanced twice. A warm-up wants no results: there only the first call of a kind is run. A graph is bound to the
addresses of the state and of the weights that it was recorded with; with others (after Runner.reset, after a sleep) it
is recorded anew. What a replay returns is copied out of the graph's own memory, which the next replay of any graph may
overwrite: the graphs share one pool. Of a call with the very same values as the last one nothing is copied again.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from ..models.interface import CacheState, Sampling, StepInput
from .collector import Paused

log = logging.getLogger("octavo")

Tensor = torch.Tensor
# tuples: a union would be made anew at each of the hundreds of calls a step
ARRAYS, SEQUENCES = (Tensor, np.ndarray), (list, tuple)
ALIGNMENT = 64  # bytes, of an input in the buffer of all
STAGES = 4  # host buffers of a shape: the host may be so many launches ahead of the device


def describe(tree: Any, arrays: list[Any]) -> Any:
    """A hashable description of a tree: its structure, static values, shapes and dtypes. Appends its arrays."""
    if isinstance(tree, ARRAYS):
        arrays.append(tree)
        return tree.shape, tree.dtype, isinstance(tree, Tensor)
    if isinstance(tree, dict):
        return tuple((name, describe(x, arrays)) for name, x in tree.items())
    if isinstance(tree, SEQUENCES):
        return tuple(describe(x, arrays) for x in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), tuple(describe(x, arrays) for x in vars(tree).values())
    return tree


def kind_of(description: Any) -> Any:
    """What `describe` says but for sizes: of numbers their sign, of a shape its dims."""
    if isinstance(description, tuple):
        return tuple(map(kind_of, description))
    if isinstance(description, int) and not isinstance(description, bool):
        return (description > 0) - (description < 0)
    return description


def rebuild(tree: Any, arrays: Any) -> Any:
    """The tree with other arrays, taken from an iterator in the order of `describe`."""
    if tree is None:
        return None
    if isinstance(tree, ARRAYS):
        return next(arrays)
    if isinstance(tree, dict):
        return {name: rebuild(x, arrays) for name, x in tree.items()}
    if isinstance(tree, SEQUENCES):
        return type(tree)(rebuild(x, arrays) for x in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{name: rebuild(x, arrays) for name, x in vars(tree).items()})
    return tree


def arrays_of(tree: Any) -> list[Any]:
    """The arrays of a tree, in the order of `describe`. Every step asks: a state has hundreds."""
    if isinstance(tree, ARRAYS):
        return [tree]
    if isinstance(tree, dict):
        parts = tree.values()
    elif isinstance(tree, SEQUENCES):
        parts = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = vars(tree).values()
    else:
        return []
    found = []
    for x in parts:
        found += (x,) if isinstance(x, Tensor) else arrays_of(x)
    return found


def detached(tree: Any) -> Any:
    """The tree with other tensors over the same memory."""
    return rebuild(tree, (x.detach() for x in arrays_of(tree)))


def places_of(state: Any) -> tuple[int, ...]:
    """Where the arrays of a state lie."""
    return tuple([x.data_ptr() for x in arrays_of(state)])


class Consumed(CacheState):
    """What is left of a CacheState that was handed on: touching it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("this cache was consumed by a later step")


def handed_on(cache: CacheState) -> CacheState:
    """The same arrays as a new value; the old one is void. Its hundreds of arrays are not looked at."""
    new = CacheState(cache.groups, cache.rows)
    vars(cache).clear()
    object.__setattr__(cache, "__class__", Consumed)  # it is frozen
    return new


class Inputs:
    """Arrays of given shapes at fixed places on the device. The host's are laid end to end and copied at once."""

    def __init__(self, arrays: list[Any], device: torch.device):
        self.device, self.pinned, self.turn, size = device, device.type == "cuda", 0, 0
        self.offsets: list[int] = []
        for x in arrays:
            self.offsets.append(size)
            if isinstance(x, np.ndarray):
                size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.places = [self._place(x, at) for x, at in zip(arrays, self.offsets, strict=True)]
        # one array of all: pinning memory is a call of the driver's
        self.stages = torch.empty((STAGES, size), dtype=torch.uint8, pin_memory=self.pinned).unbind()
        self.copied: list[torch.cuda.Event | None] = [None] * STAGES
        # where each of the host's arrays goes, in every stage
        self.views = [
            [
                stage.numpy()[at : at + x.nbytes].view(x.dtype).reshape(x.shape) if isinstance(x, np.ndarray) else None
                for x, at in zip(arrays, self.offsets, strict=True)
            ]
            for stage in self.stages
        ]

    def _place(self, x: Any, at: int) -> Tensor:
        if isinstance(x, Tensor):
            return torch.empty_like(x, device=self.device)
        dtype = torch.from_numpy(np.empty(0, x.dtype)).dtype
        return self.buffer[at : at + x.nbytes].view(dtype).view(x.shape)

    def fill(self, arrays: list[Any]) -> None:
        """Puts the arrays in their places; returns before the device has them."""
        self.turn = (self.turn + 1) % STAGES
        event, views = self.copied[self.turn], self.views[self.turn]
        if event is not None:
            event.synchronize()
        for x, view, place in zip(arrays, views, self.places, strict=True):
            if view is None:
                place.copy_(x, non_blocking=True)
            else:
                view[...] = x
        if self.buffer.numel():
            self.buffer.copy_(self.stages[self.turn], non_blocking=True)
        if self.pinned:
            event = self.copied[self.turn] = event or torch.cuda.Event()
            event.record()


class Capture(Protocol):
    """How a graph is made."""

    def try_out(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs now: the results, and whether the host never waited. What waits for the device cannot be recorded."""
        ...

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays `run`, and its results, which a replay overwrites."""
        ...

    def finish(self) -> None:
        """Waits until all can be replayed; raises what is wrong with one."""
        ...

    def renew(self) -> None:
        """All recordings are gone."""
        ...


@dataclasses.dataclass(frozen=True)
class Graph:
    """A recording: what replays it, what it leaves where, and what it is bound to."""

    replay: Callable[[], None]
    results: list[tuple[Any, list[Tensor]]]  # but for the state, each with its arrays
    addresses: tuple[int, ...]
    weights: Any


@dataclasses.dataclass(frozen=True)
class Filled:
    """Arguments that are in their places: those of the last call."""

    own: list[Any]
    key: Any
    trees: list[Any]

    def holds(self, own: list[Any]) -> bool:
        """Whether these are the very same, and such as nobody writes to."""
        return all(x is y and isinstance(x, (StepInput, Sampling)) for x, y in zip(own, self.own, strict=True))


class Program:
    """fn(*args, ops=...) whose argument `at` is consumed and given back as result `back` (None: it is all there is)."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        at: int,
        weights: int,
        back: int | None,
        consume: Callable[[Any], Any],
        capture: Capture,
        device: torch.device,
        most_tokens: int,
    ):
        self.fn, self.at, self.weights, self.back, self.consume = fn, at, weights, back, consume
        self.capture, self.device, self.most_tokens = capture, device, most_tokens
        self.inputs: dict[Any, Inputs] = {}  # by the shapes of all arrays
        self.trees: dict[Any, tuple[Inputs, list[Any]]] = {}  # by all that makes a graph another one
        self.filled: Filled | None = None
        self.graphs: dict[Any, Graph] = {}
        # a CacheState that this program has handed on, and where its arrays lie
        self.left: tuple[weakref.ref[CacheState], tuple[int, ...]] | None = None
        self.waits: set[Any] = set()  # what cannot be recorded
        self.free: set[Any] = set()  # kinds of what can be
        self.num_captures = 0

    @torch.inference_mode()
    def __call__(self, *xs: Any) -> Any:
        """Replays the graph of these shapes, or runs op by op and records it."""
        state = xs[self.at]
        if not isinstance(state, CacheState):
            state = self.consume(state)
            return self._call(xs, state, places_of(state), True)
        addresses = self.left[1] if self.left and self.left[0]() is state else places_of(state)
        state = handed_on(state)
        self.left = weakref.ref(state), addresses
        return self._call(xs, state, addresses, True)

    @torch.inference_mode()
    def prepare(self, *xs: Any) -> None:
        """Records the graph of arguments that change nothing that matters (padding). Consumes nothing.

        Runs them first if nothing of their kind has been run: whether the host waits is not a matter of sizes.
        """
        state = detached(xs[self.at])
        self._call(xs, state, places_of(state), False)

    @torch.inference_mode()
    def rehearse(self, *xs: Any) -> None:
        """Runs op by op on padding, and keeps nothing of it."""
        on_device = (
            rebuild(x, (torch.as_tensor(y, device=self.device) for y in arrays_of(x)))
            for i, x in enumerate(xs)
            if i not in (self.at, self.weights)
        )
        self.fn(
            *(detached(x) if i == self.at else x if i == self.weights else next(on_device) for i, x in enumerate(xs))
        )

    def forget(self) -> None:
        """Drops all recordings and the places of their inputs. Nothing may be running."""
        self.filled = self.left = None
        for kept in (self.graphs, self.trees, self.inputs):
            kept.clear()

    def is_captured(self, xs: Sequence[Any]) -> bool:
        """Whether a step is worth a graph: one of many tokens takes the device longer than the host."""
        return max((getattr(x, "num_tokens", 0) for x in xs), default=0) <= self.most_tokens

    def _fill(self, own: list[Any]) -> tuple[Any, list[Any]]:
        """Puts arguments in their places. Returns what makes a graph another one, and the arguments as they lie."""
        if self.filled and self.filled.holds(own):
            return self.filled.key, self.filled.trees
        arrays: list[Any] = []
        key, self.filled = describe(own, arrays), None
        if key not in self.trees:
            shapes = tuple((x.shape, x.dtype) for x in arrays)
            if shapes not in self.inputs:
                self.inputs[shapes] = Inputs(arrays, self.device)
            self.trees[key] = self.inputs[shapes], rebuild(own, iter(self.inputs[shapes].places))
        inputs, trees = self.trees[key]
        inputs.fill(arrays)
        # what lies on the device is written there by others
        if not any(isinstance(x, Tensor) for x in arrays):
            self.filled = Filled(own, key, trees)
        return key, trees

    def _call(self, xs: tuple[Any, ...], state: Any, addresses: tuple[int, ...], wanted: bool) -> Any:
        """The results; None if they are not `wanted` and there was no need to run."""
        own = [i for i in range(len(xs)) if i not in (self.at, self.weights)]
        key, trees = self._fill([xs[i] for i in own])
        weights, graph = xs[self.weights] if self.weights >= 0 else None, self.graphs.get(key)
        if graph is None or graph.addresses != addresses or graph.weights is not weights:
            args = list(xs)
            for i, tree in zip(own, trees, strict=True):
                args[i] = tree
            args[self.at] = state
            if key in self.waits or not self.is_captured(args):
                return self._settled(self.fn(*args), state)
            return self._record(key, args, addresses, wanted)
        graph.replay()
        if self.back is None:
            return state
        out = [rebuild(x, iter([y.clone() for y in arrays])) for x, arrays in graph.results]
        out.insert(self.back, state)
        return tuple(out)

    def _record(self, key: Any, args: list[Any], addresses: tuple[int, ...], wanted: bool) -> Any:
        """The results of a first call, and a graph for the next ones."""
        state, results = args[self.at], None
        if wanted or kind_of(key) not in self.free:
            results, free = self.capture.try_out(lambda: self._settled(self.fn(*args), state))
            if not free:
                log.info("a program waits for the device, so it always runs op by op: %s", key)
                self.waits.add(key)
                return results
            self.free.add(kind_of(key))
        # a value of its own, which nobody consumes
        args[self.at] = same = detached(state)
        replay, left = self.capture(lambda: self._settled(self.fn(*args), same))
        others = [] if self.back is None else [(x, arrays_of(x)) for i, x in enumerate(left) if i != self.back]
        weights = args[self.weights] if self.weights >= 0 else None
        self.graphs[key] = Graph(replay, others, addresses, weights)
        self.num_captures += 1
        return results

    def _settled(self, results: Any, state: Any) -> Any:
        """The results, with the state where it was: what a program made anew is copied into its place."""
        new = results if self.back is None else results[self.back]
        for old, x in zip(arrays_of(state), arrays_of(new), strict=True):
            if x.data_ptr() != old.data_ptr():
                old.copy_(x)
        if self.back is None:
            return state
        return tuple(state if i == self.back else x for i, x in enumerate(results))


class GraphPool:
    """Records CUDA graphs that share their memory. A thread makes them ready while the next is recorded."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.readier = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(self.stream.device,))
        self.unready: list[Future[None]] = []

    def finish(self) -> None:
        """Waits until all can be replayed; raises what is wrong with one."""
        unready, self.unready = self.unready, []
        # all of them first: what goes on after an error must not replay one that the thread still has
        wait(unready)
        for future in unready:
            future.result()

    def renew(self) -> None:
        """Another pool: one whose graphs are all gone must not be recorded to again (torch asserts it)."""
        self.unready.clear()
        # behind all that the thread was given: it holds no graph, whose memory would else not be given back
        self.readier.submit(int).result()
        self.pool = torch.cuda.graph_pool_handle()

    def try_out(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs now: the results, and whether the host never waited, as torch's own watch over such calls says."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                results = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        # the first call of a process is told too that the watch itself is a prototype
        return results, not any("called a synchronizing" in str(w.message) for w in said)

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays `run`, and its results, which a replay overwrites."""
        graph, now = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        self.stream.wait_stream(now)
        # a collector that finds the graphs of an engine that is gone would destroy them, which voids a recording
        with torch.cuda.stream(self.stream), Paused():
            # relaxed: what runs for the first time may load its kernels
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            try:
                results = run()
            finally:
                graph.capture_end()
        now.wait_stream(self.stream)
        self.unready.append(self.readier.submit(graph.instantiate))

        def replay() -> None:
            if self.unready:
                self.finish()
            graph.replay()

        return replay, results
