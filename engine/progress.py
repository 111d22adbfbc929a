"""The progress bar of LLM.generate."""

from __future__ import annotations

import time
from types import TracebackType


class Progress:
    """Counts finished requests and generated tokens; draws on stderr, and only when wanted. A context manager."""

    def __init__(self, total: int | None, wanted: bool):
        self.num_tokens, self.start, self.bar = 0, time.perf_counter(), None
        if wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            # stdout may be a file of results
            console = Console(stderr=True)
            self.bar = Bar(*columns, TextColumn("{task.fields[speed]}"), transient=False, console=console)
            self.task = self.bar.add_task("", total=total, speed="")

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, num_tokens: int, num_finished: int) -> None:
        """Takes in one step."""
        self.num_tokens += num_tokens
        if self.bar:
            speed = f"{self.num_tokens / (time.perf_counter() - self.start):.1f} tok/s"
            self.bar.update(self.task, advance=num_finished, speed=speed)
