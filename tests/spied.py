"""Has ranks other than 0 say in the end what they held and sent, or fail: SPY is a processor that does nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ranks import is_follower

from octavo.engine.parallel import follower
from octavo.engine.parallel.stage_runner import StageRunner
from octavo.models.interface import leaves
from octavo.models.logit_edits import LogitsProcessor

# environment variables: the folder to say it in; the step at which the first stage fails, if it is to
FOLDER, FAILS = "OCTAVO_TEST_SPY", "OCTAVO_TEST_FAILS"


def unchanged(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    return logits


SPY = LogitsProcessor("spy", unchanged)


def held(runner: Any) -> dict[str, Any]:
    """Bytes of weights and cache of a torch runner, and what it told others, as JSON has it."""
    weights, cache = (sum(x.nbytes for x in leaves(t)) for t in (runner.weights, runner.cache.groups))
    counts = [[kind, list(names), size, n] for (kind, names, size), n in runner.backend.mesh.counts.items()]
    return {"weights": weights, "cache": cache, "counts": counts}


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """What has been said, by rank."""
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}


if is_follower():
    # a process of another rank has read SPY
    plain = follower.follow

    def follow(leader: follower.Leader, runner: Any, *more: Any) -> None:
        try:
            plain(leader, runner, *more)
        finally:
            rank = runner.backend.mesh.rank
            if FOLDER in os.environ:
                Path(os.environ[FOLDER], f"{rank}.json").write_text(json.dumps(held(runner)))

    follower.follow = follow
    run = StageRunner.launch_forward

    def launch_forward(self: StageRunner, plan: Any, taps: tuple[str, ...] = ()) -> Any:
        if self.is_first and plan.step == int(os.environ.get(FAILS, -1)):
            raise ValueError("the first stage fails alone")
        return run(self, plan, taps)

    StageRunner.launch_forward = launch_forward
