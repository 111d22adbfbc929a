"""Where torch's processes meet, and the mesh that they make."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...sharding.mesh_torch import TorchMesh

if TYPE_CHECKING:
    from .world import World

HOST, LEADER = "127.0.0.1", "octavo/leader"
PATIENCE = timedelta(seconds=120)  # for a process that is starting


def host_store() -> tuple[Any, str]:
    """A new meeting place, and its address for the others."""
    store = dist.TCPStore(HOST, 0, None, True, PATIENCE, False)  # pyright: ignore[reportPrivateImportUsage]
    return store, f"{HOST}:{store.port}"


def client_store(meeting: str) -> Any:
    """The meeting place at that address."""
    host, port = meeting.rsplit(":", 1)
    return dist.TCPStore(host, int(port), None, False, PATIENCE)  # pyright: ignore[reportPrivateImportUsage]


def launched_store() -> Any:
    """The one that torchrun's variables name."""
    found = dist.rendezvous("env://", timeout=PATIENCE)  # pyright: ignore[reportPrivateImportUsage]
    return next(iter(found))[0]


class Board:
    """What rank 0 tells the others before they have a line to it."""

    def __init__(self, store: Any):
        self.store = store

    def write(self, data: bytes) -> None:
        if self.store.check([LEADER]):
            # they serve an engine to its end, and then leave
            raise ValueError("torchrun's other processes have served an engine already: one engine a run")
        self.store.set(LEADER, data.hex())

    def read(self) -> bytes:
        return bytes.fromhex(self.store.get(LEADER).decode())


def check_devices(size: int, words: str, device: str) -> None:
    """Raises ValueError if there are GPUs, and fewer than processes; `words` say what asks for those."""
    if device != "cpu" and torch.cuda.is_available() and (there := torch.cuda.device_count()) < size:
        raise ValueError(f"{words} needs as many GPUs, and torch finds {there}: use {there} or less, or "
                         "device='cpu'")  # fmt: skip


def make_mesh(shape: Mapping[str, int], world: World, device: str) -> TorchMesh:
    """This process's place in the mesh. On GPUs, that of its rank becomes its own."""
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    mesh = TorchMesh(shape, world.rank, world.store, device)
    if world.team is not None:
        world.team.mail.abort = mesh.abort
    if device == "cuda":
        # NCCL connects now and not in a step, which could then not be recorded as a graph
        mesh.connect()
    return mesh
