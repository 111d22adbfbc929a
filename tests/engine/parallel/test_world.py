"""Which world a configuration joins, and what it refuses, where processes are there already. Starts none."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from typing import Any

import jax
import pytest
import torch

from octavo.engine import build
from octavo.engine.config import engine_config
from octavo.engine.parallel import world, world_jax, world_torch
from octavo.engine.parallel.team import Peer, Team


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Makes this process rank 1 of two that were launched; the worlds that were then met."""
    met: list[tuple[int, int, int]] = []
    monkeypatch.setattr(world, "_jax_world", lambda device: (1, 2, 0))
    monkeypatch.setattr(world, "torchrun_world", lambda: (1, 2, 1))
    monkeypatch.setattr(world, "_launched_world", lambda config, *place: met.append(place))
    return met


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_what_joins_launched_processes_and_what_stays_alone(backend: str, launched: list[Any]) -> None:
    def join(**arguments: Any) -> None:
        assert world.join(engine_config("m", backend=backend, **arguments), None) is None

    # replicas, one a process
    join()
    join(distributed_executor_backend="uni")
    assert launched == []
    join(tensor_parallel_size=2)
    join(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    assert launched == [(1, 2, 1 if backend == "torch" else 0)] * 2


def test_devices_of_this_process_alone_where_jax_has_several(launched: list[Any]) -> None:
    config = engine_config("m", backend="jax", tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ValueError, match=r"'uni': this is one of 2 processes that jax\.distributed joined"):
        world.join(config, None)


@pytest.mark.parametrize(("there", "size"), [(4, 2), (2, 1), (2, 4)])
def test_all_devices_of_jax_processes_take_part(there: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: there)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(world_jax, "Board", None)
    config = engine_config("m", backend="jax", tensor_parallel_size=size)
    with pytest.raises(ValueError, match=f"2 JAX processes have {there} devices, and tensor_parallel_size {size}"):
        world._launched_world(config, 1, 2, 0)


def test_torchrun_must_have_started_a_process_a_device() -> None:
    config = engine_config("m", backend="torch", tensor_parallel_size=4)
    with pytest.raises(ValueError, match="2 processes were launched, and tensor_parallel_size 4 needs a process a"):
        world._launched_world(config, 1, 2, 1)


def test_a_launcher_that_is_not_there_is_missed() -> None:
    launcher = "external_launcher"
    config = engine_config("m", backend="jax", tensor_parallel_size=2, distributed_executor_backend=launcher)
    with pytest.raises(ValueError, match=r"start this script with torchrun, or call jax\.distributed"):
        world.join(config, None)


def test_jax_that_has_started_joins_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is started for nothing."""
    jax.devices()
    monkeypatch.setattr(world, "Child", None)
    config = engine_config("m", backend="jax", tensor_parallel_size=2, distributed_executor_backend="mp")
    with pytest.raises(ValueError, match=r"JAX has started in this process.*make this LLM in a new process"):
        world.join(config, None)


@pytest.mark.parametrize(("platform", "ends"), [("cpu", []), ("gpu", [1])])
def test_a_process_on_a_gpu_does_not_wait_for_a_lost_rank_for_ever(
    platform: str, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the collective fails by itself, and a script may go on."""
    ended: list[int] = []
    monkeypatch.setattr(world_jax, "HEARTBEAT", 0)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(world_jax.os, "_exit", ended.append)
    before = set(threading.enumerate())
    world_jax.end_if_stuck()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert ended == ends


@pytest.mark.parametrize("lost", [False, True])
def test_rank_0_leaves_last(lost: bool) -> None:
    """Where the others meet goes with it."""
    happened: list[str] = []

    class Gone:
        process = pid = None

        def kill(self) -> None: ...

        def wait(self, seconds: float) -> int:
            happened.append("the other ends")
            return 0

    ours, _ = Pipe()
    child: Any = Gone()
    child.process = child
    team = Team([Peer(1, ours, ours, child)])
    team.mail.farewell = lambda: happened.append("rank 0 leaves")
    if lost:
        team.mail.lose("rank 1 is gone")
    team.close()
    assert happened[-2:] == ["the other ends", "rank 0 leaves"]


def test_a_rank_that_ended_a_start_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that this one, which waited for it, was broken off."""
    team, full = Team(()), MemoryError("GPU 1 is full")

    def broken_off(*args: Any) -> None:
        team.mail.lose("rank 1 failed", full)
        raise RuntimeError("1 of 2 processes came")

    monkeypatch.setattr(build, "join", lambda *args: world.World(0, 2, 0, None, team=team))
    monkeypatch.setattr(build, "build_device", broken_off)
    with pytest.raises(MemoryError, match="GPU 1 is full") as caught:
        build.build(engine_config("m", backend="torch", tensor_parallel_size=2))
    assert str(caught.value.__cause__) == "1 of 2 processes came"


def test_fewer_gpus_than_processes_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 needs as many GPUs, and torch finds 2: use 2 or less"):
        world_torch.check_devices(4, "tensor_parallel_size 4", "auto")
    world_torch.check_devices(2, "", "auto")
    world_torch.check_devices(4, "", "cpu")


def test_what_rank_0_writes_where_torch_meets_is_what_others_read() -> None:
    store, meeting = world_torch.host_store()
    world_torch.Board(store).write(bytes(range(256)))
    assert world_torch.Board(world_torch.client_store(meeting)).read() == bytes(range(256))


def test_a_second_engine_of_a_run_is_refused_and_waits_for_nobody() -> None:
    store, _ = world_torch.host_store()
    world_torch.Board(store).write(b"first")
    with pytest.raises(ValueError, match="have served an engine already: one engine a run"):
        world_torch.Board(store).write(b"second")
    assert world_torch.Board(store).read() == b"first"


def test_each_rank_takes_the_gpu_of_its_place_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its collectives are what a lost rank aborts."""
    taken: list[int] = []
    connected: list[Any] = []

    class Mesh:
        def __init__(self, shape: Any, rank: int, store: Any, device: str):
            self.shape, self.rank = shape, rank

        def connect(self) -> None:
            connected.append(self.shape)

        def abort(self) -> None: ...

    monkeypatch.setattr(world_torch, "TorchMesh", Mesh)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    team = Team(())
    mesh = world_torch.make_mesh({"dp": 1, "tp": 2}, world.World(5, 8, 1, None, team=team), "cuda")
    assert (taken, connected) == ([1], [{"dp": 1, "tp": 2}])
    assert team.mail.abort == mesh.abort
