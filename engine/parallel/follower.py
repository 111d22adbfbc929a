"""A rank other than 0: runs the programs that rank 0 runs, on its own shards, as it is told."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from multiprocessing.connection import Connection
from queue import Queue, SimpleQueue
from typing import Any

from ..child import GONE, Caught, portable, unpickled
from ..runner import Hidden, Pending, Runner
from .lead_runner import Hashing, StateDigest
from .team import (
    READY,
    Agree,
    Bye,
    Check,
    Done,
    Failed,
    Forward,
    Head,
    Here,
    Join,
    Load,
    Register,
    Reset,
    Result,
    Sleep,
    WakeUp,
    WarmUp,
)

log = logging.getLogger("octavo")


class Leader:
    """Rank 0 as another rank sees it. The process ends when rank 0 does."""

    def __init__(self, commands: Connection, results: Connection):
        self.results, self.lock = results, threading.Lock()
        self.inbox: SimpleQueue[tuple[Any, bytes]] = SimpleQueue()
        threading.Thread(target=_listen, args=(commands, self.inbox), name="octavo-rank-0", daemon=True).start()

    def receive(self, kind: type | None = None) -> Any:
        """The next command; of that kind, if one is named."""
        return self.receive_bytes(kind)[0]

    def receive_bytes(self, kind: type | None = None) -> tuple[Any, bytes]:
        """The next command, and as it came. Raises ValueError for one that cannot be read here."""
        command, data = self.inbox.get()
        if isinstance(command, ValueError):
            raise command
        if isinstance(command, Bye):
            raise SystemExit(0)
        assert kind is None or isinstance(command, kind), f"{command} is no {kind}"
        return command, data

    def report(self, report: Any) -> None:
        data = pickle.dumps(report)
        with self.lock:
            self.results.send_bytes(data)

    def least(self, available: int | None) -> int | None:
        """The smallest of all ranks' free memory."""
        self.report(Here(available))
        return self.receive(Agree).available

    def await_load(self) -> None:
        """Waits until rank 0 has its weights."""
        self.receive(Load)


class Results:
    """Reads what the steps of this rank's replica give, and reports it. In a thread: launches do not wait for that."""

    def __init__(self, leader: Leader):
        self.leader = leader
        self.queue: Queue[Pending] = Queue()
        threading.Thread(target=self._run, name="octavo-results", daemon=True).start()

    def _run(self) -> None:
        while True:
            pending = self.queue.get()
            with Caught() as caught:
                self.leader.report(Result(pending.result()))
            if caught.error is not None:
                self.leader.report(Failed(portable(caught.error)))
            self.queue.task_done()


def _received(data: bytes) -> tuple[Any, bytes]:
    """A command, or why it cannot be read here; and as it came."""
    try:
        return unpickled(data, "the process of another rank"), data
    except ValueError as error:
        return error, data


def _listen(commands: Connection, inbox: SimpleQueue[tuple[Any, bytes]]) -> None:
    """Passes commands on. Ends the process where rank 0 ended without a word: a collective may be waiting for it."""
    try:
        while True:
            inbox.put(received := _received(commands.recv_bytes()))
            if isinstance(received[0], Bye):
                return
    except GONE:
        log.error("rank 0 is gone")
        os._exit(1)


def serve(commands: Connection, results: Connection) -> None:
    """The life of a process that rank 0 started."""
    leader = Leader(commands, results)
    with Caught() as caught:
        join: Join = leader.receive(Join)
        logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s %(name)s rank {join.rank}: %(message)s")
        log.setLevel(join.log_level)
        from ..build import build_device
        from .world import World

        backend = join.config.backend
        world = World.of_child(join, leader)
        runner, reports = build_device(join.config, join.weights, world=world).own, world.reports(join.config)
        del join
        try:
            follow(leader, runner, reports)
        except SystemExit:
            # threads of gloo do not survive the interpreter's end; JAX's processes part at theirs
            if backend == "torch":
                os._exit(0)
            raise
    if caught.error is not None:
        # rank 0 raises it, with the traceback where that says more than the words
        leader.report(Failed(portable(caught.error)))
        raise SystemExit(1)


def follow(leader: Leader, runner: Runner, reports: bool = False) -> None:
    """Does as it is told until rank 0 says goodbye, and then leaves the process (SystemExit).

    `reports`: it also tells what its steps give, since rank 0 is in another replica.
    """
    leader.report(Done(READY))
    results = Results(leader) if reports else None
    state, hidden = StateDigest(runner.backend), Hidden(None, {})
    unread: Hashing | None = None
    plan: Any = None
    failed = False
    while True:
        command: Any = None
        with Caught() as caught:
            command, data = leader.receive_bytes()
            if isinstance(command, Reset):
                if results:
                    results.queue.join()
                runner.reset()
                state.plans, unread, failed = 0, None, False
                leader.report(Done(command.number))
            elif failed:
                # what was to follow the step that failed
                continue
            elif isinstance(command, Forward):
                state.planned(data)
                plan = command.plan
                for name, embeds in command.embeds.items():
                    runner.embeds[name] = embeds
                hidden = runner.launch_forward(plan, command.taps)
            elif isinstance(command, Head):
                pending = runner.launch_head(plan, hidden, command.mask)
                if results:
                    results.queue.put(pending)
            elif isinstance(command, Check):
                unread = state.launch(runner, command.step, state.plans)
            elif isinstance(command, Sleep):
                plan, hidden = None, Hidden(None, {})
                runner.sleep(command.level)
                leader.report(Done(command.number))
            elif isinstance(command, WakeUp):
                runner.wake_up(command.tags, command.weights)
                leader.report(Done(command.number))
            elif isinstance(command, Register):
                runner.register(command.processor)
            else:
                assert isinstance(command, WarmUp)
                runner.warm_up()
        if caught.error is not None:
            failed, unread = True, None
            leader.report(Failed(portable(caught.error)))
        elif unread is not None and not isinstance(command, Check):
            # a command later, so that the device never waits for the host
            leader.report(state.value(unread))
            unread = None
