"""Stages that take their time without using a processor: SLEEPY is a processor whose import has other ranks' sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ranks import is_follower

from octavo.engine.parallel.stage_runner import StageRunner
from octavo.models.logit_edits import LogitsProcessor

SECONDS = 0.25  # that a stage takes for a step's layers, much more than what else a loaded machine does in a step


def unchanged(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    return logits


SLEEPY = LogitsProcessor("sleepy", unchanged)


def sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the layers of every stage made from now on take SECONDS: what was received is there then, nothing is sent."""
    use = StageRunner.use

    def slowly(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(SECONDS)
            return program(*args)

        return run

    def use_slowly(self: StageRunner, model: Any, layout: Any) -> None:
        use(self, model, layout)
        self.forward, self.forward_all, self.forward_stage = map(
            slowly, (self.forward, self.forward_all, self.forward_stage)
        )

    monkeypatch.setattr(StageRunner, "use", use_slowly)


if is_follower():
    sleeps(pytest.MonkeyPatch())
