"""Runs the programs in torch. The consumed argument is written in place and voided, or copied in pure mode.

On a GPU they become CUDA graphs (graph_torch.py), except in pure mode and under enforce_eager; a CPU runs them eagerly.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from ..kernels_triton.native import load
from ..kernels_triton.ops import TorchOps
from ..kernels_triton.products import Packed, Twofold
from ..models.interface import ArraySpec
from ..sharding.rules import ShardingRules, shard_of
from .fingerprint import UnknownCode, fingerprint
from .graph_torch import GraphPool, Program
from .loading.cache_dir import is_ours
from .parallel.replicas_torch import TorchReplicas
from .recipe import Recipe

if TYPE_CHECKING:
    from ..sharding.mesh_torch import TorchMesh

log = logging.getLogger("octavo")

Tensor = torch.Tensor
# tuples: a union would be made anew at each of the hundreds of calls a step
ARRAYS, SEQUENCES = (Tensor, np.ndarray, Packed), (list, tuple)
DTYPES = ("float32", "bfloat16", "float16")
# of a step that is worth a graph. An eager launch of a Triton kernel takes the host up to 90 us, so that even 8,192
# tokens of a small model wait for it (45 ms against 26); beyond, padding to a recorded size costs more than it saves
GRAPH_TOKENS = 8192
# of a decode step that is one graph with its head; with more the device takes longer than the host anyway
JOINED_SEQS = 64


class Void(Tensor):
    """What is left of a consumed array: touching it raises, as with a donated one in JAX."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("this array was consumed by a later step")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("this array was consumed by a later step")


def consume(x: Tensor) -> Tensor:
    """The same memory as a new value; the old one is void."""
    new = x.detach()
    x.__class__ = Void
    return new


def release(x: Tensor | Packed) -> None:
    """Frees the array's memory, whoever holds the array."""
    if isinstance(x, Packed | Twofold):
        x.release()
    else:
        x.set_()  # pyright: ignore[reportCallIssue]


def map_arrays(f: Callable[[Any], Any], tree: Any) -> Any:
    """f over the arrays in dicts, tuples, lists and dataclasses."""
    if isinstance(tree, ARRAYS):
        return f(tree)
    if isinstance(tree, dict):
        return {k: map_arrays(f, v) for k, v in tree.items()}
    if isinstance(tree, SEQUENCES):
        return type(tree)(map_arrays(f, v) for v in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{k: map_arrays(f, v) for k, v in vars(tree).items()})
    return tree


def from_numpy(x: np.ndarray) -> Tensor:
    """x as a tensor over the same memory."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


# what OMP_NUM_THREADS says, or a user's torch.set_num_threads: before any backend sets it
TOLD = torch.get_num_threads()


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    return len(cores)


def default_threads(ranks: int) -> int:
    """Threads of each of so many processes on this host: their share of the cores, and no more than torch was told."""
    return max(1, min(physical_cores() // ranks, TOLD))


def find_platform(device: str) -> str:
    """Where torch runs when asked for `device`: "cpu" or "cuda". "auto" takes a GPU if there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU here; use device='cpu', or a CUDA build of torch")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def device_memory() -> int:
    """Bytes of the GPU."""
    return torch.cuda.get_device_properties(0).total_memory


