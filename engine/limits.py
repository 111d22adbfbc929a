"""How much runs at a time, and who goes first: what was compiled is the bound, and less may be asked for later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .block_manager import BlockManager
from .checks import integer
from .policy import POLICIES
from .request import Request

HELD = 3  # steps that prompts wait at most until they fill one


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step, and who goes first."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # tokens of one request a step, while others want some; 0: no limit
    policy: str = "fcfs"  # or "priority", or FILE.py:NAME
    order: str = "decode_first"  # or "prefill_first": who has more than one token to compute goes first
    watermark: float = 0.0  # part of each pool that an admission leaves free while others run
    batches: int = 1  # how many may be in flight, each with its share of the requests, where stages work on several
    full: tuple[int, ...] = ()  # tokens of a step without padding: a busy one is cut down to one of these

    @property
    def cuts(self) -> bool:
        """Whether busy steps are made full."""
        return bool(self.full) and self.enable_chunked_prefill and self.batches == 1

    def __post_init__(self) -> None:
        seqs, budget, length = self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len
        if seqs < 1 or length < 2:
            raise ValueError(f"max_num_seqs {seqs} must be at least 1, max_model_len {length} at least 2")
        if budget < seqs:
            raise ValueError(f"max_num_batched_tokens {budget} is less than max_num_seqs {seqs}")
        if not self.enable_chunked_prefill and budget < length:
            raise ValueError(f"max_num_batched_tokens {budget} < max_model_len {length}, which needs chunked prefill")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold {self.long_prefill_token_threshold} is negative")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ValueError(f"long_prefill_token_threshold {self.long_prefill_token_threshold} needs chunked prefill")
        if self.policy not in POLICIES and ":" not in self.policy:
            raise ValueError(f"policy {self.policy!r} is none of {', '.join(POLICIES)}, nor FILE.py:NAME")
        if self.order not in ("decode_first", "prefill_first"):
            raise ValueError(f"order {self.order!r} is neither decode_first nor prefill_first")
        object.__setattr__(self, "full", tuple(self.full))  # JSON has lists
        if self.batches < 1:
            raise ValueError(f"batches {self.batches} must be at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark {self.watermark} is not a part of the pool, from 0 to under 1")


@dataclass(frozen=True)
class Limits:
    """Requests that run at a time, and tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @staticmethod
    def of(bounds: SchedulerConfig) -> Limits:
        """All that was compiled."""
        return Limits(bounds.max_num_seqs, bounds.max_num_batched_tokens)

    def changed(self, bounds: SchedulerConfig, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> Limits:
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


def check_length(r: Request, max_model_len: int) -> None:
    """Raises ValueError for a prompt that is empty or too long, or of which more is to be read than there is."""
    length = len(r.prompt)
    if not length:
        raise ValueError(f"request {r.id!r} has an empty prompt")
    if length + r.samples > max_model_len:
        raise ValueError(
            f"request {r.id!r} has a prompt of {length} tokens: {'with at least one token of output ' * r.samples}"
            f"it is longer than max_model_len {max_model_len}"
        )
    if r.wanted and r.wanted.stop > length:
        raise ValueError(f"request {r.id!r} wants to read place {r.wanted.stop - 1} of {length} tokens")


def check_room(r: Request, max_model_len: int, blocks: BlockManager) -> None:
    """Raises ValueError for a request that no empty cache has room for."""
    length = len(r.prompt)
    # the last token that is sampled is never computed, so it needs no room
    needed = longest(r, max_model_len) - r.samples
    if (group := blocks.too_small(needed, length)) is not None:
        raise ValueError(
            f"request {r.id!r} with a prompt of {length} tokens and max_tokens {r.max_tokens} may need "
            f"{blocks.peak(group, needed, length)} blocks of {blocks.block_size} tokens, and there are "
            f"{blocks.num_blocks[group] - 1}"
        )


def longest(r: Request, max_model_len: int) -> int:
    """Tokens, prompt and output, at which a request ends by length."""
    return max_model_len if r.max_tokens is None else min(len(r.prompt) + r.max_tokens, max_model_len)


def queue_order(families: Sequence[Sequence[Request]], seats: int, max_model_len: int) -> list[int]:
    """The order in which prompts are queued that come at once, from somebody who waits for all of them.

    As they came; but of more than there are seats, the last that fill those go longest first, by what they may make at
    most. So the seats run empty at about the same time, where some would work on beside ever fewer others.
    """
    first = len(families)
    while first and seats > 0:
        first -= 1
        seats -= len(families[first])
    if not first:
        return list(range(len(families)))
    most = [longest(family[0], max_model_len) - len(family[0].prompt) for family in families]
    return [*range(first), *sorted(range(first, len(families)), key=lambda i: -most[i])]


def busy_step(config: SchedulerConfig, most: int, ours: list[int], theirs: int, held: int) -> tuple[int, int]:
    """(tokens of a step at most, for how many steps prompts have waited then), for a step in which some wait for seats.

    `ours`: what each running request wants, in order; `theirs`: what those want that can be admitted. Prompts that make
    less than a full step wait, HELD steps at most, while others decode. If they make more, the step is as large as they
    fill, and the rest joins the next; but a size that leaves them less than a quarter of what they want does not pay.
    """
    decodes, wanted = ours.count(1), sum(ours) + theirs
    if decodes and (config.order != "decode_first" or ours[:decodes].count(1) < decodes):
        # prompts go before some that decode: those would be what does not fit
        return most, 0
    if 0 < decodes < wanted < config.full[0] and held < HELD:
        return decodes, held + 1
    least = decodes + max(1, (wanted - decodes) // 4)
    return next((n for n in reversed(config.full) if least <= n <= min(wanted, most)), most), 0
