"""Has ranks other than 0 say in the end what they held and sent: SPY is a processor that does nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ranks import is_follower

from octavo.engine import follower
from octavo.models.interface import leaves
from octavo.models.logit_edits import LogitsProcessor

FOLDER = "OCTAVO_TEST_SPY"  # the environment variable that says where to


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
            Path(os.environ[FOLDER], f"{rank}.json").write_text(json.dumps(held(runner)))

    follower.follow = follow
