"""Gives ranks other than 0 what stands for CUDA graphs on a CPU: PLAIN is a processor that does nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import is_follower
from recorder import graphs_on_a_cpu

from octavo.models.logit_edits import LogitsProcessor


def unchanged(logits: Any, history: Any, params: Any, ops: Any) -> Any:
    return logits


PLAIN = LogitsProcessor("plain", unchanged)

if is_follower():
    # a process of another rank has read PLAIN, and makes its backend next
    graphs_on_a_cpu(pytest.MonkeyPatch())
