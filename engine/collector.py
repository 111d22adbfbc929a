"""Python's garbage collector, kept off for a while."""

from __future__ import annotations

import gc


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
