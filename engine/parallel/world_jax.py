"""Several JAX processes that run one program: jax.distributed, with gloo between CPUs."""

from __future__ import annotations

import logging
import os
import socket
import threading

import jax
import numpy as np

from ..backend_jax import before_start

log = logging.getLogger("octavo")

SIZE = 256  # bytes of what rank 0 tells the others
PATIENCE = 120  # seconds, for a process that is starting
HEARTBEAT = 30  # seconds that whoever waits for a lost rank has
REMEDY = "make a new LLM, in a new process"


def free_address() -> str:
    """A port of this host that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def begin(device: str) -> None:
    """Has JAX start, when it does, as one of several processes. Raises ValueError if it has started."""
    before_start(device)
    try:
        # JAX that has started refuses what differs from what is set
        for num_devices in (-1, 1):
            jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ValueError(
            "distributed_executor_backend='mp' on jax: JAX has started in this process, for an engine or for other "
            "work, and joins others only before: make this LLM in a new process"
        ) from error
    # else JAX would abort whoever outlives a lost rank, and have each wait for all at its end
    jax.config.update("jax_enable_recoverability", True)
    # of use on a CPU only
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def start(meeting: str, rank: int, size: int, device: str) -> None:
    """Makes this process one of `size`, with one device. Raises ValueError if JAX has started without."""
    begin(device)
    try:
        jax.distributed.initialize(meeting, size, rank, local_device_ids=None if device == "cpu" else [rank],
                                   initialization_timeout=PATIENCE, heartbeat_timeout_seconds=HEARTBEAT)  # fmt: skip
    except RuntimeError as error:
        raise ValueError(f"distributed_executor_backend='mp' on jax: {error}") from error


def leave() -> None:
    """Parts from the others. Rank 0 goes last: JAX aborts those whose meeting place is gone."""
    jax.distributed.shutdown()


def end_if_stuck() -> None:
    """Ends this process in a while if it computes on a GPU: nothing breaks off what waits there for a lost rank."""
    timer = threading.Timer(HEARTBEAT, _end_on_gpu)
    timer.daemon = True
    timer.start()


def _end_on_gpu() -> None:
    if jax.default_backend() != "cpu":
        log.error("a rank was lost %d s ago, and what runs on this GPU may wait for it for ever: ending", HEARTBEAT)
        os._exit(1)


def world(device: str) -> tuple[int, int, int] | None:
    """Rank, number of processes and 0, where jax.distributed.initialize has been called with several."""
    before_start(device)
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return jax.process_index(), jax.process_count(), 0


def check_devices(size: int) -> None:
    """Raises ValueError unless the processes' devices are as many as the configuration asks for: none may stand by."""
    if (there := jax.device_count()) != size:
        raise ValueError(f"{jax.process_count()} JAX processes have {there} devices, and tensor_parallel_size {size} "
                         "needs all of them, and no more")  # fmt: skip


class Board:
    """What rank 0 tells the others before they have a line to it."""

    store = None

    def write(self, data: bytes) -> None:
        self._broadcast(data)

    def read(self) -> bytes:
        return self._broadcast(b"")

    def _broadcast(self, data: bytes) -> bytes:
        from jax.experimental.multihost_utils import broadcast_one_to_all

        padded = np.zeros(SIZE, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        # pickled bytes end where they say, whatever lies behind
        return np.asarray(broadcast_one_to_all(padded)).tobytes()