class StaticInputs:
    """One set of buffers a shape: an input of a shape seen before lands where that one lay (CUDA graphs need it)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[tuple, list[Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        """The tree with its arrays copied into the buffers of its shape."""
        found: list[Any] = []
        map_arrays(found.append, tree)
        arrays = [from_numpy(x) if isinstance(x, np.ndarray) else x for x in found]
        key = tuple((x.shape, x.dtype) for x in arrays)
        if (buffers := self.buffers.get(key)) is None:
            buffers = self.buffers[key] = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in arrays]
        for buffer, x in zip(buffers, arrays, strict=True):
            buffer.copy_(x)
        each = iter(buffers)
        return map_arrays(lambda _: next(each), tree)


class TorchBackend:
    """torch on one device. `dtype` is that of weights and cache whose spec leaves it open.

    `compiled` is the folder of kernels that a CPU's own C compiler makes, and of lists of Triton's that an engine
    launches; None: no such kernels and lists, `eager`: no such kernels.

    `mesh` is this process's place among others, and `rules` say how they share arrays: this one then holds its own
    shard of each, evenly cut.
    """

    name = "torch"
    loads_late = False  # precompile runs

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        pure: bool = False,
        attention: str = "auto",
        threads: int | None = None,
        eager: bool = False,
        rules: ShardingRules | None = None,
        mesh: TorchMesh | None = None,
        experts_in_turn: bool = False,
        least_tokens: int = 1,
        compiled: str | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads {threads} is not positive")
        self.device, self.dtype, self.pure = torch.device(device), dtype, pure
        self.rules, self.mesh = rules or ShardingRules({}), mesh
        on_cpu = self.device.type == "cpu" and not eager
        native = load(getattr(torch, dtype), Path(compiled), is_ours) if compiled and on_cpu else None
        self.ops = TorchOps(pure, attention, rules, mesh, experts_in_turn, least_tokens, native)
        self.replicas = TorchReplicas(mesh, self.read) if mesh and "replicas" in self.rules else None
        self.eager = eager or pure or self.device.type == "cpu"
        self.graph_tokens: int | None = None if self.eager else GRAPH_TOKENS
        self.capture = None if self.eager else GraphPool(self.device)
        self.programs: list[Program] = []
        self.compiled = Path(compiled) if compiled else None
        self.kernel_list: Path | None = None  # of what is rehearsed, until its programs are made
        self.rehearsed: list[Any] = []
        if self.capture is not None and find_spec("triton"):
            from ..kernels_triton.ahead import know_triton

            # beside what comes before a warm-up: hashing needs no lock of Python's
            threading.Thread(target=know_triton, daemon=True).start()
        # processes of one host share its cores
        ranks = 1 if mesh is None else math.prod(mesh.shape.values())
        self.threads = threads or default_threads(ranks)
        torch.set_num_threads(self.threads)
        # fp32 means fp32: no TF32, no bf16 passes
        torch.set_float32_matmul_precision("highest")

    def shard(self, spec: ArraySpec) -> tuple[slice, ...]:
        """Which part of an array of that spec lies here."""
        return () if self.mesh is None else shard_of(spec.shape, spec.axes, self.rules, self.mesh)

    def place(self, x: np.ndarray, spec: ArraySpec) -> Tensor:
        """A copy of this process's part of x on the device, in the spec's dtype."""
        return self._copy(x[self.shard(spec)], spec)

    def _copy(self, x: np.ndarray, spec: ArraySpec) -> Tensor:
        # copied by numpy: x may be a read-only file map, which torch does not take
        return from_numpy(np.array(x, order="C")).to(self.device, self._dtype(spec))

    def place_weight(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """A weight on the device, packed for its product."""
        return self.ops.prepare(self.place(x, spec), spec)

    def place_shard(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight of this process's part of an array, alone."""
        return self.ops.prepare(self._copy(x, spec), spec)

    def place_repeated(self, x: np.ndarray, spec: ArraySpec) -> Any:
        """place_weight(np.resize(x, spec.shape), spec), repeated on the device."""
        size, few = math.prod(spec.shape), self._copy(x, spec)
        whole = few.repeat(-(-size // len(x)))[:size].reshape(spec.shape)
        # no view: one would keep the memory of `whole` when it is released itself
        return self.ops.prepare(whole[self.shard(spec)].contiguous().detach(), spec)

    def zeros(self, spec: ArraySpec) -> Tensor:
        shape = [at.stop - at.start for at in self.shard(spec)] or spec.shape
        return torch.zeros(shape, dtype=self._dtype(spec), device=self.device)

    def declare(self, name: str, specs: Any) -> None:
        """Nothing: a process sees its own shards alone."""

    def compile(
        self, fn: Callable[..., Any], args: tuple[str, ...], outs: tuple[str, ...], consumes: str
    ) -> Callable[..., Any]:
        """fn as graphs, or run eagerly. Inputs land in static buffers, the consumed argument is voided (or copied)."""
        at = args.index(consumes)
        weights = next((i for i, name in enumerate(args) if name.endswith("weights")), -1)
        if self.capture is not None:
            program = Program(
                partial(fn, ops=self.ops), at=at, weights=weights,
                back=outs.index(consumes) if len(outs) > 1 else None, consume=self.consume, capture=self.capture,
                device=self.device, most_tokens=GRAPH_TOKENS,
            )  # fmt: skip
            self.programs.append(program)
            return program
        static = {i: StaticInputs(self.device) for i in range(len(args)) if i not in (at, weights)}

        @torch.inference_mode()
        def run(*xs: Any) -> Any:
            ready = [static[i](x) if i in static else x for i, x in enumerate(xs)]
            ready[at] = self.consume(ready[at])
            return fn(*ready, ops=self.ops)

        return run

    def rehearse(self, calls: Iterable[tuple[Any, tuple[Any, ...]]], recipe: Recipe | None = None) -> None:
        """Compiles the Triton kernels of these calls side by side, launching none that is missing. On a CPU: nothing.

        Those of a recipe are remembered: no call is made where they are known. Arguments must be padding: what is no
        kernel of ours is computed.
        """
        if self.device.type == "cpu" or not find_spec("triton"):
            return
        from ..kernels_triton.ahead import rehearsal
        from ..kernels_triton.remembered import Kernel, recall

        self.kernel_list, self.rehearsed = self._list_of(recipe), []
        if self.kernel_list and recall(self.kernel_list, self.device):
            return
        with rehearsal(self.device, lambda fn, about: self.rehearsed.append(Kernel.of(fn, about))):
            for program, xs in calls:
                if isinstance(program, Program):
                    program.rehearse(*xs)

    def _list_of(self, recipe: Recipe | None) -> Path | None:
        """The file that says which kernels a recipe launches here; None if it can have none."""
        if recipe is None or self.compiled is None:
            return None
        # of the cache's size no kernel knows, and what else decides shows when a kernel is missing
        arguments = {name: x for name, x in recipe.arguments.items() if name != "num_blocks"}
        machine = torch.__version__, torch.cuda.get_device_name(self.device), self.dtype
        try:
            key = fingerprint((recipe.model, recipe.layout, arguments, [str(x) for x in machine]))
        except UnknownCode:
            return None
        return self.compiled / "triton" / f"{key}.json"

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """What is launched inside is what the list is kept or dropped by."""
        path, self.kernel_list = self.kernel_list, None
        if path is None:
            yield
            return
        from ..kernels_triton.remembered import drop, keep, noted

        missed: list[Any] = []
        with noted(missed):
            yield
        if self.rehearsed:
            keep(path, self.rehearsed + missed)
        elif missed:
            log.info("%d kernels were not remembered: the next start rehearses", len(missed))
            drop(path)

    def precompile(self, calls: Iterable[tuple[Any, tuple[Any, ...]]], recipe: Recipe | None = None) -> None:
        """Records the graphs of these calls; of those too large for one, the largest is run. Eagerly: nothing.

        Needs no recipe: a graph is of the process that records it.
        Running is what compiles kernels and loads libraries, so arguments must be padding: they are computed.
        """
        largest: dict[Program, tuple[Any, ...]] = {}
        with self._remembered():
            for program, xs in calls:
                if isinstance(program, Program):
                    if program.is_captured(xs):
                        program.prepare(*xs)
                    else:
                        largest[program] = xs
            for program, xs in largest.items():
                program.prepare(*xs)
        if self.capture is not None:
            self.capture.finish()

    def consume(self, tree: Any) -> Any:
        """The tree's arrays as new values: the same memory, the old ones void; in pure mode copies."""
        return map_arrays(Tensor.clone if self.pure else consume, tree)

    def own(self, tree: Any) -> Any:
        """The tree with tensors on the device for numpy arrays."""
        return map_arrays(lambda x: from_numpy(x.copy()).to(self.device) if isinstance(x, np.ndarray) else x, tree)

    def scope(self) -> AbstractContextManager[Any]:
        """What code outside `compile` runs in."""
        return torch.inference_mode()

    def prefetch(self, x: Tensor) -> None:
        """Starts copying x from a GPU to pinned memory, where `read` finds it. On a CPU a step is done already."""
        if x.is_cuda:
            host, copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
            host.copy_(x, non_blocking=True)
            copied.record()
            vars(x)["prefetched"] = host, copied

    def is_ready(self, x: Tensor) -> bool:
        """Whether what `prefetch` copies is on the host."""
        return not x.is_cuda or vars(x)["prefetched"][1].query()

    def read(self, x: Tensor | Packed) -> np.ndarray:
        """A copy on the host; of a packed weight, as it was before."""
        if isinstance(x, Tensor) and not isinstance(x, Void) and "prefetched" in x.__dict__:
            host, copied = x.__dict__["prefetched"]
            # in a thread of its own the first GPU would be taken into use, whichever x is on
            with torch.cuda.device(x.device):
                copied.synchronize()
        else:
            host = (x.dense() if isinstance(x, Packed) else x).detach().cpu()
        if host.dtype == torch.bfloat16:
            return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        if host.dtype == torch.float8_e4m3fn:
            return host.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).copy()
        return host.numpy().copy()

    def read_tree(self, tree: Any) -> Any:
        """The tree with host copies for arrays."""
        return map_arrays(self.read, tree)

    def num_compiles(self) -> int:
        """Graphs recorded so far."""
        return sum(program.num_captures for program in self.programs)

    @property
    def joined_seqs(self) -> int:
        """Sequences of the largest decode step that is one program with its head."""
        return JOINED_SEQS if self.capture is not None and self.mesh is None else 0

    @property
    def binds_addresses(self) -> bool:
        """Whether graphs are recorded."""
        return self.capture is not None

    @torch.inference_mode()
    def offload(self, tree: Any) -> Any:
        """Weights copied to the host, and freed here; what `restore` takes. Packed ones lie on the host anyway."""
        stored = map_arrays(lambda x: x if isinstance(x, Packed) else self._stored(x), tree)
        map_arrays(lambda x: x if isinstance(x, Packed) else release(x), tree)
        return stored

    def _stored(self, x: Tensor) -> Tensor:
        # from pinned memory it comes back at the full speed of the bus
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.device.type == "cuda").copy_(x)
        return Twofold.once(host, x.depth) if isinstance(x, Twofold) else host

    @torch.inference_mode()
    def restore(self, stored: Any) -> Any:
        """The weights back on the device."""

        def back(x: Tensor | Packed) -> Any:
            if isinstance(x, Packed):
                return x
            return Twofold.of(x.to(self.device), x.depth) if isinstance(x, Twofold) else x.to(self.device)

        return map_arrays(back, stored)

    @torch.inference_mode()
    def free(self, tree: Any) -> None:
        """Frees arrays, whoever holds them, and the recordings, whose memory and addresses would else be kept."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        map_arrays(release, tree)
        for program in self.programs:
            program.forget()
        if self.capture is not None:
            self.capture.renew()
        if on_gpu:
            torch.cuda.empty_cache()

    def free_memory(self) -> int | None:
        """Bytes free on the GPU; None on a CPU."""
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else None

    def total_memory(self) -> int | None:
        """Bytes of the GPU, whoever has them; None on a CPU."""
        return torch.cuda.mem_get_info()[1] if self.device.type == "cuda" else None

    def bytes_beside(self, spec: ArraySpec, shape: Sequence[int]) -> int:
        """Bytes of a weight that lies turned as well; 0 of others, and on a CPU."""
        return self.ops.bytes_beside(spec, shape, getattr(torch, self.dtype), self.device)

    def any_width(self, specs: Iterable[Any], cache: str | None = None, scaled: bool = False) -> bool:
        """Whether attention of these specs costs the same with a wider block table."""
        own, held = getattr(torch, self.dtype), getattr(torch, cache or self.dtype)
        return all(self.ops.any_width(spec, own, self.device, held, scaled) for spec in set(specs))

    def shares_prefixes(self, specs: Iterable[Any], cache: str | None = None, scaled: bool = False) -> bool:
        """Whether attention of these specs reads prefixes once that sequences share."""
        own, held = getattr(torch, self.dtype), getattr(torch, cache or self.dtype)
        return all(self.ops.shares_prefixes(spec, own, self.device, held, scaled) for spec in set(specs))

    def _dtype(self, spec: ArraySpec) -> torch.dtype:
        return getattr(torch, spec.dtype or self.dtype)
