"""A mesh of torch processes: places, collectives, and ops on local shards."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshes import on_every_rank

from octavo.kernels_triton.ops import TorchOps
from octavo.sharding import gloo_torch
from octavo.sharding.mesh_torch import TorchMesh
from octavo.sharding.rules import TENSOR, ShardingRules, place_of


def test_ranks_count_row_major() -> None:
    places = on_every_rank(lambda m: (m.place, m.index(("tp", "dp"))), {"dp": 2, "tp": 3})
    assert [list(p.values()) for p, _ in places] == [[r % 3, r // 3] for r in range(6)]
    assert [at for _, at in places] == [r % 3 * 2 + r // 3 for r in range(6)]


def test_a_rank_beyond_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is none of a mesh of \{'tp': 4\}"):
        TorchMesh({"tp": 4}, 4, dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]


def test_sums_stay_within_their_axes() -> None:
    def sums(mesh: TorchMesh) -> list[float]:
        return [float(mesh.all_reduce(torch.tensor([10.0**mesh.rank]), n)) for n in (("tp",), ("dp",), ("dp", "tp"))]

    assert on_every_rank(sums, {"dp": 2, "tp": 2}) == [
        [11, 101, 1111], [11, 1010, 1111], [1100, 101, 1111], [1100, 1010, 1111]
    ]  # fmt: skip


def test_shards_lie_side_by_side_and_are_counted() -> None:
    whole = torch.arange(24.0).reshape(2, 12)

    def gathered(mesh: TorchMesh) -> tuple[torch.Tensor, dict]:
        part = whole[:, mesh.index(("dp", "tp")) * 3 :][:, :3]
        return mesh.all_gather(part, ("dp", "tp"), 1), dict(mesh.counts)

    for x, counts in on_every_rank(gathered, {"dp": 2, "tp": 2}):
        assert x.tolist() == whole.tolist()
        assert counts == {("all-gather", ("dp", "tp"), 96): 1}


def test_ops_on_shards_equal_ops_on_the_whole() -> None:
    rng = np.random.default_rng(0)
    table, ids = rng.normal(size=(12, 6)).astype(np.float32), np.array([0, 11, 3, 3, 7])
    up, down = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(8, 6)).astype(np.float32)

    def run(mesh: TorchMesh) -> torch.Tensor:
        ops, at, n = TorchOps(rules=ShardingRules(TENSOR), mesh=mesh), mesh.rank, mesh.size(("tp",))
        own = [torch.tensor(np.split(x, n, axis)[at]) for x, axis in ((table, 0), (up, 1), (down, 0))]
        x = ops.embed(own[0], torch.tensor(ids, dtype=torch.int32))
        y = ops.einsum("tf,fe->te", ops.einsum("te,ef->tf", x, own[1], (None, "mlp")), own[2], (None, None), "mlp")
        logits = ops.einsum("re,ve->rv", y, own[0], (None, "vocab"))
        assert ops.axis_index("mlp") == at and ops.axis_index("layers") == 0
        return ops.constrain(logits, (None, "vocab"), (None, None))

    want = table[ids].astype(np.float64) @ up @ down @ table.T
    for size in (1, 2, 4):
        for got in on_every_rank(run, {"tp": size}):
            np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-5)


def test_a_mesh_axis_that_shares_two_axes_sums_once() -> None:
    rules = ShardingRules({"experts": ("dp", "tp"), "mlp": "tp"})

    def total(mesh: TorchMesh) -> float:
        return float(TorchOps(rules=rules, mesh=mesh).psum(torch.ones(1), "experts", "mlp"))

    assert on_every_rank(total, {"dp": 2, "tp": 2}) == [4.0] * 4


def test_rank_0_is_in_the_last_stage_of_the_first_replica() -> None:
    shape = {"dp": 2, "pp": 3, "tp": 2}
    places = [tuple(place_of(shape, rank).values()) for rank in range(12)]
    assert places == [(tp, 2 - i, dp) for dp in range(2) for i in range(3) for tp in range(2)]
    assert place_of({"dp": 1, "pp": 4, "tp": 1}, 0) == {"tp": 0, "pp": 3, "dp": 0}


def test_what_is_sent_arrives_at_the_next_stage_in_order() -> None:
    """More of it than may be on the way at a time; equal places along the other axis do not mix."""

    def run(mesh: TorchMesh) -> tuple[list[float], int]:
        stage, got = mesh.place["pp"], []
        for n in range(6):
            x = torch.full((2, 3), 100.0 * mesh.place["tp"] + n)
            if stage:
                mesh.receive(before := torch.empty(2, 3), "pp")
                got.append(float(before.mean()))
                x = x + 1000 * stage
            if stage < 2:
                mesh.send(x, "pp")
        # nobody leaves before all has arrived
        mesh.all_reduce(torch.zeros(1), ("pp", "tp"))
        return got, mesh.counts["send", ("pp",), 24]

    found = on_every_rank(run, {"pp": 3, "tp": 2})
    for rank, (got, sent) in enumerate(found):
        stage, tp = 2 - rank // 2, rank % 2
        assert got == [1000.0 * (stage - 1) + 100 * tp + n for n in range(6 if stage else 0)]
        assert sent == (6 if stage < 2 else 0)


def test_what_goes_along_is_part_of_the_message() -> None:
    """Whatever its shape and dtype, and though what is sent is no array of its own."""

    def run(mesh: TorchMesh) -> tuple[list[list[bool]], dict[tuple, int]]:
        got = []
        for n in range(4):
            x, ids = torch.full((3, 2), n + 0.5).bfloat16(), torch.arange(n, n + 6, dtype=torch.int32).view(2, 3)
            odd = torch.full((3,), n).bfloat16()
            if mesh.place["pp"] == 0:
                mesh.send(x, "pp", [odd, ids.T])
            else:
                room = torch.empty(3, 2).bfloat16()
                others = mesh.receive(room, "pp", [((3,), None), ((3, 2), "int32")])
                got.append([torch.equal(a, b) for a, b in zip([room, *others], [x, odd, ids.T], strict=True)])
        mesh.all_reduce(torch.zeros(1), ("pp",))
        return got, dict(mesh.counts)

    (got, _), (_, counts) = on_every_rank(run, {"pp": 2})
    assert got == [[True] * 3] * 4
    assert counts["send", ("pp",), 12 + 6 + 24] == 4


def test_what_nobody_received_is_forgotten() -> None:
    def run(mesh: TorchMesh) -> float:
        x, is_first = torch.zeros(1), mesh.place["pp"] == 0
        if is_first:
            mesh.send(torch.tensor([1.0]), "pp")
        # both know each other now, and the one is under way
        mesh.all_reduce(torch.zeros(1), ("pp",))
        mesh.renew("pp")
        if is_first:
            mesh.send(torch.tensor([2.0]), "pp")
        else:
            mesh.receive(x, "pp")
        mesh.all_reduce(torch.zeros(1), ("pp",))
        return float(x)

    assert on_every_rank(run, {"pp": 2}) == [2.0, 0.0]


def test_who_waits_for_one_that_is_gone_can_be_told() -> None:
    """A group that was never made cannot be aborted."""

    def run(mesh: TorchMesh) -> str:
        if mesh.rank:
            return ""
        threading.Timer(0.2, mesh.abort).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="1 of 2 processes came"):
            mesh.all_reduce(torch.zeros(1), ("tp",))
        assert time.monotonic() - began < 5
        return "told"

    assert on_every_rank(run, {"tp": 2}) == ["told", ""]


def test_who_joins_with_one_that_is_gone_can_be_told() -> None:
    """It came, and ended before it said where it is: what gloo waits for cannot be told."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    mesh = TorchMesh({"tp": 2}, 0, store, timeout=30)
    dist.PrefixStore("mesh/tp/", store).add("here", 1)  # pyright: ignore[reportPrivateImportUsage]
    threading.Timer(0.2, mesh.abort).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not all of 2 processes joined"):
        mesh.all_reduce(torch.zeros(1), ("tp",))
    assert time.monotonic() - began < 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, RuntimeError), (TypeError, TimeoutError)])
