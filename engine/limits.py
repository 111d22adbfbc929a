"""How much runs at a time: what was compiled is the bound, and less may be asked for while requests are running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .checks import integer


class Bounds(Protocol):
    """What the programs were made for: a SchedulerConfig."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """Requests that run at a time, and tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @staticmethod
    def of(bounds: Bounds) -> Limits:
        """All that was compiled."""
        return Limits(bounds.max_num_seqs, bounds.max_num_batched_tokens)

    def changed(self, bounds: Bounds, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> Limits:
        """The same with what is not None. Raises ValueError beyond the bounds, or where the two do not go together."""
        seqs = self.max_num_seqs if max_num_seqs is None else integer("max_num_seqs", max_num_seqs, 1)
        tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is not None:
            tokens = integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        for name, value in (("max_num_seqs", seqs), ("max_num_batched_tokens", tokens)):
            most = getattr(bounds, name)
            if value > most:
                raise ValueError(f"{name} {value} is more than the {most} that the engine was made for")
        if tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}: each running request takes a token "
                "a step, so raise the one or lower the other"
            )
        if not bounds.enable_chunked_prefill and tokens < bounds.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {tokens} is less than max_model_len {bounds.max_model_len}, and without "
                "chunked prefill a prompt is computed in one step"
            )
        return Limits(seqs, tokens)
