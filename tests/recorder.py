"""Stands for what records CUDA graphs, on a CPU: a replay computes anew from the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from octavo.engine import backend_torch
from octavo.engine.backend_torch import TorchBackend
from octavo.engine.graph_torch import arrays_of

SPOILED = 77  # of whole numbers: an id like any other


class Recorder:
    """Replays by running again and leaving the results where the recording left them; what lay there is overwritten.

    So is what other recordings left: CUDA's share their memory. Recording itself must change nothing, so it runs on
    zeros (CUDA's runs nothing), and puts back what was there.
    """

    def __init__(self, waits: bool = False) -> None:
        self.replays, self.waits = 0, waits
        self.pool: dict[int, ref[Tensor]] = {}

    def finish(self) -> None:
        """What is recorded can be replayed."""

    def renew(self) -> None:
        """There is no pool."""

    def try_out(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        return run(), not self.waits

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        state = [x for cell in run.__closure__ or () for x in arrays_of(cell.cell_contents)]
        kept = [x.clone() for x in state]
        for x in state:
            x.zero_()
        left = run()
        for x, old in zip(state, kept, strict=True):
            x.copy_(old)
        held = {x.untyped_storage().data_ptr() for x in state}
        own = [x.untyped_storage().data_ptr() not in held for x in arrays_of(left)]
        self.pool |= {id(x): ref(x) for x, mine in zip(arrays_of(left), own, strict=True) if mine}

        def replay() -> None:
            self.replays += 1
            for there in self.pool.values():
                if (x := there()) is not None:
                    x.fill_(float("nan") if x.is_floating_point() else SPOILED)
            for x, new, mine in zip(arrays_of(left), arrays_of(run()), own, strict=True):
                if mine:
                    x.copy_(new)

        return replay, left


def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every torch backend made from now on takes graphs from a Recorder."""
    recorder, make = Recorder(), TorchBackend.__init__

    def init(self: TorchBackend, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.capture, self.graph_tokens, self.eager = recorder, backend_torch.GRAPH_TOKENS, False

    monkeypatch.setattr(TorchBackend, "__init__", init)
    return recorder
