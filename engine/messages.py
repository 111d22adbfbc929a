"""What AsyncLLM and the engine's process say to each other. Values only; each can be pickled.

A request goes by a number of its own, so that news of one that is gone cannot pass for news of another of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .outputs import RequestOutput
from .prompts import Prompt
from .sampling_params import SamplingParams

# methods of LLM that may be asked for
QUESTIONS = (
    "get_stats", "reset_prefix_cache", "set_limits", "get_metrics", "metrics_text", "sleep", "wake_up", "is_sleeping"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """The first command: LLM's arguments, and the level of its log."""

    model: Any
    weights: Any
    arguments: Mapping[str, Any]
    log_level: int


@dataclass(frozen=True, slots=True)
class Add:
    number: int
    request_id: str
    prompt: Prompt  # with its ids
    params: SamplingParams | None
    priority: int
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    question: str  # of QUESTIONS
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built: what it found."""

    max_model_len: int
    vocab_size: int
    num_blocks: tuple[int, ...]
    default_params: SamplingParams


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class News:
    """What one step brought, of all requests; the first output of each has its prompt's ids, later ones none."""

    outputs: tuple[tuple[int, RequestOutput], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is refused, or was ended by an error."""

    number: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    value: Any
    error: BaseException | None


Command = Add | Abort | Ask
Report = Ready | Failed | News | Ended | Answer
