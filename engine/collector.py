"""Python's garbage collector, kept off for a while, or from all that there is."""

from __future__ import annotations

import gc
import threading

LOOKS = 1000  # collections of what is young for one of everything; Python's own is 10
OWN = 1000  # objects that an interpreter may have frozen itself: 3.12 begins with some 400


class Paused:
    """with Paused() as pause: nothing is collected until `pause.end()`, or the end of the block.

    What was off before stays off. Threads may overlap: whoever found the collector on turns it on again.
    """

    def __init__(self) -> None:
        self.was_on = False

    def __enter__(self) -> Paused:
        self.was_on = gc.isenabled()
        gc.disable()
        return self

    def end(self) -> None:
        """Lets it collect again."""
        if self.was_on:
            gc.enable()
        self.was_on = False

    def __exit__(self, *error: object) -> None:
        self.end()


def age() -> None:
    """Makes old all that there is: only collections of everything look at it again. For what was made to be kept.

    Nothing is looked at for it. Left undone where somebody has frozen objects: those would not be so any more.
    """
    if gc.get_freeze_count() < OWN:
        gc.freeze()
        gc.unfreeze()


class Seldom:
    """with Seldom(): collections of everything come a hundred times more seldom, those of what is young as before.

    Beside a loaded model each takes 0.1 s and more, while the device waits. Threads may overlap. Thresholds that
    somebody sets meanwhile stay.
    """

    lock = threading.Lock()
    depth = 0
    before = during = (0, 0, 0)

    def __enter__(self) -> None:
        with Seldom.lock:
            if not Seldom.depth:
                Seldom.before = young, middle, old = gc.get_threshold()
                gc.set_threshold(young, middle, max(old, LOOKS))
                Seldom.during = gc.get_threshold()
            Seldom.depth += 1

    def __exit__(self, *error: object) -> None:
        with Seldom.lock:
            Seldom.depth -= 1
            if not Seldom.depth and gc.get_threshold() == Seldom.during:
                gc.set_threshold(*Seldom.before)
