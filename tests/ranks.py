"""What tests of several processes plant: importable, so that the other ranks have it too."""

from __future__ import annotations

import sys
from typing import Any

from octavo.models.logit_edits import LogitsProcessor


def is_follower() -> bool:
    """Whether this process was started by rank 0."""
    return any(name.endswith("parallel.follower") for name in sys.argv)


def _astray(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    """Other logits in ranks other than 0 once a row has 40 ids."""
    if not is_follower():
        return logits
    far = (history.num_known_R >= 40)[:, None]
    place_V = ops.arange(logits.shape[1], like=history.num_known_R)[None]
    return ops.xp.where(far & (place_V == 5), 1e9, logits)


def _stumbling(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    """Fails in ranks other than 0."""
    return None if is_follower() else logits


def _falling(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    """Fails in every rank."""
    return None


ASTRAY, STUMBLING, FALLING = (LogitsProcessor(f.__name__[1:], f) for f in (_astray, _stumbling, _falling))
