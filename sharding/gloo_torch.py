"""What gloo lacks: to break a group off, and to wait so that one can be told of a lost rank.

Gloo knows no abort. It notices a rank's end by the socket, and then tells those whose arrays have not begun to move:
who waits for one that is halfway there is told by nobody, and waits for the group's whole time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

LOOK = timedelta(seconds=0.5)  # between looks at whether a rank was lost
AT_ONCE = timedelta(milliseconds=1)
UNSENT = 1  # a tag that no message has


class Message:
    """A send or a receive that can be waited for in turns, as sums and gathers can: a thread waits for it in one go.

    Gloo closes all of a group's connections if the time for a message is up.
    """

    def __init__(self, work: Any) -> None:
        self.work: Any = work
        self.error: RuntimeError | None = None
        self.pending = threading.Lock()
        self.pending.acquire()

    def run(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            self.work = None
            self.pending.release()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.pending.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the message is still on its way")
        self.pending.release()
        if self.error is not None:
            raise self.error


class Messenger:
    """The thread that waits for a process's messages, one at a time. It starts with the first."""

    def __init__(self) -> None:
        self.messages, self.thread = SimpleQueue[Message | None](), None

    def message(self, work: Any) -> Message:
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="octavo-messages", daemon=True)
            self.thread.start()
        self.messages.put(message := Message(work))
        return message

    def run(self) -> None:
        while message := self.messages.get():
            message.run()

    def close(self) -> None:
        self.messages.put(None)


def wait(work: Any, is_lost: Callable[[], bool], groups: dict[Any, Any]) -> None:
    """Waits for a sum, a gather or a Message, but not for long once a rank is lost.

    What was broken off ends within a look. What does not is waited for by a thread that keeps the groups: the end of a
    group waits for its works.
    """
    was_lost = False
    while True:
        began = time.monotonic()
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            # it ended so, if it did not take the whole time; a scattered sum never says that it has ended
            if time.monotonic() - began < LOOK.total_seconds():
                raise
        if was_lost:
            threading.Thread(target=outlast, args=(work, list(groups.values())), daemon=True).start()
            raise RuntimeError("a rank of the mesh was lost in the middle of a collective")
        was_lost = is_lost()


def outlast(work: Any, groups: list[Any]) -> None:
    """Keeps groups until a work has ended that nobody waits for any more."""
    with suppress(RuntimeError):
        work.wait()
    groups.clear()


def break_off(group: Any) -> None:
    """Ends what is under way in a group: a receive that is not met in time closes all its connections."""
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, UNSENT).wait(AT_ONCE)
