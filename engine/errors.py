"""Errors that are no one's fault who asked: the engine's own."""

from __future__ import annotations


class OctavoError(RuntimeError):
    """One of these."""


class EngineDeadError(OctavoError):
    """The engine's process has ended. Nothing more will come of it; make a new AsyncLLM."""


class RequestFailedError(OctavoError):
    """A step failed and ended the requests that were running. The engine serves on: the request may be tried again."""


class QueueFullError(OctavoError):
    """As many requests wait as max_num_queued_reqs allows."""


class AsleepError(OctavoError):
    """A request came while the engine was asleep: LLM.wake_up first."""


class TokenizerDiedError(OctavoError):
    """The tokenizer's process ended several times at the same text."""


class RankLostError(OctavoError):
    """A process that runs a part of the model has ended, or is stuck. Nothing more will come of this engine."""


class DivergenceError(RankLostError):
    """Two ranks that must have the same state do not."""