def test_whoever_cannot_join_hears_of_it(
    error: type[Exception], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: nobody waits for a thread that has ended."""

    def fails(*_: Any) -> None:
        raise error("no interface")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fails)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.PrefixStore("mesh/tp/", store).add("here", 1)  # pyright: ignore[reportPrivateImportUsage]
    with pytest.raises(raised):
        TorchMesh({"tp": 2}, 0, store).all_reduce(torch.zeros(1), ("tp",))


def test_a_group_whose_end_waits_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's does for CUDA graphs that use it."""
    monkeypatch.setattr("octavo.sharding.mesh_torch.ABORTING", 0.1)
    let_go, ended = threading.Event(), threading.Event()

    class Group:
        def __init__(self, abort: Callable[[], Any]) -> None:
            self.abort = abort

    mesh = TorchMesh({"tp": 1}, 0, dist.HashStore(), "cuda")  # pyright: ignore[reportPrivateImportUsage]
    mesh.groups = {("tp",): Group(let_go.wait), ("pp",): Group(ended.set)}
    began = time.monotonic()
    mesh.abort()
    assert ended.is_set() and time.monotonic() - began < 5
    let_go.set()


def test_an_interpreters_end_waits_for_who_breaks_off() -> None:
    """Torch's C++ would come back to an interpreter that is gone, which ends the process with SIGABRT."""
    script = """
import threading, time
import torch.distributed as dist
from octavo.sharding import mesh_torch
def break_off(group):
    begun.set()
    time.sleep(0.5)
    print("aborted", flush=True)
begun = threading.Event()
mesh_torch.break_off = break_off
mesh = mesh_torch.TorchMesh({"tp": 2}, 0, dist.HashStore())
mesh.groups["tp",] = None
threading.Thread(target=mesh.abort, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "aborted\n"), done.stderr


def test_an_interpreters_end_waits_for_who_lets_go() -> None:
    """Whichever thread drops a mesh lets go of its groups, which takes gloo a while."""
    script = """
import threading, time
import torch.distributed as dist
from octavo.sharding.mesh_torch import TorchMesh
class Group:
    def __del__(self):
        begun.set()
        time.sleep(0.5)
        print("gone", flush=True)
begun = threading.Event()
meshes = [TorchMesh({"tp": 2}, 0, dist.HashStore())]
meshes[0].groups["tp",] = Group()
threading.Thread(target=meshes.clear, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


def test_an_interpreters_end_waits_for_who_joined_in_vain() -> None:
    """Gloo comes back when it notices that the other is gone, which may be just then."""
    script = """
import threading, time
import torch, torch.distributed as dist
from octavo.sharding.mesh_torch import TorchMesh
def joins(*_):
    begun.set()
    time.sleep(0.5)
    print("back", flush=True)
    raise RuntimeError("the other is gone")
begun = threading.Event()
dist.ProcessGroupGloo = joins
store = dist.HashStore()
mesh = TorchMesh({"tp": 2}, 0, store)
dist.PrefixStore("mesh/tp/", store).add("here", 1)
threading.Thread(target=lambda: (begun.wait(), mesh.abort())).start()
try:
    mesh.all_reduce(torch.zeros(1), ("tp",))
except RuntimeError:
    print("told", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "told\nback\n"), done.stderr


def test_who_waits_for_one_that_does_not_come_can_be_told() -> None:
    """All have met, and one that lives computes nothing with the others any more: gloo is told of no lost rank."""
    begun = threading.Barrier(2)

    def run(mesh: TorchMesh, wait: Callable[[TorchMesh], Any]) -> float:
        mesh.connect()
        begun.wait()
        began = time.monotonic()
        if mesh.rank == 0:
            threading.Timer(0.2, mesh.abort).start()
            with pytest.raises(RuntimeError):
                wait(mesh)
        took = time.monotonic() - began
        begun.wait()
        return took

    x = torch.zeros(4)
    for shape, wait in (
        ({"tp": 2}, lambda mesh: mesh.all_reduce(x, ("tp",))),
        ({"tp": 2}, lambda mesh: mesh.all_gather(x, ("tp",), 0)),
        ({"tp": 2}, lambda mesh: mesh.reduce_scatter(x, ("tp",))),
        ({"pp": 2}, lambda mesh: mesh.receive(x, "pp")),
        ({"pp": 2}, lambda mesh: mesh.receive(x, "pp", [((2,), None)])),
    ):
        assert on_every_rank(lambda mesh, wait=wait: run(mesh, wait), shape)[0] < 5


@pytest.mark.parametrize("role", ["sends", "receives"])
def test_who_waits_for_a_message_whose_other_end_was_killed_in_its_middle_can_be_told(role: str) -> None:
    """Gloo tells nobody whose array is halfway there. The script's end waits for nothing either."""
    script = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from octavo.sharding.mesh_torch import TorchMesh
def halfway(x):
    while not x[0]:
        time.sleep(1e-4)
sends = sys.argv[1] == "sends"
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
x, few = torch.zeros(1 << 25), torch.zeros(1)
child = os.fork()
if child == 0:
    # rank 0 is in the last stage
    mesh = TorchMesh({"pp": 2}, 0 if sends else 1, dist.TCPStore("127.0.0.1", store.port, None, False))
    mesh.connect()
    if sends:
        threading.Thread(target=mesh.receive, args=(x, "pp"), daemon=True).start()
        halfway(x)
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.send(x + 1, "pp")
    time.sleep(100)
mesh = TorchMesh({"pp": 2}, 1 if sends else 0, store)
mesh.connect()
def lose():
    if not sends:
        halfway(x)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mesh.abort()
threading.Thread(target=lose, daemon=True).start()
try:
    # the third waits for the first
    for x in (x + 1, few, few) if sends else ():
        mesh.send(x, "pp")
    mesh.receive(x, "pp")
except RuntimeError:
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", script, role], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


def test_a_sum_that_is_scattered_ends() -> None:
    """Its work never says so by itself."""
    sums = on_every_rank(lambda mesh: mesh.reduce_scatter(torch.arange(4.0), ("tp",)).tolist(), {"tp": 2})
    assert sums == [[0, 2], [4, 6]]


def test_a_work_that_nobody_can_break_off_keeps_its_groups() -> None:
    """Their end would wait for it."""
    ended = threading.Event()

    class Work:
        def wait(self, timeout: timedelta | None = None) -> None:
            if not ended.wait(None if timeout is None else timeout.total_seconds()):
                raise RuntimeError("Operation timed out!")

    class Group:
        pass

    group = Group()
    gone, groups, began = weakref.ref(group), {("tp",): group}, time.monotonic()
    with pytest.raises(RuntimeError, match="a rank of the mesh was lost"):
        gloo_torch.wait(Work(), lambda: True, groups)
    assert time.monotonic() - began < 5
    groups.clear()
    del group
    assert gone() is not None
    ended.set()
    while gone() is not None:
        assert time.monotonic() - began < 10
        time.sleep(0.01)


def test_all_that_will_talk_can_connect_beforehand() -> None:
    def run(mesh: TorchMesh) -> tuple[set[tuple[str, ...]], int]:
        mesh.connect()
        return set(mesh.groups), len(mesh.counts)

    assert on_every_rank(run, {"dp": 2, "pp": 2, "tp": 2}) == [({("dp", "tp"), ("dp",), ("tp",), ("pp",)}, 0)] * 8
    assert on_every_rank(run, {"dp": 1, "pp": 1, "tp": 2}) == [({("tp",)}, 0)] * 2
