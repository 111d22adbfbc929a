"""A mesh of processes for torch, one device each: who shares what with whom, and the collectives between them.

Not torch's DeviceMesh: that stands on the one default process group of a process, and here an engine is a value among
others, several of which may live in one process (decision 025).
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist

from .gloo_torch import Messenger, break_off, wait
from .rules import place_of

Tensor = torch.Tensor
Kind = tuple[tuple[int, ...], torch.dtype]  # of an array: its shape, and of what
TIMEOUT = 120.0  # seconds that a collective waits for a rank that is alive and does not come
MEETING = 0.001  # seconds between looks at who has come
ABORTING = 2.0  # seconds that breaking off what is under way may take
LEAVING = threading.RLock()  # held by who lets go of a mesh's groups, and from the interpreter's end on
atexit.register(LEAVING.acquire, timeout=2 * ABORTING)


def packed(arrays: Sequence[Tensor]) -> Tensor:
    """The bytes of these arrays, those with the largest items first, so that each lies where it can be read."""
    ordered = sorted(arrays, key=lambda x: -x.dtype.itemsize)
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in ordered])


def unpacked(message: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """The arrays of these kinds that `packed` has packed, over the message's memory."""
    order = sorted(range(len(kinds)), key=lambda i: -kinds[i][1].itemsize)
    parts = message.split([num_bytes(kinds[i]) for i in order])
    found = {i: part.view(kinds[i][1]).view(kinds[i][0]) for i, part in zip(order, parts, strict=True)}
    return [found[i] for i in range(len(kinds))]


def num_bytes(kind: Kind) -> int:
    return math.prod(kind[0]) * kind[1].itemsize


def join_soon(threads: Sequence[threading.Thread]) -> None:
    """Waits for threads that break off what is under way, within reason."""
    until = time.monotonic() + ABORTING
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def leave(
    lock: threading.Lock, aborting: Sequence[threading.Thread], groups: dict[tuple[str, ...], Any], messenger: Messenger
) -> None:
    """Lets go of a mesh's groups, at the interpreter's end at the latest.

    A thread in torch's C++ that takes the interpreter's lock once the interpreter is gone ends the process with
    SIGABRT: one that breaks off a group does when it is done, gloo's do to let go of an array, and so does whoever
    dropped the mesh, if it is not the main thread. Dropping a group waits for gloo's.
    """
    with LEAVING, lock:
        messenger.close()
        join_soon(aborting)
        groups.clear()


