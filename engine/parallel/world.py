"""Which processes run a model together, and how they find each other. One process alone is no world: None.

torch has a process a device. JAX has all devices of a host in one process unless it is told otherwise. Rank 0 is the
user's process, and starts the others itself (child.py) or finds them there: torchrun's, or those of a script that has
called jax.distributed.initialize.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from typing import Any

from ..child import Child, pickled
from ..config import EngineConfig, torchrun_world
from .follower import Leader
from .shares import sizes_of
from .team import OTHERS, Join, Peer, Team


@dataclass(frozen=True)
class World:
    """This process's place among the others. `store` is where torch's processes meet; None for JAX."""

    rank: int
    size: int
    local_rank: int  # on this host: which of its devices
    store: Any
    team: Team | None = None  # of rank 0
    leader: Leader | None = None  # of the others

    @staticmethod
    def of_child(join: Join, leader: Leader) -> World:
        """That of a process which rank 0 started."""
        if join.config.backend == "jax":
            from .world_jax import start

            start(join.meeting, join.rank, join.size, join.config.device)
            return World(join.rank, join.size, join.rank, None, leader=leader)
        from .world_torch import client_store

        return World(join.rank, join.size, join.rank, client_store(join.meeting), leader=leader)

    def reports(self, config: EngineConfig) -> bool:
        """Whether this rank tells what the steps of its replica give: the first of one that rank 0 is not in."""
        return self.rank > 0 and config.num_joint == 1 and self.rank % config.replica_size == 0

    def least(self, available: int | None) -> int | None:
        """The smallest of all ranks' free memory."""
        here = self.team or self.leader
        assert here
        return here.least(available)


def join(config: EngineConfig, weights: Any) -> World | None:
    """The world that a configuration asks for; its other processes are started, or found.

    Raises ValueError where there are others than it asks for.
    """
    size, executor = config.num_shards, config.distributed_executor_backend
    launched = torchrun_world() if config.backend == "torch" else _jax_world(config.device)
    if executor == "external_launcher" and launched is None:
        raise ValueError("distributed_executor_backend='external_launcher': start this script with torchrun, or call "
                         "jax.distributed.initialize first")  # fmt: skip
    if launched is not None and executor == "uni" and size > 1:
        raise ValueError(f"distributed_executor_backend='uni': this is one of {launched[1]} processes that "
                         "jax.distributed joined, and all of them take part: leave it out")  # fmt: skip
    if launched is not None and (executor == "external_launcher" or (executor is None and size > 1)):
        return _launched_world(config, *launched)
    if size == 1 or executor == "uni" or (config.backend == "jax" and executor is None):
        return None
    return _own_world(config, weights, size)


def _own_world(config: EngineConfig, weights: Any, size: int) -> World:
    """A world whose other processes are children of this one."""
    level = logging.getLogger("octavo").getEffectiveLevel()
    if config.backend == "jax":
        from .world_jax import REMEDY, begin, end_if_stuck, free_address, leave, start

        begin(config.device)
        store, meeting = None, free_address()
    else:
        from .world_torch import check_devices, host_store

        check_devices(size, sizes_of(config), config.device)
        store, meeting = host_store()
    peers = []
    for rank in range(1, size):
        data = pickled(Join(rank, size, meeting, config, weights, level), OTHERS)
        child = Child(f"{__package__}.follower", "serve")
        child.commands.send_bytes(data)
        peers.append(Peer(rank, child.commands, child.results, child))
    team = Team(peers, _stage_size(config), config.replica_size)
    if config.backend == "jax":
        team.mail.remedy = REMEDY
        # JAX's own end, which this comes before, would part from ranks that nobody has told to go
        atexit.register(team.dismissal)
        start(meeting, 0, size, config.device)
        team.mail.farewell, team.mail.abort = leave, end_if_stuck
    return World(0, size, 0, store, team=team)


def _launched_world(config: EngineConfig, rank: int, num_processes: int, local_rank: int) -> World:
    """A world whose processes run this same script."""
    if config.backend == "torch":
        if num_processes != config.num_shards:
            raise ValueError(f"{num_processes} processes were launched, and {sizes_of(config)} needs a "
                             "process a device")  # fmt: skip
        from .world_torch import Board, launched_store

        board = Board(launched_store())
    else:
        from .world_jax import Board, check_devices

        check_devices(config.num_shards)
        board = Board()
    if rank:
        address, key = pickle.loads(board.read())
        line = Client(address, authkey=key)
        line.send_bytes(pickle.dumps(rank))
        return World(rank, num_processes, local_rank, board.store, leader=Leader(line, line))
    key = os.urandom(16)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        board.write(pickle.dumps((listener.address, key)))
        lines = [listener.accept() for _ in range(num_processes - 1)]
    peers = [Peer(pickle.loads(line.recv_bytes()), line, line) for line in lines]
    team = Team(sorted(peers, key=lambda peer: peer.rank), _stage_size(config), config.replica_size)
    return World(0, num_processes, local_rank, board.store, team=team)


def _stage_size(config: EngineConfig) -> int | None:
    """How many ranks in turn know the same tokens. JAX has all stages in each process."""
    several = config.backend == "torch" and config.pipeline_parallel_size > 1
    return config.tensor_parallel_size if several else None


def _jax_world(device: str) -> tuple[int, int, int] | None:
    """Rank, number of processes and 0, where jax.distributed.initialize has been called with several."""
    from .world_jax import world

    return world(device)
