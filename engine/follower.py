"""A rank other than 0: runs the programs that rank 0 runs, on its own shards, as it is told."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from .child import GONE, Caught, portable
from .lead_runner import StateDigest
from .runner import Hidden, Runner
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
    WarmUp,
)

log = logging.getLogger("octavo")


class Leader:
    """Rank 0 as another rank sees it. The process ends when rank 0 does."""

    def __init__(self, commands: Connection, results: Connection):
        self.results = results
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_listen, args=(commands, self.inbox), name="octavo-rank-0", daemon=True).start()

    def receive(self, kind: type | None = None) -> Any:
        """The next command; of that kind, if one is named."""
        return self.receive_bytes(kind)[0]

    def receive_bytes(self, kind: type | None = None) -> tuple[Any, bytes]:
        data = self.inbox.get()
        command = pickle.loads(data)
        if isinstance(command, Bye):
            raise SystemExit(0)
        assert kind is None or isinstance(command, kind), f"{command} is no {kind}"
        return command, data

    def report(self, report: Any) -> None:
        self.results.send_bytes(pickle.dumps(report))

    def least(self, available: int | None) -> int | None:
        """The smallest of all ranks' free memory."""
        self.report(Here(available))
        return self.receive(Agree).available

    def await_load(self) -> None:
        """Waits until rank 0 has its weights."""
        self.receive(Load)


def _listen(commands: Connection, inbox: SimpleQueue[bytes]) -> None:
    """Passes commands on. Ends the process where rank 0 ended without a word: a collective may be waiting for it."""
    try:
        while True:
            inbox.put(data := commands.recv_bytes())
            if isinstance(pickle.loads(data), Bye):
                return
    except GONE:
        log.error("rank 0 is gone")
        os._exit(1)


def serve(commands: Connection, results: Connection) -> None:
    """The life of a process that rank 0 started."""
    leader = Leader(commands, results)
    join: Join = leader.receive(Join)
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s %(name)s rank {join.rank}: %(message)s")
    log.setLevel(join.log_level)
    from .world import World

    backend = join.config.backend
    with Caught() as caught:
        from .build import build_device

        world = World.of_child(join, leader)
        runner = build_device(join.config, join.weights, world=world).runner
        del join
        try:
            follow(leader, runner)
        except SystemExit:
            # threads of gloo do not survive the interpreter's end; JAX's processes part at theirs
            if backend == "torch":
                os._exit(0)
            raise
    if caught.error is not None:
        # rank 0 raises it, with the traceback where that says more than the words
        leader.report(Failed(portable(caught.error)))
        raise SystemExit(1)


def follow(leader: Leader, runner: Runner) -> None:
    """Does as it is told until rank 0 says goodbye, and then leaves the process (SystemExit)."""
    leader.report(Done(READY))
    state, hidden = StateDigest(runner.backend), Hidden(None, {})
    unread: tuple[int, Any] | None = None
    plan: Any = None
    while True:
        command, data = leader.receive_bytes()
        with Caught() as caught:
            if isinstance(command, Forward):
                state.planned(data)
                plan = command.plan
                for name, embeds in command.embeds.items():
                    runner.embeds[name] = embeds
                hidden = runner.launch_forward(plan, command.taps)
            elif isinstance(command, Head):
                runner.launch_head(plan, hidden, command.mask)
            elif isinstance(command, Check):
                unread = command.step, state.launch(runner)
            elif isinstance(command, Register):
                runner.register(command.processor)
            elif isinstance(command, WarmUp):
                runner.warm_up()
            else:
                assert isinstance(command, Reset)
                runner.reset()
                state.plans, unread = 0, None
                leader.report(Done(command.number))
        if caught.error is not None:
            leader.report(Failed(portable(caught.error)))
            _await_reset(leader, runner, state)
        elif unread is not None and not isinstance(command, Check):
            # a command later, so that the device never waits for the host
            leader.report(state.value(*unread))
            unread = None


def _await_reset(leader: Leader, runner: Runner, state: StateDigest) -> None:
    """Passes over what was to follow a step that failed."""
    while not isinstance(command := leader.receive(), Reset):
        continue
    runner.reset()
    state.plans = 0
    leader.report(Done(command.number))