class TorchMesh:
    """This process's place in a mesh whose axes are named and sized by `shape`: that of its rank (rules.place_of).

    `store` is where the processes meet. `counts` says how often which collective ran, with how many bytes: keys are
    (collective, mesh axes, bytes of its result). Who sends counts a "send".
    """

    def __init__(
        self,
        shape: Mapping[str, int],
        rank: int,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        device: torch.device | str = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        if not 0 <= rank < math.prod(shape.values()):
            raise ValueError(f"rank {rank} is none of a mesh of {dict(shape)}")
        self.shape, self.rank, self.store, self.device = dict(shape), rank, store, torch.device(device)
        self.timeout, self.counts = timeout, Counter[tuple[str, tuple[str, ...], int]]()
        self.groups: dict[tuple[str, ...], Any] = {}
        self.place = place_of(self.shape, rank)
        # arrays on their way: they must live until they are there
        self.sent: deque[tuple[Any, Tensor]] = deque()
        self.num_renewed, self.is_aborted = 0, False
        self.lock, self.aborting, self.messenger = threading.Lock(), list[threading.Thread](), Messenger()
        # NCCL has no such threads, and its groups may stay until the last CUDA graph with one of them is gone
        groups = self.groups if self.device.type == "cpu" else {}
        weakref.finalize(self, leave, self.lock, self.aborting, groups, self.messenger)

    def size(self, names: tuple[str, ...]) -> int:
        """How many processes these axes have together."""
        return math.prod(self.shape[name] for name in names)

    def index(self, names: tuple[str, ...]) -> int:
        """This process's place along these axes, the first of them the slowest."""
        at = 0
        for name in names:
            at = at * self.shape[name] + self.place[name]
        return at

    def all_reduce(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """The sum of x over these axes. Consumes x."""
        x = x.contiguous()
        if self.size(names) > 1:
            self._note("all-reduce", names, x)
            self._wait(self._group(names).allreduce([x]))
        return x

    def all_gather(self, x: Tensor, names: tuple[str, ...], dim: int) -> Tensor:
        """The x of all processes along these axes, side by side along a dimension."""
        if self.size(names) == 1:
            return x
        x = x.contiguous()
        stacked = x.new_empty((self.size(names) * x.shape[0], *x.shape[1:]))
        self._wait(self._group(names)._allgather_base(stacked, x))
        whole = torch.cat(stacked.split(x.shape[0]), dim) if dim else stacked
        self._note("all-gather", names, whole)
        return whole

    def reduce_scatter(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """This process's rows of the sum of x over these axes. x has as many rows for each process."""
        if self.size(names) == 1:
            return x
        own = x.new_empty((x.shape[0] // self.size(names), *x.shape[1:]))
        self._wait(self._group(names)._reduce_scatter_base(own, x.contiguous()))
        self._note("reduce-scatter", names, own)
        return own

    def send(self, x: Tensor, name: str, along: Sequence[Tensor] = ()) -> None:
        """Sends x, and arrays that go along with it, to the next process along an axis, as one message.

        Waits only for what was sent one step for each place before.
        """
        x = packed([x, *along]) if along else x.contiguous()
        self._note("send", (name,), x)
        self.sent.append((self._group((name,)).send([x], self.place[name] + 1, 0), x))
        if len(self.sent) > self.shape[name]:
            self._wait(self.sent.popleft()[0], is_message=True)

    def receive(self, x: Tensor, name: str, along: Sequence[tuple[tuple[int, ...], str | None]] = ()) -> list[Tensor]:
        """Fills x with what the process before this one along an axis has sent. Returns what came along with it.

        `along`: the shape and dtype of each of these, None for that of x.
        """
        kinds = [(tuple(x.shape), x.dtype), *((shape, getattr(torch, d) if d else x.dtype) for shape, d in along)]
        message = x.new_empty(sum(map(num_bytes, kinds)), dtype=torch.uint8) if along else x
        self._wait(self._group((name,)).recv([message], self.place[name] - 1, 0), is_message=True)
        if not along:
            return []
        first, *others = unpacked(message, kinds)
        x.copy_(first)
        return others

    def renew(self, name: str) -> None:
        """Forgets what was sent along an axis and not received, if all its processes do: they connect anew."""
        group = self.groups.pop((name,), None)
        self.sent.clear()
        self.num_renewed += 1
        if group is not None:
            group.abort()

    def connect(self) -> None:
        """Has all that will talk to each other connect now: along each axis, and along dp and tp together."""
        sums = tuple(name for name, size in self.shape.items() if size > 1 and name != "pp")
        for names in dict.fromkeys((sums, *((name,) for name in sums))):
            self.all_reduce(torch.zeros(1, device=self.device), names)
        x, place, last = torch.zeros(1, device=self.device), self.place.get("pp", 0), self.shape.get("pp", 1) - 1
        if place:
            self.receive(x, "pp")
        if place < last:
            self.send(x, "pp")
        self.counts.clear()

    def abort(self) -> None:
        """Ends what is under way, so that nobody waits for a process that is gone. The mesh is of no use afterwards.

        NCCL breaks its kernels off at once, but does not come back before the last CUDA graph with one of them is gone.
        """
        self.is_aborted = True
        abort = break_off if self.device.type == "cpu" else methodcaller("abort")
        with self.lock:
            # these alone hold a group, so that this thread is not the last to let go of it
            threads = [threading.Thread(target=abort, args=(g,), daemon=True) for g in list(self.groups.values())]
            for thread in threads:
                thread.start()
            self.aborting += threads
        join_soon(threads)

    def _wait(self, work: Any, is_message: bool = False) -> None:
        """Until it has ended, or a rank is lost. With NCCL the stream waits, and its kernels are broken off."""
        if self.device.type == "cuda":
            work.wait()
        else:
            wait(self.messenger.message(work) if is_message else work, lambda: self.is_aborted, self.groups)

    def _note(self, what: str, names: tuple[str, ...], result: Tensor) -> None:
        self.counts[what, names, result.numel() * result.element_size()] += 1

    def _meet(self, store: Any, size: int) -> None:
        """Waits until so many processes are here."""
        until = time.monotonic() + self.timeout
        store.add("here", 1)
        while (here := store.add("here", 0)) < size:
            if self.is_aborted or time.monotonic() > until:
                raise RuntimeError(f"{here} of {size} processes came to make a group of the mesh")
            time.sleep(MEETING)

    def _join(self, store: Any, place: tuple[int, int], timeout: timedelta) -> Any:
        """A group on CPUs. One that ends between coming and joining would be waited for, and gloo cannot be told."""
        joined: Future[Any] = Future()

        def work() -> None:
            try:
                joined.set_result(dist.ProcessGroupGloo(store, *place, timeout))
            except RuntimeError as error:
                joined.set_exception(error)

        thread = threading.Thread(target=work, name="octavo-group", daemon=True)
        thread.start()
        while thread.is_alive():
            if self.is_aborted:
                # it may come back at any time, and must find an interpreter
                self.aborting.append(thread)
                raise RuntimeError(f"not all of {place[1]} processes joined a group of the mesh")
            thread.join(MEETING)
        # there, whatever the thread ended with
        return joined.result(timeout=0)

    def _group(self, names: tuple[str, ...]) -> Any:
        """The processes that differ from this one along these axes alone. All of them must ask for it."""
        if names not in self.groups:
            others = "/".join(f"{name}{at}" for name, at in self.place.items() if name not in names)
            name = f"mesh{self.num_renewed or ''}/{'.'.join(names)}/{others}"
            store = dist.PrefixStore(name, self.store)  # pyright: ignore[reportPrivateImportUsage]
            place, timeout = (self.index(names), self.size(names)), timedelta(seconds=self.timeout)
            self._meet(store, self.size(names))
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.groups[names] = dist.ProcessGroupNCCL(store, *place, options)
            else:
                self.groups[names] = self._join(store, place, timeout)
        return self.groups[names]
